"""Ends of documents in one array, and our sidecar: its bytes, and every contradiction."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats import documents as module
from corpus_server.corpus.formats.documents import CumulativeEnds
from corpus_server.corpus.index import index
from corpus_server.corpus.shards import content_digest
from corpus_server.corpus.verify import verify
from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus
from tests.corpora import (
    open_corpus,
    open_files,
    open_shard,
    spec,
    write_npy,
    write_raw,
)

TOKENS = [7, 8, 0, 9, 0, 5]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard with its sidecar, for end-of-text token 0."""
    path = write_raw(tmp_path / "a.bin", TOKENS)
    index(spec(path, eot=0))
    return path


def sidecar(shard: Path) -> Path:
    return shard.with_name(shard.name + ".documents")


def opened(shard: Path) -> Corpus:
    return open_corpus(shard, name="c")


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "behind-a-header": {"at": 5},
    "bytes-of-the-file": {"at": 8, "entry": "<u4", "origin": 100, "unit": 4},
}


def array(path: Path, ends: list[int], num_tokens: int, **layout: Any) -> CumulativeEnds:
    """Return the index of a file that holds these ends, in tokens."""
    stored = np.array(ends, "<i8") * layout.get("unit", 1) + layout.get("origin", 0)
    path.write_bytes(bytes(layout.get("at", 0)) + stored.astype(layout.get("entry", "<u8")).tobytes())
    options: dict[str, Any] = {"at": 0, **layout}
    return CumulativeEnds(OpenFile(path), num_documents=len(ends), num_tokens=num_tokens, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ends", [[], [0], [3], [3, 5, 5, 6], [0, 0, 7]])
def test_documents_lie_one_after_another(tmp_path: Path, layout: str, ends: list[int]) -> None:
    with array(tmp_path / "a", ends, max([0, *ends]), **LAYOUTS[layout]) as index:
        ranges = list(zip([0, *ends], ends, strict=False))
        assert [index.document_range(n) for n in range(index.num_documents)] == ranges
        assert index.sequence_lengths().tolist() == [stop - start for start, stop in ranges]
        assert index.find_problem() is None


@pytest.mark.parametrize(
    ("ends", "number"),
    [
        pytest.param([7], 0, id="the only one ends behind the shard"),
        pytest.param([3, 7], 1, id="the last ends behind the shard"),
        pytest.param([-1, 6], 0, id="the first ends before the shard"),
        pytest.param([3, 2, 6], 1, id="ends before it begins"),
        pytest.param([1, 2, 3, 4, 3, 9, 6], 4, id="in the next chunk"),
        pytest.param([1, 2, 3, 2, 5, 6], 3, id="the last of a chunk"),
    ],
)
def test_a_document_outside_its_shard_or_its_neighbours_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[int], number: int
) -> None:
    """Also where all is read, in chunks of 4 ends."""
    monkeypatch.setattr(module, "CHUNK_ENDS", 4)
    with array(tmp_path / "a", ends, 6, **LAYOUTS["bytes-of-the-file"]) as index:
        with pytest.raises(ReadFailed) as caught:
            index.document_range(number)
        assert caught.value.detail == f"a: the entry of document {number} contradicts its neighbours"
        assert caught.value.remedy == "run corpus-server verify, then copy the index again"
        assert index.find_problem() == f"a: document {number} ends before it begins, or behind the shard"


def test_a_file_cut_while_open_is_an_error(tmp_path: Path) -> None:
    with array(tmp_path / "a", [3, 5], 5) as index:
        (tmp_path / "a").write_bytes(b"")
        for read in (lambda: index.document_range(0), index.sequence_lengths):
            with pytest.raises(CorpusChanged, match="a: 16 bytes at opening, 0 now"):
                read()


def test_bytes_as_documented(shard: Path) -> None:
    written = sidecar(shard).read_bytes()
    ends = struct.pack("<QQQ", 3, 5, 6)
    head = b"CORPDOCS" + struct.pack("<QQQQ8s", 1, 0, 6, 3, b"uint16")
    assert (len(head), written[:48], written[96:]) == (48, head, ends)
    with open_shard(shard) as file:
        assert written[48:80] == content_digest([file])
    assert written[80:88] == struct.pack("<Q", xxhash.xxh3_64_intdigest(ends))
    assert written[88:96] == struct.pack("<Q", xxhash.xxh3_64_intdigest(written[:88]))


@pytest.mark.parametrize(
    ("tokens", "ranges"),
    [([], []), ([0], [(0, 1)]), ([7], [(0, 1)]), ([7, 0, 0], [(0, 2), (2, 3)])],
    ids=["empty", "one", "one-without-end", "two"],
)
def test_a_shard_may_hold_few_documents(
    tmp_path: Path, tokens: list[int], ranges: list[tuple[int, int]]
) -> None:
    path = write_npy(tmp_path / "a.npy", np.array(tokens), dtype="uint16")
    index(spec(path, eot=0))
    with opened(path) as corpus:
        assert [corpus.document_range(n) for n in range(corpus.num_documents or 0)] == ranges
    assert verify(spec(path)).ok


