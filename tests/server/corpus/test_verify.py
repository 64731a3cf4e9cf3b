"""Recording hashes, and finding what changed since."""

from __future__ import annotations

import json
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import xxhash

from corpus_server.corpus import fingerprints as fingerprints_module
from corpus_server.corpus import verify as verify_module
from corpus_server.corpus.fingerprints import BLOCK_BYTES
from corpus_server.corpus.formats.megatron import MegatronIndex
from corpus_server.corpus.progress import Meter
from corpus_server.corpus.shards import Shard
from corpus_server.corpus.verify import BadBlock, record, verify
from corpus_server.errors import CorpusChanged, ReadFailed, UnreadableCorpus
from tests.corpora import (
    open_files,
    some_tokens,
    spec,
    write_llmc,
    write_megatron,
    write_raw,
)

NUM_TOKENS = 20_000_000  # 40 MB: two whole blocks and a short one


def _flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 4]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, one with a header, and no hashes yet."""
    path = tmp_path / "corpus"
    path.mkdir()
    write_raw(path / "0.bin", some_tokens(NUM_TOKENS))
    write_llmc(path / "1.bin", some_tokens(1000, seed=1))
    return path


@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33, 64, 65, 96, 128, 129])
def test_blocks_of_any_number_are_hashed_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """With blocks of 64 bytes, read in pieces of 24 bytes, two blocks at a time."""
    monkeypatch.setattr(verify_module, "BLOCK_BYTES", 64)
    for module in (fingerprints_module, verify_module):
        monkeypatch.setattr(module, "FINE_BLOCK_BYTES", 32)
    monkeypatch.setattr(verify_module, "_PIECE_BYTES", 24)
    monkeypatch.setattr(verify_module, "_BLOCKS_AT_ONCE", 2)
    path = write_llmc(tmp_path / "a.bin", some_tokens(num_tokens))
    seen: list[tuple[int, int]] = []
    recorded = record(spec(path), progress=lambda _, done, total, __: seen.append((done, total)))
    content = path.read_bytes()[1024:]
    pieces = [content[i : i + 64] for i in range(0, len(content), 64)]
    document = json.loads(recorded.sidecar.read_text())
    (shard,) = document["shards"]
    fine = [xxhash.xxh3_64(content[i : i + 32]).hexdigest() for i in range(0, len(content), 32)]
    assert document["fine"]["shards"] == ["".join(fine)]
    assert shard["digests"] == [xxhash.xxh3_128(piece).hexdigest() for piece in pieces]
    done = [count for count, total in seen if total == len(content)]
    assert len(done) == len(seen)
    assert done[-1] == len(content)
    assert all(0 <= later - earlier <= 24 for earlier, later in pairwise(done))
    assert verify(spec(path)).ok
    for block, piece in enumerate(pieces):
        _flip(path, 1024 + 64 * block)
        bad = [(bad.block, bad.start, bad.stop) for bad in verify(spec(path)).bad_blocks]
        assert bad == [(block, 32 * block, 32 * block + len(piece) // 2)]
        _flip(path, 1024 + 64 * block)


def test_a_wrong_sampled_fingerprint_in_the_sidecar_is_reported(folder: Path) -> None:
    """The corpus does not open with it, and its bytes are as they were recorded."""
    sidecar = record(spec(folder)).sidecar
    document = json.loads(sidecar.read_text())
    sidecar.write_text(json.dumps({**document, "sampled": "sampled-" + "0" * 64}))
    found = verify(spec(folder))
    assert (found.ok, found.fingerprint, found.bad_blocks) == (False, None, [])
    assert [problem.detail for problem in found.problems] == ["the sidecar's sampled fingerprint is wrong"]


@pytest.mark.parametrize(
    ("shard", "byte", "block", "start", "stop"),
    [
        ("0.bin", 0, 0, 0, 2**23),
        ("0.bin", BLOCK_BYTES - 1, 0, 0, 2**23),
        ("0.bin", BLOCK_BYTES, 1, 2**23, 2**24),
        ("0.bin", 2 * NUM_TOKENS - 1, 2, 2**24, NUM_TOKENS),
        ("1.bin", 1024 + 7, 0, 0, 1000),
    ],
)
def test_one_flipped_bit_names_shard_and_block(
    folder: Path, shard: str, byte: int, block: int, start: int, stop: int
) -> None:
    record(spec(folder))
    _flip(folder / shard, byte)
    result = verify(spec(folder))
    reason = "its bytes differ from the recorded ones"
    assert result.bad_blocks == [BadBlock(shard=shard, block=block, start=start, stop=stop, reason=reason)]
    assert (result.ok, result.problems, result.fingerprint) == (False, [], None)


def test_wrong_fine_digests_in_the_sidecar_are_reported(folder: Path) -> None:
    """Extents of a store are checked by them, and the full fingerprint does not cover them."""
    sidecar = record(spec(folder)).sidecar
    document = json.loads(sidecar.read_text())
    fine = document["fine"]["shards"]
    sidecar.write_text(
        json.dumps({**document, "fine": {**document["fine"], "shards": [fine[0][:-1] + "g", fine[1]]}})
    )
    (bad,) = verify(spec(folder)).bad_blocks
    assert (bad.shard, bad.block, bad.reason) == ("0.bin", 2, "the recorded digests of parts of it are wrong")
    sidecar.write_text(
        json.dumps({**document, "fine": {**document["fine"], "shards": [fine[0][:-1], fine[1]]}})
    )
    with pytest.raises(UnreadableCorpus, match=r"0\.bin has 319 hex digits of fine digests"):
        verify(spec(folder))


def test_without_recorded_hashes_every_byte_is_read_and_that_is_said(folder: Path) -> None:
    result = verify(spec(folder))
    assert result.ok
    assert (result.sidecar, result.fingerprint) == (None, None)


def test_a_truncated_shard_is_reported_and_the_rest_verified(folder: Path) -> None:
    record(spec(folder))
    os.truncate(folder / "1.bin", 2000)
    _flip(folder / "0.bin", 5)
    result = verify(spec(folder))
    assert [(problem.shard, "its header says 1000" in problem.detail) for problem in result.problems] == [
        ("1.bin", True)
    ]
    assert [(bad.shard, bad.block) for bad in result.bad_blocks] == [("0.bin", 0)]


def test_missing_and_new_shards_are_reported(folder: Path) -> None:
    record(spec(folder))
    (folder / "1.bin").unlink()
    assert [(p.shard, p.detail) for p in verify(spec(folder)).problems] == [
        ("1.bin", "recorded, but the file is missing")
    ]
    write_raw(folder / "2.bin", [1])
    write_raw(folder / "3.bin", [1])
    assert [(p.shard, p.detail) for p in verify(spec(folder)).problems] == [
        ("1.bin", "recorded, but the file is missing"),
        ("2.bin", "not there when hashes were recorded"),
        ("3.bin", "not there when hashes were recorded"),
    ]


def test_renamed_shards_are_still_the_same(folder: Path) -> None:
    record(spec(folder))
    (folder / "0.bin").rename(folder / "0-first.bin")
    assert verify(spec(folder)).ok


def test_headerless_dtype_is_taken_from_the_record(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(1000, dtype="uint32", vocabulary=2**17), dtype="uint32")
    record(spec(path, dtype="uint32"))
    assert verify(spec(path)).ok
    assert not verify(spec(path, dtype="int32")).ok


def test_a_shard_written_to_while_recording_is_not_recorded(folder: Path) -> None:
    with pytest.raises(CorpusChanged, match=r"^1\.bin"):
        record(spec(folder), progress=lambda _, done, total, __: os.utime(folder / "1.bin", ns=(0, done)))
    assert not (folder / "corpus.hashes.json").exists()


def test_a_shard_truncated_while_being_read_is_reported_block_by_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block is hashed after the file became shorter."""
    plain = verify_module._hash_block

    def truncate_first(shard: Shard, meter: Meter, start: int) -> verify_module.Digest:
        if shard.name == "0.bin" and start == 2 * BLOCK_BYTES:
            os.truncate(folder / "0.bin", 2 * BLOCK_BYTES)
        return plain(shard, meter, start)

    monkeypatch.setattr(verify_module, "_hash_block", truncate_first)
    with pytest.raises(
        CorpusChanged, match=r"^0\.bin: 40000000 bytes at opening, now it ends at byte 33554432"
    ):
        record(spec(folder))
    os.truncate(folder / "0.bin", 2 * NUM_TOKENS)
    result = verify(spec(folder))
    assert [(bad.block, "now it ends at byte" in bad.reason) for bad in result.bad_blocks] == [(2, True)]
    assert ["40000000 bytes at opening" in problem.detail for problem in result.problems] == [True]


