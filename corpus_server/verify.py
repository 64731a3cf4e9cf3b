"""Full content hashes: record them once, find the damaged block later.

Both read every byte of every shard, two blocks at a time, in a few MiB of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from corpus_server.blocks import hash_blocks, hashing_pool
from corpus_server.corpus import open_shards
from corpus_server.errors import CorpusChanged, CorpusServerError, ReadFailed
from corpus_server.fingerprint import (
    BLOCK_BYTES,
    RecordedHashes,
    ShardHashes,
    load_sidecar,
    sampled_fingerprint,
    save_sidecar,
    sidecar_path,
)
from corpus_server.formats import ShardFile, TokenDtype, list_shards, token_dtype
from corpus_server.formats.recognise import data_path
from corpus_server.shard import Shard

Progress = Callable[[int, int], None]
"""Called with (bytes_done, bytes_total) after every block, in the caller's thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What `record` did."""

    sidecar: Path
    fingerprints: dict[str, str]
    num_shards: int
    num_tokens: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadBlock:
    """A block whose bytes differ from the recorded ones, or cannot be read.

    Attributes:
        shard: name of the shard.
        block: number of the block, each `BLOCK_BYTES` long from the first token on.
        start, stop: its tokens, counted inside the shard.
        reason: what is wrong with it.
    """

    shard: str
    block: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardProblem:
    """A shard, or the corpus where `shard` is None, that is not what it was."""

    shard: str | None
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        sidecar: the recorded hashes compared with; None if there are none, then only headers,
            indices, sizes and the readability of every byte were checked.
        fingerprint: the full fingerprint where it was confirmed, else None.
        bad_blocks, problems: what is wrong.
    """

    sidecar: Path | None
    fingerprint: str | None
    num_shards: int
    num_tokens: int
    bytes_read: int
    bad_blocks: tuple[BadBlock, ...]
    problems: tuple[ShardProblem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.bad_blocks and not self.problems


def record(path: str | Path, *, dtype: object = None, progress: Progress | None = None) -> Recorded:
    """Hash the corpus `path` as it is now and publish its sidecar atomically, replacing an older one.

    Raises:
        CorpusChanged: a shard was written to meanwhile; nothing is published.
        ReadFailed: the disk did not deliver; nothing is published.
        UnreadableCorpus: not a corpus, or its folder cannot be written to.
    """
    path = data_path(Path(path))
    shards = open_shards(path, dtype=None if dtype is None else token_dtype(dtype))
    try:
        tick = _Ticker(sum(shard.data_bytes for shard in shards), progress)
        with hashing_pool() as pool:
            hashes = [_hash_shard(shard, pool, tick) for shard in shards]
        recorded = RecordedHashes(sampled=sampled_fingerprint(shards), shards=tuple(hashes))
        for shard in shards:
            shard.check_unchanged()
    finally:
        for shard in shards:
            shard.close()
    return Recorded(
        sidecar=save_sidecar(path, recorded),
        fingerprints={"sampled": recorded.sampled, "full": recorded.full},
        num_shards=len(shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
        bytes_read=tick.bytes_done,
    )


def verify(path: str | Path, *, dtype: object = None, progress: Progress | None = None) -> Verification:
    """Read the corpus `path` whole and compare it with its recorded hashes, if there are any.

    A damaged shard does not end the search: every bad block and every unreadable shard is reported.

    Raises:
        UnreadableCorpus: `path` holds no shards at all, or its sidecar is damaged.
    """
    path = data_path(Path(path))
    recorded = load_sidecar(path)
    accepted = token_dtype(dtype) if dtype is not None else _recorded_dtype(recorded)
    files = list_shards(path, any_dtype=accepted is None)
    found = _Findings()
    shards = _open_all(files, accepted, found, in_folder=path.is_dir())
    try:
        opened = [shard for shard in shards if shard is not None]
        tick = _Ticker(sum(shard.data_bytes for shard in opened), progress)
        expected = _expected(files, recorded, found)
        with hashing_pool() as pool:
            for shard, hashes in zip(shards, expected, strict=True):
                if shard is not None:
                    _verify_shard(shard, hashes, pool, tick, found)
        if recorded is not None and found.nothing and sampled_fingerprint(opened) != recorded.sampled:
            found.problems.append(
                ShardProblem(shard=None, detail="the sidecar's sampled fingerprint is wrong")
            )
    finally:
        for shard in shards:
            if shard is not None:
                shard.close()
    return Verification(
        sidecar=None if recorded is None else sidecar_path(path),
        fingerprint=recorded.full if recorded is not None and found.nothing else None,
        num_shards=len(files),
        num_tokens=sum(shard.num_tokens for shard in opened),
        bytes_read=tick.bytes_done,
        bad_blocks=tuple(found.bad_blocks),
        problems=tuple(found.problems),
    )


class _Ticker:
    """Counts the bytes read and reports them."""

    def __init__(self, bytes_total: int, progress: Progress | None) -> None:
        self.bytes_done = 0
        self._bytes_total = bytes_total
        self._progress = progress

    def add(self, count: int) -> None:
        self.bytes_done += count
        if self._progress is not None:
            self._progress(self.bytes_done, self._bytes_total)


@dataclass(slots=True)
class _Findings:
    bad_blocks: list[BadBlock] = field(default_factory=list)
    problems: list[ShardProblem] = field(default_factory=list)

    @property
    def nothing(self) -> bool:
        return not self.bad_blocks and not self.problems


def _hash_shard(shard: Shard, pool: ThreadPoolExecutor, tick: _Ticker) -> ShardHashes:
    digests = []
    for block in hash_blocks(shard, pool):
        if block.digest is None:
            raise block.error or ReadFailed(f"{shard.name}: block {block.number} cannot be read")
        digests.append(block.digest)
        tick.add(block.num_bytes)
    return ShardHashes(
        name=shard.name, num_tokens=shard.num_tokens, dtype=shard.dtype.name, digests=tuple(digests)
    )


def _recorded_dtype(recorded: RecordedHashes | None) -> TokenDtype | None:
    """Return the one dtype of all recorded shards: headerless files need not be told it again."""
    names = set() if recorded is None else {shard.dtype for shard in recorded.shards}
    return token_dtype(names.pop()) if len(names) == 1 else None


def _open_all(
    files: Sequence[ShardFile], dtype: TokenDtype | None, found: _Findings, *, in_folder: bool
) -> list[Shard | None]:
    shards: list[Shard | None] = []
    for file in files:
        try:
            shards.append(Shard.open(file.path, name=file.name, dtype=dtype, in_folder=in_folder))
        except CorpusServerError as error:
            shards.append(None)
            found.problems.append(ShardProblem(shard=file.name, detail=error.detail))
    return shards


def _expected(
    files: Sequence[ShardFile], recorded: RecordedHashes | None, found: _Findings
) -> list[ShardHashes | None]:
    """Return for each file the hashes recorded for it: by place, or by name where shards came or went."""
    if recorded is None:
        return [None] * len(files)
    if len(files) == len(recorded.shards):
        return list(recorded.shards)
    by_name = {hashes.name: hashes for hashes in recorded.shards}
    names = {file.name for file in files}
    for name in by_name:
        if name not in names:
            found.problems.append(ShardProblem(shard=name, detail="recorded, but the file is missing"))
    for file in files:
        if file.name not in by_name:
            found.problems.append(ShardProblem(shard=file.name, detail="not there when hashes were recorded"))
    return [by_name.get(file.name) for file in files]


def _verify_shard(
    shard: Shard, expected: ShardHashes | None, pool: ThreadPoolExecutor, tick: _Ticker, found: _Findings
) -> None:
    digests: tuple[str, ...] = ()
    if expected is not None:
        digests = expected.digests
        was, now = (expected.num_tokens, expected.dtype), (shard.num_tokens, shard.dtype.name)
        if was != now:
            detail = f"holds {now[0]} {now[1]} tokens, recorded were {was[0]} {was[1]}"
            found.problems.append(ShardProblem(shard=shard.name, detail=detail))
    for block in hash_blocks(shard, pool):
        reason = None if block.error is None else block.error.detail
        if reason is None and block.number < len(digests) and block.digest != digests[block.number]:
            reason = "its bytes differ from the recorded ones"
        if reason is not None:
            start = block.number * BLOCK_BYTES // shard.dtype.itemsize
            stop = start + block.num_bytes // shard.dtype.itemsize
            found.bad_blocks.append(
                BadBlock(shard=shard.name, block=block.number, start=start, stop=stop, reason=reason)
            )
        tick.add(block.num_bytes)
    try:
        problem = None if shard.documents is None else shard.documents.find_problem()
        if problem is not None:
            found.problems.append(ShardProblem(shard=shard.name, detail=problem))
        shard.check_unchanged()
    except (ReadFailed, CorpusChanged) as error:
        found.problems.append(ShardProblem(shard=shard.name, detail=error.detail))