@pytest.mark.parametrize("count", [4, 9])
def test_all_ends_are_compared_with_their_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """In chunks of 4 ends; each but the last is once another one that its neighbours allow."""
    path = write_raw(tmp_path / "a.bin", [7, 7, 0] * count)
    index(spec(path, eot=0))
    monkeypatch.setattr(module, "CHUNK_ENDS", 4)
    whole = sidecar(path).read_bytes()
    for wrong in range(count - 1):
        damaged = bytearray(whole)
        damaged[96 + 8 * wrong] -= 1
        sidecar(path).write_bytes(damaged)
        (problem,) = verify(spec(path)).problems
        assert problem.detail == (
            "a.bin.documents: its document ends differ from the ones written; "
            "run corpus-server index on the corpus again, or delete the file"
        )


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"OTHERDOC", "expected it to begin with b'CORPDOCS', got b'OTHERDOC'"),
        (b"CORPDOCS" + struct.pack("<Q", 3), "version 3 is unknown (known: 1, 2)"),
    ],
    ids=["magic", "version"],
)
def test_another_header_is_named(shard: Path, head: bytes, said: str) -> None:
    fields = head + sidecar(shard).read_bytes()[len(head) : 88]
    ends = sidecar(shard).read_bytes()[96:]
    sidecar(shard).write_bytes(fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)) + ends)
    with pytest.raises(UnreadableCorpus) as caught:
        opened(shard)
    assert caught.value.detail == (
        f"{sidecar(shard)}: {said}; run corpus-server index on the corpus again, or delete the file"
    )


def test_every_other_length_is_refused(shard: Path) -> None:
    whole = sidecar(shard).read_bytes()
    for length in [*range(len(whole)), len(whole) + 1, len(whole) + 8]:
        sidecar(shard).write_bytes((whole + bytes(8))[:length])
        with pytest.raises(UnreadableCorpus, match=r"a\.bin\.documents: .*index on the corpus again"):
            opened(shard)


def test_every_flipped_bit_of_the_header_is_refused(shard: Path) -> None:
    whole = sidecar(shard).read_bytes()
    before = open_files()
    for bit in range(96 * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        sidecar(shard).write_bytes(damaged)
        with pytest.raises(UnreadableCorpus, match=r"a\.bin\.documents"):
            opened(shard)
    assert not open_files() - before


def test_a_last_document_that_ends_elsewhere_is_refused(shard: Path) -> None:
    whole = sidecar(shard).read_bytes()
    for end in (5, 7, 2**40):
        sidecar(shard).write_bytes(whole[:-8] + struct.pack("<Q", end))
        with pytest.raises(UnreadableCorpus, match=f"its last document ends at token {end}, expected 6; run"):
            opened(shard)


@pytest.mark.parametrize(
    ("tokens", "dtype", "message"),
    [
        ([*TOKENS, 1], "uint16", "made for 6 uint16 tokens, the file beside it holds 7 uint16"),
        (TOKENS[:3], "uint32", "made for 6 uint16 tokens, the file beside it holds 3 uint32"),
        ([7, 8, 0, 9, 1, 5], "uint16", "made for other tokens"),
    ],
)
def test_other_content_is_refused_with_the_way_out(
    shard: Path, tokens: list[int], dtype: str, message: str
) -> None:
    write_raw(shard, tokens, dtype=dtype)
    with pytest.raises(UnreadableCorpus, match=message + ".*run corpus-server index on the corpus again"):
        open_corpus(shard, name="c", dtype=dtype)
    index(spec(shard, eot=0, dtype=dtype))
    open_corpus(shard, name="c", dtype=dtype).close()


def test_a_sidecar_written_to_is_no_response(shard: Path) -> None:
    with opened(shard) as corpus:
        os.utime(sidecar(shard), ns=(0, 0))
        with pytest.raises(CorpusChanged, match=r"a\.bin\.documents"):
            corpus.document_range(0)


def test_a_billion_documents_open_at_once(tmp_path: Path) -> None:
    """Only single entries are read: the file is sparse, its ends but the last are zero."""
    num_documents = 10**9
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(2 * num_documents)
    with open_shard(path) as shard:
        digest = content_digest([shard])
    fields = b"CORPDOCS" + struct.pack(
        "<QQQQ8s32sQ", 1, 0, num_documents, num_documents, b"uint16", digest, 0
    )
    with sidecar(path).open("wb") as file:
        file.write(fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)))
        file.seek(96 + 8 * (num_documents - 2))
        file.write(struct.pack("<QQ", num_documents - 1, num_documents))
    with opened(path) as corpus:
        assert corpus.num_documents == num_documents
        assert corpus.document_range(num_documents - 1) == (num_documents - 1, num_documents)