@pytest.mark.parametrize("broken", ["tokens", "index"])
def test_a_failing_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A file of the kernel that answers reads at address 0 with an I/O error stands for the disk."""
    plain = verify_module._hash_block
    path = write_megatron(tmp_path / "x", [[1, 2], [3]])

    def break_first(shard: Shard, meter: Meter, start: int) -> verify_module.Digest:
        file = shard.file if broken == "tokens" else cast("MegatronIndex", shard.documents).file
        with Path("/proc/self/mem").open("rb") as memory:
            os.dup2(memory.fileno(), file.fd, inheritable=False)
        return plain(shard, meter, start)

    monkeypatch.setattr(verify_module, "_hash_block", break_first)
    found = verify(spec(path))
    tokens, index = "x.bin: reading 6 bytes at byte 0 failed", "x.idx: reading 8 bytes at byte 34 failed"
    if broken == "tokens":
        assert [bad.reason for bad in found.bad_blocks] == [f"{tokens}: Input/output error"]
        assert [problem.shard for problem in found.problems] == ["x.bin"]
        with pytest.raises(ReadFailed, match=tokens):
            record(spec(path))
    else:
        assert found.bad_blocks == []
        assert [(problem.shard, problem.detail) for problem in found.problems] == [
            ("x.bin", f"{index}: Input/output error")
        ]


def test_a_sidecar_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2])
    (tmp_path / "a.bin.hashes.json").mkdir()
    with pytest.raises(UnreadableCorpus, match=r"hashes cannot be written: .*; make room"):
        record(spec(path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.bin", "a.bin.hashes.json"]


def test_memory_is_bounded_and_everything_closed(folder: Path) -> None:
    before = open_files()
    tracemalloc.start()
    record(spec(folder))
    verify(spec(folder))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
    assert not open_files() - before
