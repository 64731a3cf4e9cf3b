"""Megatron's pairs: the worked bytes, documents, and every contradiction between index and data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.formats.layout import DocumentIndex, ShardLayout
from corpus_server.corpus.formats.registry import data_path
from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus
from tests.corpora import megatron_index, recognise, write_megatron, write_raw, write_sparse

DOCUMENTS = [[10, 11, 12, 99], [20, 99], [30, 31, 32, 33, 99]]
BIN = bytes.fromhex("0a000b000c006300140063001e001f00200021006300")
IDX = bytes.fromhex(
    "4d4d494449445800000100000000000000080300000000000000040000000000000004000000020000000500000000000000"
    "0000000008000000000000000c000000000000000000000000000000010000000000000002000000000000000300000000000000"
)


def _write(folder: Path, data: bytes, index: bytes) -> Path:
    (folder / "x.bin").write_bytes(data)
    (folder / "x.idx").write_bytes(index)
    return folder / "x.bin"


def _documents(layout: ShardLayout) -> DocumentIndex:
    assert layout.documents is not None
    return layout.documents


def test_worked_bytes(tmp_path: Path) -> None:
    assert len(IDX) == 102
    layout = recognise(_write(tmp_path, BIN, IDX))
    assert (layout.format, layout.dtype.name, layout.runs[0].data_offset) == ("megatron", "uint16", 0)
    assert layout.num_tokens == 11
    documents = _documents(layout)
    assert documents.num_documents == 3
    assert [documents.document_range(n) for n in range(3)] == [(0, 4), (4, 6), (6, 11)]
    assert documents.sequence_lengths().tolist() == [4, 2, 5]
    assert documents.find_problem() is None
    written = write_megatron(tmp_path / "again", DOCUMENTS)
    assert (written.read_bytes(), written.with_suffix(".idx").read_bytes()) == (BIN, IDX)


@pytest.mark.parametrize("name", ["x", "x.bin", "x.idx"])
def test_may_be_named_by_prefix_data_or_index(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, BIN, IDX)
    assert data_path(tmp_path / name) == path


@pytest.mark.parametrize("there", ["x.bin", "x.idx", "x", None])
def test_a_prefix_stands_for_a_whole_pair_alone(tmp_path: Path, there: str | None) -> None:
    """Not for half of one, and not where a file or folder has its name."""
    if there == "x":
        _write(tmp_path, BIN, IDX)
        (tmp_path / "x").mkdir()
    elif there is not None:
        (tmp_path / there).write_bytes(IDX)
    assert data_path(tmp_path / "x") == tmp_path / "x"


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_every_served_dtype(tmp_path: Path, dtype: str) -> None:
    layout = recognise(write_megatron(tmp_path / "x", DOCUMENTS, dtype=dtype))
    assert (layout.dtype.name, layout.num_tokens) == (dtype, 11)
    assert _documents(layout).document_range(2) == (6, 11)


@pytest.mark.parametrize(
    "index", [{"modes": True}, {"version": 2, "flags": b"\0"}, {"version": 3, "flags": b"\0\0"}]
)
def test_modes_and_plain_later_versions_are_read(tmp_path: Path, index: dict[str, Any]) -> None:
    layout = recognise(write_megatron(tmp_path / "x", DOCUMENTS, **index))
    assert [_documents(layout).document_range(n) for n in range(3)] == [(0, 4), (4, 6), (6, 11)]


def test_a_document_may_hold_several_sequences(tmp_path: Path) -> None:
    layout = recognise(_write(tmp_path, BIN, megatron_index([4, 2, 5], documents=[0, 2, 3])))
    assert [_documents(layout).document_range(n) for n in range(2)] == [(0, 6), (6, 11)]


def test_may_be_empty(tmp_path: Path) -> None:
    layout = recognise(_write(tmp_path, b"", megatron_index([])))
    assert (layout.num_tokens, _documents(layout).num_documents) == (0, 0)
    assert _documents(layout).find_problem() is None


@given(lengths=st.lists(st.integers(0, 50), max_size=80), data=st.data())
@settings(max_examples=60, deadline=None)
def test_documents_are_the_ones_written(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(lengths)), max_size=10))
    documents = [0, *sorted(cuts), len(lengths)]
    ends = np.cumsum([0, *lengths])
    folder = tmp_path_factory.mktemp("megatron")
    path = _write(folder, bytes(2 * int(ends[-1])), megatron_index(lengths, documents=documents))
    index = _documents(recognise(path))
    expected = [(ends[a], ends[b]) for a, b in pairwise(documents)]
    assert [index.document_range(n) for n in range(index.num_documents)] == expected
    assert index.find_problem() is None


def test_every_length_of_the_index_but_its_own_is_refused(tmp_path: Path) -> None:
    for length in [*range(len(IDX)), len(IDX) + 1, len(IDX) + 8]:
        path = _write(tmp_path, BIN, (IDX + bytes(8))[:length])
        with pytest.raises(UnreadableCorpus, match=r"x\.idx: .*(MMIDIDX|copy interrupted)"):
            recognise(path)


def test_every_length_of_the_data_but_its_own_is_refused(tmp_path: Path) -> None:
    for length in [*range(len(BIN)), len(BIN) + 1, len(BIN) + 2]:
        path = _write(tmp_path, (BIN + bytes(2))[:length], IDX)
        held = f"its sequences end at byte 22, but x.bin holds {length} bytes"
        said = f"{length} bytes are not a whole number of uint16 tokens" if length % 2 else held
        with pytest.raises(UnreadableCorpus, match=f"{said}; was the copy interrupted"):
            recognise(path)


def test_a_legacy_index_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"TNTIDX\0\0" + bytes(40))
    with pytest.raises(UnreadableCorpus, match="an index of the legacy fairseq format, which is not served"):
        recognise(tmp_path / "train.bin")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (megatron_index([], documents=[]), "no document entries"),
        (megatron_index([], documents=[], version=4), "version 4 is unknown"),
        (
            megatron_index([], documents=[])[:33],
            "33 bytes end inside the Megatron header of 34; was the copy",
        ),
        (megatron_index([4, 2, 5], version=2**56 + 1), "version 72057594037927937 is unknown"),
        (
            megatron_index([4, 2, 5], pointers=[0, 8, 12 - 2**31]),
            "sequences end at byte -2147483626, but x.bin holds 22 bytes",
        ),
        (
            megatron_index([4, 2, 5], pointers=[0, 8 - 2**31, 12]),
            "sequence 1 begins at byte -2147483640, the one before it ends at byte 8",
        ),
        (b"MMIDIDX\0\1" + bytes(40), "no Megatron index: expected it to begin with MMIDIDX, got b'MMIDIDX"),
        (megatron_index([4, 2, 5], documents=[1, 2, 3]), "cover sequences 1 to 3, expected 0 to 3"),
        (megatron_index([4, 2, 5], documents=[0, 1, 2]), "cover sequences 0 to 2, expected 0 to 3"),
        (megatron_index([4, 2, 5], pointers=[2, 8, 12]), "first sequence begins at byte 2"),
        (megatron_index([4, 2, 4]), "end at byte 20, but x.bin holds 22 bytes"),
        (megatron_index([4, 2, 5], pointers=[0, 10, 12]), "sequence 1 begins at byte 10, .* ends at byte 8"),
        (megatron_index([4, 2, 5], pointers=[0, 8, 12 - 2**32]), "overflowed 32 bits"),
        (megatron_index([4, 2, 5], pointers=[0, 8 - 2**32, 12]), "overflowed 32 bits"),
        (megatron_index([4, 2, 5], dtype="int64"), "tokens are int64 .dtype code 5., served are"),
        (megatron_index([4, 2, 5], dtype="float32"), "tokens are float32"),
        (megatron_index([4, 2, 5], dtype="other"), "unknown .dtype code 99."),
        (megatron_index([4, 2, 5], version=2, flags=b"\1"), "version 2 with spans"),
        (megatron_index([4, 2, 5], version=3, flags=b"\0\1"), "version 3 with spans"),
        (b"TNTIDX\0\0" + bytes(40), "legacy fairseq index"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, index: bytes, message: str) -> None:
    with pytest.raises(UnreadableCorpus, match=message):
        recognise(_write(tmp_path, BIN, index))


def test_pointers_beyond_32_bits_are_read(tmp_path: Path) -> None:
    length = 2**30
    write_sparse(tmp_path / "x.bin", 5 * length)
    (tmp_path / "x.idx").write_bytes(megatron_index([length] * 5))
    assert _documents(recognise(tmp_path / "x.bin")).document_range(4) == (4 * length, 5 * length)


def test_pointers_that_wrapped_at_32_bits_are_found(tmp_path: Path) -> None:
    length = 2**30
    write_sparse(tmp_path / "x.bin", 5 * length)
    pointers = [(2 * length * i + 2**31) % 2**32 - 2**31 for i in range(5)]
    (tmp_path / "x.idx").write_bytes(megatron_index([length] * 5, pointers=pointers))
    with pytest.raises(UnreadableCorpus, match="overflowed 32 bits"):
        recognise(tmp_path / "x.bin")


@pytest.mark.parametrize("pointer", [10**6, 2002, -2])
def test_a_document_beyond_the_data_is_an_error(tmp_path: Path, pointer: int) -> None:
    pointers = list(range(0, 2000, 2))
    pointers[500] = pointer
    write_raw(tmp_path / "x.bin", np.zeros(1000))
    (tmp_path / "x.idx").write_bytes(megatron_index([1] * 1000, pointers=pointers))
    index = _documents(recognise(tmp_path / "x.bin"))
    for number in (499, 500):
        with pytest.raises(ReadFailed, match=rf"x\.idx: the entry of document {number} contradicts"):
            index.document_range(number)


@pytest.mark.parametrize("wrong", [5, 2**17 - 1, 2**17, 2**17 + 3])
def test_reading_all_goes_on_from_one_chunk_to_the_next(tmp_path: Path, wrong: int) -> None:
    """Chunks hold 2^17 entries; a wrong one lies inside, at the border of two chunks or behind it.

    A negative length is wrong although the pointers agree with it.
    """
    count = 2**17 + 10
    pointers, documents, lengths = list(range(0, 2 * count, 2)), list(range(count + 1)), [1] * count
    pointers[wrong] += 2
    documents[wrong] -= 2
    lengths[wrong : wrong + 2] = [-1, 3]
    found = [
        _documents(recognise(_write(tmp_path, bytes(2 * count), index))).find_problem()
        for index in (
            megatron_index([1] * count, pointers=pointers),
            megatron_index(lengths),
            megatron_index([1] * count, documents=documents),
            megatron_index([1] * count),
        )
    ]
    what = "does not begin where the one before it ends, or has a negative length"
    sequence = f"x.idx: sequence {wrong} {what}"
    assert found == [sequence, sequence, f"x.idx: document {wrong} begins before the one before it", None]


def test_a_document_that_begins_before_the_first_sequence_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path, BIN, megatron_index([6, 5, 0], documents=[0, -1, 3]))
    index = _documents(recognise(path))
    for number in (0, 1):
        with pytest.raises(ReadFailed, match=rf"x\.idx: the entry of document {number} contradicts"):
            index.document_range(number)


def test_an_index_truncated_while_open_is_an_error_and_no_signal(tmp_path: Path) -> None:
    index = _documents(recognise(_write(tmp_path, BIN, IDX)))
    with (tmp_path / "x.idx").open("r+b") as file:
        file.truncate(40)
    for read in (lambda: index.document_range(0), index.sequence_lengths):
        with pytest.raises(CorpusChanged, match=r"x\.idx: 102 bytes at opening, 40 now"):
            read()


def test_an_index_of_a_billion_sequences_opens_at_once(tmp_path: Path) -> None:
    """A sparse index of zero-length sequences: 20 GB that must not be read."""
    num_sequences = 10**9
    write_raw(tmp_path / "x.bin", [])
    with (tmp_path / "x.idx").open("wb") as file:
        head = bytearray(megatron_index([]))[:34]
        head[18:26] = num_sequences.to_bytes(8, "little")
        head[26:34] = (num_sequences + 1).to_bytes(8, "little")
        file.write(head)
        file.seek(34 + 12 * num_sequences + 8 * num_sequences)
        file.write(num_sequences.to_bytes(8, "little"))
    index = _documents(recognise(tmp_path / "x.bin"))
    assert index.num_documents == num_sequences
    assert index.document_range(num_sequences - 1) == (0, 0)
