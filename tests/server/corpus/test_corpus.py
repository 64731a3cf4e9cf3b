"""A corpus of one file or many: totals, ranges, documents, tokenizer, and what opening costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.index import index
from corpus_server.errors import InvalidParameter, UnknownDocument, UnreadableCorpus
from tests.corpora import (
    open_corpus,
    open_files,
    spec,
    write_megatron,
    write_npy,
    write_raw,
)
from tests.server.corpus.test_tokenizers import write_ranks, write_tokenizer_json


def _folder(path: Path, sizes: list[int]) -> Path:
    path.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        write_raw(path / f"s{number}.bin", np.arange(size))
    return path


def test_describes_itself(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1, 2])
    write_npy(tmp_path / "b.npy", [70000], dtype="uint32")
    with open_corpus(tmp_path, name="web") as corpus:
        description = json.loads(json.dumps(corpus.describe()))
        fingerprint = corpus.fingerprint
        assert corpus.fingerprint_kind == "sampled"
    assert description == {
        "name": "web",
        "num_tokens": 3,
        "dtype": "uint32",
        "num_documents": None,
        "fingerprint": fingerprint,
        "fingerprint_kind": "sampled",
        "fingerprints": {"sampled": fingerprint},
        "eot": None,
        "eot_first": False,
        "tokenizer": None,
        "tokenizer_identity": None,
        "num_masks": 0,
        "has_metadata": False,
        "address": None,
        "license": None,
        "shards": [
            {"name": "a.bin", "file": "a.bin", "format": "raw", "num_tokens": 2, "dtype": "uint16"}
            | {"data_offset": 0, "size_bytes": 4},
            {"name": "b.npy", "file": "b.npy", "format": "npy", "num_tokens": 1, "dtype": "uint32"}
            | {"data_offset": 128, "size_bytes": 132},
        ],
    }


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_range_is_the_slice_of_all_shards_joined(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    total = sum(sizes)
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    with open_corpus(_folder(tmp_path_factory.mktemp("c"), sizes), name="c") as corpus:
        pieces = corpus.pieces(np.array([start]), np.array([start + count])).places.tolist()
        joined = np.concatenate([shard.tokens for shard in corpus.shards])
        found = [corpus.shards[number].tokens[a : a + size] for number, a, size in pieces]
        assert np.concatenate([np.empty(0, "<u2"), *found]).tolist() == joined[start : start + count].tolist()
        assert all(size for _, _, size in pieces)


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 7), (6, 1), (7, 0), (3, -1), (2**64, 1)])
def test_a_range_outside_is_refused(tmp_path: Path, start: int, count: int) -> None:
    blamed = "count" if 0 <= start <= 6 else "start"
    expected = {"count": r"start \+ count must be at most 6", "start": r"start must be in \[0, 6\]"}[blamed]
    with (
        open_corpus(_folder(tmp_path / "c", [2, 4]), name="c") as corpus,
        pytest.raises(InvalidParameter, match=expected) as caught,
    ):
        corpus.check_range(start, count)
    assert caught.value.parameter == blamed


@given(shards=st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_documents_are_numbered_over_all_shards(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("documents")
    expected, position = [], 0
    for number, lengths in enumerate(shards):
        write_megatron(folder / f"s{number}", [[7] * length for length in lengths])
        for length in lengths:
            expected.append((position, position + length))
            position += length
    with open_corpus(folder, name="d") as corpus:
        assert corpus.num_documents == len(expected)
        assert [corpus.document_range(n) for n in range(len(expected))] == expected
        for outside in (-1, len(expected)):
            with pytest.raises(UnknownDocument, match=rf"\[0, {len(expected)}\), got {outside}"):
                corpus.document_range(outside)
        starts, lengths = corpus.sequences()
        assert list(zip(starts, starts + lengths, strict=True)) == expected
        holders = [number for number, (start, stop) in enumerate(expected) for _ in range(start, stop)]
        assert [corpus.document_at(token) for token in range(corpus.num_tokens)] == holders


def test_without_an_index_on_every_shard_there_are_no_documents(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1, 2]])
    write_npy(tmp_path / "b.npy", [1])
    with open_corpus(tmp_path, name="mixed") as corpus:
        assert corpus.num_documents is None
        for number, read in ((0, lambda: corpus.document_range(0)), (None, corpus.sequences)):
            with pytest.raises(UnknownDocument, match="'mixed' has no document index") as caught:
                read()
            assert (caught.value.parameter, caught.value.received) == ("document", number)
        assert corpus.document_at(0) is None


@pytest.mark.parametrize(
    ("dtypes", "eot", "accepted"),
    [
        (["uint16"], 65_536, "[0, 65535] (uint16 tokens)"),
        (["uint16"], -1, "[0, 65535] (uint16 tokens)"),
        (["uint8", "uint16", "uint8"], 65_536, "[0, 65535] (uint16, uint8 tokens)"),
        (["int32"], 2**31, "[0, 2147483647] (int32 tokens)"),
        (["uint16"], 65_535, None),
        (["uint8", "uint16"], 256, None),
        (["int32"], 0, None),
    ],
)
def test_the_end_of_text_is_an_id_that_a_token_can_have(
    tmp_path: Path, dtypes: list[str], eot: int, accepted: str | None
) -> None:
    for number, dtype in enumerate(dtypes):
        write_npy(tmp_path / f"{number}.npy", [1], dtype=dtype)
    if accepted is None:
        with open_corpus(tmp_path, eot=eot) as corpus:
            assert corpus.describe()["eot"] == corpus.eot == eot
        return
    with pytest.raises(InvalidParameter) as caught:
        open_corpus(tmp_path, eot=eot)
    assert caught.value.detail == f"eot must be a token id in {accepted}, got {eot}"


def test_document_ends_say_the_end_of_text(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "c", [2, 4, 3])
    index(spec(folder / "s0.bin", eot=2))
    index(spec(folder / "s1.bin", eot=1))
    with pytest.raises(UnreadableCorpus) as caught:
        open_corpus(folder)
    assert caught.value.detail == (
        f"{folder}: the documents of s1.bin end at token 1, those of s0.bin at token 2; "
        "was indexing interrupted? Run corpus-server index --force on the corpus again"
    )
    index(spec(folder / "s0.bin", eot=1), force=True)
    for eot in (None, 1):
        with open_corpus(folder, eot=eot) as corpus:
            assert corpus.eot == 1
    with pytest.raises(UnreadableCorpus) as caught:
        open_corpus(folder, eot=3)
    assert caught.value.detail == (
        f"{folder}: eot is 3, but the documents of s1.bin end at token 1; "
        "leave eot out, or run corpus-server index --force on the corpus"
    )


def test_a_tokenizer_is_found_beside_the_shards(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2])
    write_ranks(tmp_path)
    for target in (tmp_path, path):
        with open_corpus(target) as corpus:
            assert corpus.describe()["tokenizer"] == "any.tiktoken"
            assert corpus.tokenizer is not None
    write_tokenizer_json(tmp_path)
    with open_corpus(tmp_path) as corpus, open_corpus(path) as same:
        assert corpus.tokenizer_name == "tokenizer.json"
        assert corpus.tokenizer is same.tokenizer


def test_several_tokenizers_of_one_kind_are_a_question(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [1, 2])
    for name in ("b.tiktoken", "c.tiktoken"):
        (tmp_path / name).touch()
    with pytest.raises(UnreadableCorpus, match=r"b\.tiktoken and c\.tiktoken; say which one: tokenizer="):
        open_corpus(tmp_path)


def test_the_named_tokenizer_wins(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2])
    (tmp_path / "tokenizer.json").write_text("damaged")
    with open_corpus(path, tokenizer="none") as corpus:
        assert (corpus.tokenizer, corpus.tokenizer_name) == (None, None)
    with open_corpus(path, tokenizer="bytes") as corpus:
        assert corpus.tokenizer_name == "bytes"
    other = write_ranks(tmp_path)
    with open_corpus(path, tokenizer=str(other)) as corpus:
        assert corpus.tokenizer_name == other.name


def test_a_tokenizer_that_cannot_be_read_is_an_error_at_opening(tmp_path: Path) -> None:
    """And not at the first request for text, days later."""
    path = write_raw(tmp_path / "a.bin", [1, 2])
    before = open_files()
    with pytest.raises(UnreadableCorpus, match=r"missing\.json: the tokenizer cannot be read: No such file"):
        open_corpus(path, tokenizer=str(tmp_path / "missing.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnreadableCorpus, match=r"no tokenizer\.json: it has no field 'model'; give"):
        open_corpus(path)
    assert not open_files() - before


@pytest.mark.parametrize(("dtype", "expected"), [("uint8", "bytes"), ("uint16", None)])
def test_uint8_tokens_are_bytes(tmp_path: Path, dtype: str, expected: str | None) -> None:
    with open_corpus(write_raw(tmp_path / "a.bin", [1, 2], dtype="uint8"), name="a", dtype=dtype) as corpus:
        assert corpus.tokenizer_name == expected


def test_one_bad_shard_closes_the_others_and_is_named(tmp_path: Path) -> None:
    _folder(tmp_path / "c", [2, 4])
    (tmp_path / "c" / "s2.bin").write_bytes(b"odd")
    before = open_files()
    with pytest.raises(UnreadableCorpus, match=r"s2\.bin: 3 bytes"):
        open_corpus(tmp_path / "c", name="c")
    assert not open_files() - before


def test_a_small_corpus_is_sampled_whole(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", [7, 9])
    write_npy(tmp_path / "b.npy", [-5, 100_000], dtype="int32")
    write_raw(tmp_path / "c.bin", [])
    with open_corpus(tmp_path) as corpus:
        assert corpus.sampled_ids == (4, -5, 100_000)


@pytest.mark.parametrize(
    ("tokens", "strange"),
    [([255], None), ([0], None), ([3, 256, 2], 256), ([0, 256], 256)],
    ids=["fits", "zero", "above", "zero-and-above"],
)
def test_ids_that_the_tokenizer_does_not_have_are_named(
    tmp_path: Path, tokens: list[int], strange: int | None
) -> None:
    write_npy(tmp_path / "a.npy", np.array(tokens), dtype="int32")
    with open_corpus(tmp_path, tokenizer="bytes") as corpus:
        warning = next(iter(corpus.warnings()), None)
    if strange is None:
        assert warning is None
    else:
        assert warning is not None
        assert (
            f"corpus 'c' holds token {strange}, but the ids of its tokenizer (bytes) are below 256" in warning
        )


def test_negative_ids_are_named_without_a_tokenizer(tmp_path: Path) -> None:
    write_npy(tmp_path / "a.npy", np.array([3, -100, 3]), dtype="int32")
    with open_corpus(tmp_path) as corpus:
        assert "holds token -100, and no token has a negative id" in corpus.warnings()[0]


def test_negative_ids_that_are_served_as_uint32_are_named(tmp_path: Path) -> None:
    np.array([3, -1, 3], dtype=np.int32).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path / "a.bin", dtype="uint32") as corpus:
        said = "holds token 4294967295, which is -1 as int32, and no token has a negative id"
        assert said in corpus.warnings()[0]
