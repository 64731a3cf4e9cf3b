"""Headerless files: what the dtype makes of them, and guesses that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corpus_server.errors import InvalidParameter, UnreadableCorpus
from tests.corpora import recognise, some_tokens, write_raw


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_holds_the_tokens_of_the_dtype_that_is_said(tmp_path: Path, dtype: str) -> None:
    layout = recognise(write_raw(tmp_path / "a.bin", [1, 2, 3], dtype=dtype), dtype=dtype)
    assert (layout.format, layout.dtype, layout.data_offset) == ("raw", np.dtype(dtype), 0)
    assert (layout.num_tokens, layout.documents) == (3, None)


def test_is_uint16_unless_said_otherwise(tmp_path: Path) -> None:
    assert recognise(write_raw(tmp_path / "a.bin", [1, 2, 3])).dtype == np.dtype("<u2")


def test_may_be_empty(tmp_path: Path) -> None:
    assert recognise(write_raw(tmp_path / "a.bin", [])).num_tokens == 0


@pytest.mark.parametrize(("num_bytes", "dtype"), [(7, None), (1, "uint16"), (6, "uint32"), (1, "int32")])
def test_refuses_a_broken_last_token(tmp_path: Path, num_bytes: int, dtype: str | None) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(num_bytes))
    with pytest.raises(UnreadableCorpus, match=rf"{num_bytes} bytes are not a whole number .* say its dtype"):
        recognise(tmp_path / "a.bin", dtype=dtype)


@pytest.mark.parametrize("dtype", ["int64", ">u2", "float32", "tokens", np.dtype("uint64"), 3, ""])
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


@pytest.mark.parametrize("tokens", [np.zeros(4000), np.arange(4000), np.arange(4000) % 2, some_tokens(4000)])
def test_uint16_tokens_are_never_taken_for_wider_ones(tmp_path: Path, tokens: np.ndarray) -> None:
    assert recognise(write_raw(tmp_path / "a.bin", tokens)).num_tokens == 4000


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
    with pytest.raises(UnreadableCorpus, match=message + r".*say (the )?dtype"):
        recognise(path)
    assert recognise(path, dtype="uint8").num_tokens == 2
