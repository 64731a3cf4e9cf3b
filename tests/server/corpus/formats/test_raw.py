"""Headerless files: what the dtype makes of them, and guesses that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corpus_server.errors import InvalidParameter, UnreadableCorpus
from tests.corpora import discover, open_corpus, recognise, some_tokens, write_raw


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_holds_the_tokens_of_the_dtype_that_is_said(tmp_path: Path, dtype: str) -> None:
    layout = recognise(write_raw(tmp_path / "a.bin", [1, 2, 3], dtype=dtype), dtype=dtype)
    assert (layout.format, layout.dtype, layout.runs[0].data_offset) == ("raw", np.dtype(dtype), 0)
    assert (layout.num_tokens, layout.documents) == (3, None)


@pytest.mark.parametrize(("num_bytes", "dtype"), [(7, None), (1, "uint16"), (6, "uint32"), (1, "int32")])
def test_refuses_a_broken_last_token(tmp_path: Path, num_bytes: int, dtype: str | None) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(num_bytes))
    with pytest.raises(UnreadableCorpus) as caught:
        recognise(tmp_path / "a.bin", dtype=dtype)
    assert caught.value.detail == (
        f"{tmp_path / 'a.bin'}: {num_bytes} bytes are not a whole number of {dtype or 'uint16'} tokens; "
        "say its dtype (uint8, uint16, uint32, int32), or copy it again if the copy was interrupted"
    )


@pytest.mark.parametrize("dtype", ["int64", ">u2", "float32", "float64", "tokens", np.dtype("uint64"), 3, ""])
def test_refuses_other_dtypes(tmp_path: Path, dtype: object) -> None:
    with pytest.raises(InvalidParameter, match="uint8, uint16, uint32, int32") as caught:
        recognise(write_raw(tmp_path / "a.bin", [1]), dtype=dtype)
    assert caught.value.parameter == "dtype"


@pytest.mark.parametrize(
    ("written", "message"), [("uint32", "look like uint32"), ("int64", "look like int64")]
)
def test_wider_tokens_are_not_read_as_uint16(tmp_path: Path, written: str, message: str) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(4000, dtype="uint32", vocabulary=128_256), dtype=written)
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(path)
    assert recognise(path, dtype="uint32").dtype == np.dtype("<u4")
    assert recognise(path, dtype="uint16").dtype == np.dtype("<u2")


INT64 = (
    "its tokens look like int64, which is not served; write them as uint16 or uint32: "
    "numpy.fromfile(path, 'int64').astype('uint32').tofile(new); "
    "or name it {path},dtype=uint16 if that is really meant"
)
UINT32 = (
    "its tokens look like uint32, but no dtype was given and the default is uint16; "
    "name it {path},dtype=uint32 (or dtype=int32; or dtype=uint16 if that is really meant)"
)


@pytest.mark.parametrize(
    ("halves", "said"),
    [
        pytest.param((256, 0, 256, 0), UINT32, id="large enough"),
        pytest.param((255, 0, 256, 0), UINT32, id="as small as bytes"),
        pytest.param((5, 0, 7, 0), UINT32, id="smaller than bytes"),
        pytest.param((5, 0, 7, 1), None, id="small ids of two bytes"),
        pytest.param((0, 0, 0, 7), None, id="a token behind padding"),
        pytest.param((7, 7, 7, 7), None, id="one token"),
        pytest.param((65535, 65535, 65535, 65535), None, id="padding with ones"),
        pytest.param((256, 0, 0, 0), INT64, id="every second one zero"),
        pytest.param((256, 0, 0, 1), INT64, id="every second lower half zero"),
        pytest.param((256, 1, 0, 0), INT64, id="large int64"),
        pytest.param((256, 0, 1, 0), UINT32, id="none zero"),
    ],
)
def test_a_guess_is_refused_for_what_all_tokens_look_like(
    tmp_path: Path, halves: tuple[int, ...], said: str | None
) -> None:
    assert_guess(write_raw(tmp_path / "a.bin", np.tile(halves, (100, 1))), said)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("numbers", ["ids", "weights"])
def test_numbers_that_are_no_integers_are_not_read_as_tokens(
    tmp_path: Path, dtype: str, numbers: str
) -> None:
    draw = np.random.default_rng(1)
    found = some_tokens(3000, vocabulary=50_257) if numbers == "ids" else draw.normal(size=3000)
    path = write_raw(tmp_path / "a.bin", found, dtype=dtype)
    with pytest.raises(UnreadableCorpus, match=rf"look like {dtype}, .*fromfile\(path, '{dtype}'\)"):
        recognise(path)
    assert recognise(path, dtype="uint16").dtype == np.dtype("<u2")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("label", [-1, -100])
def test_labels_are_not_read_as_tokens(tmp_path: Path, dtype: str, label: int) -> None:
    ids = some_tokens(3000, vocabulary=50_257).astype(dtype)
    ids[100:400] = label
    with pytest.raises(UnreadableCorpus, match=r"with negative ones, .* loss mask"):
        recognise(write_raw(tmp_path / "a.bin", ids, dtype=dtype))
    ids[:] = label
    ids[0] = 5
    with pytest.raises(UnreadableCorpus, match="with negative ones"):
        recognise(write_raw(tmp_path / "b.bin", ids, dtype=dtype))


@pytest.mark.parametrize("vocabulary", [4, 31, 255, 4096, 50_257, 65_536])
@pytest.mark.parametrize("first", [0, 12_000, 16_384, 40_000])
def test_tokens_of_two_bytes_are_never_refused(tmp_path: Path, vocabulary: int, first: int) -> None:
    """Also where all ids lie in the range of the upper halves of floating-point numbers."""
    for seed in range(20):
        ids = first + some_tokens(300, vocabulary=min(vocabulary, 65_536 - first), seed=seed).astype("int64")
        assert recognise(write_raw(tmp_path / "a.bin", ids)).dtype == np.dtype("<u2")


def test_an_empty_file_is_refused_and_an_empty_shard_is_told(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    path = write_raw(tmp_path / "c" / "a.bin", [])
    with pytest.raises(UnreadableCorpus, match=f"{path}: is empty; was the copy interrupted"):
        open_corpus(path)
    assert open_corpus(path.parent).warnings() == [
        "corpus 'c' holds no token: was what wrote it interrupted?"
    ]
    write_raw(tmp_path / "c" / "b.bin", [1])
    assert open_corpus(path.parent).warnings() == []


def assert_guess(path: Path, said: str | None) -> None:
    """Assert that a file is read as uint16, or refused with the words `said`."""
    if said is None:
        assert recognise(path).dtype == np.dtype("<u2")
        return
    with pytest.raises(UnreadableCorpus) as caught:
        recognise(path)
    assert caught.value.detail == f"{path}: {said.format(path=path)}"


def test_the_dtype_of_a_folder_is_said_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    path = write_raw(
        tmp_path / "web" / "a.bin", some_tokens(4000, vocabulary=70_000, dtype="uint32"), dtype="uint32"
    )
    with pytest.raises(UnreadableCorpus, match=f"name it {path.parent},dtype=uint32 "):
        open_corpus(path.parent)


@pytest.mark.parametrize(
    ("content", "is_text"),
    [
        ("Apache License\n" * 5, True),
        ("Grüße, 世界 🦆\t\r\n" * 400, True),  # the sample ends inside a character
        ("x" * 63 + "\x00", False),
        ("short", False),
    ],
)
def test_text_is_not_served_as_tokens_by_mistake(tmp_path: Path, content: str, is_text: bool) -> None:
    data = content.encode()
    (tmp_path / "lic").write_bytes(data + b"." * (len(data) % 2))
    if not is_text:
        assert recognise(tmp_path / "lic").dtype == np.dtype("<u2")
        return
    with pytest.raises(UnreadableCorpus, match=r"printable text, .*corpus-server build .*dtype=uint8"):
        recognise(tmp_path / "lic")
    for dtype in ("uint8", "uint16"):
        assert recognise(tmp_path / "lic", dtype=dtype).dtype == np.dtype(dtype)


def test_in_a_folder_other_names_are_refused(tmp_path: Path) -> None:
    for name in ("a.bin", "b.raw", "c.tokens"):
        write_raw(tmp_path / name, [1])
    assert [layout.reason for layout in discover(tmp_path)] == [
        "no known header: nothing but tokens; no dtype was said, so uint16"
    ] * 3
    assert [layout.reason for layout in discover(tmp_path, dtype="uint8")] == [
        "no known header: nothing but tokens"
    ] * 3
    write_raw(tmp_path / "d.dat", [1])
    assert recognise(tmp_path / "d.dat").num_tokens == 1
    with pytest.raises(UnreadableCorpus) as caught:
        discover(tmp_path)
    assert caught.value.detail == (
        f"{tmp_path / 'd.dat'}: is neither a known token file nor a known side file; "
        "move it out of the corpus folder, or name raw tokens .bin, .raw, .tokens"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("input.txt", "a text file, which is not served; tokenize its text: .* --out DIR; or"),
        ("web_text_document.bin", "web_text_document.idx is missing"),
    ],
)
def test_a_name_under_which_uint16_is_a_guess_needs_the_dtype(
    tmp_path: Path, name: str, message: str
) -> None:
    path = write_raw(tmp_path / name, [1, 2], dtype="uint8")
    with pytest.raises(UnreadableCorpus, match=message + r".*(say (the )?dtype|,dtype=)"):
        recognise(path)
    assert recognise(path, dtype="uint8").num_tokens == 2
