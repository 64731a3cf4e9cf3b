"""Record full content hashes, and find damaged blocks by them later.

Both read every byte of every shard, two blocks at a time, in a few MiB of memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.fingerprints import (
    BLOCK_BYTES,
    FINE_BLOCK_BYTES,
    FINE_DIGITS,
    RecordedHashes,
    ShardHashes,
    load_sidecar,
    sampled_fingerprint,
    save_sidecar,
    sidecar_path,
)
from corpus_server.corpus.formats.masks import MASK_DTYPES, MASK_NAMES, find_strange
from corpus_server.corpus.formats.registry import mask_names
from corpus_server.corpus.metadata import DocumentTable
from corpus_server.corpus.metadata.files import find_problem, metadata_files, record_digests
from corpus_server.corpus.opening import cut_shards, file_opener, open_shards
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.selection import list_shards
from corpus_server.corpus.shards import Shard, contents
from corpus_server.corpus.views import View, open_corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import (
    CorpusChanged,
    CorpusServerError,
    MissingPackage,
    ReadFailed,
    UnreadableCorpus,
)

_NUM_THREADS: Final = 2  # one waits for the disk while the other hashes
_BLOCKS_AT_ONCE: Final = 16
_PIECE_BYTES: Final = 1 << 20  # bytes; stays in the processor's cache between reading and hashing


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What `record` did."""

    sidecar: Path
    fingerprints: dict[str, str]
    num_shards: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadBlock:
    """A block whose bytes differ from the recorded ones, or cannot be read."""

    shard: str
    block: int  # blocks of `BLOCK_BYTES` are counted from the first token
    start: int  # its tokens [start, stop), numbered inside the shard
    stop: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardProblem:
    """A shard, or the corpus where `shard` is None, that is not what it was."""

    shard: str | None
    detail: str


@dataclass(kw_only=True, slots=True)
class Verification:
    """What `verify` found; without recorded hashes (`sidecar` is None), that every byte can be read."""

    sidecar: Path | None
    fingerprint: str | None = None  # the full one, if it was confirmed
    num_shards: int = 0
    num_tokens: int = 0
    bad_blocks: list[BadBlock] = field(default_factory=list)
    problems: list[ShardProblem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.bad_blocks and not self.problems

    def add_problem(self, shard: str | None, detail: str | None) -> None:
        """Report a problem of a shard, or of the corpus if `shard` is None; nothing if `detail` is None."""
        if detail is not None:
            self.problems.append(ShardProblem(shard=shard, detail=detail))

    def check(self, shard: Shard, look: Callable[[], str | None]) -> None:
        """Report what a look at a shard returns, or the error of reading it."""
        try:
            self.add_problem(shard.name, look())
        except (ReadFailed, CorpusChanged) as error:
            self.add_problem(shard.name, error.detail)


def record(spec: CorpusSpec, *, progress: Progress | None = None) -> Recorded:
    """Hash a corpus, of a view its corpus, and its metadata as they are now; publish each sidecar atomically.

    Publishes nothing if a shard was written to meanwhile, or if the disk did not deliver.
    """
    with ExitStack() as opened, ThreadPoolExecutor(_NUM_THREADS, "hash-blocks") as pool:
        shards = open_shards(spec, opened)
        content = contents(shards)
        meter = Meter("hashing", sum(each.data_bytes for each in content), progress)
        hashes = tuple(_hash_shard(each, pool, meter) for each in content)
        recorded = RecordedHashes(sampled=sampled_fingerprint(content), shards=hashes)
        for each in content:
            each.file.check_unchanged()
    if files := metadata_files(spec):
        try:
            record_digests(files[0].parent)
        except OSError as error:
            what = f"the digest of the metadata cannot be written: {error.strerror}"
            remedy = "make room, or record where the folder is writable"
            raise unreadable(files[0].parent, what, remedy) from error
    return Recorded(
        sidecar=save_sidecar(spec, recorded),
        fingerprints={"sampled": recorded.sampled, "full": recorded.full},
        num_shards=len(shards),
        num_tokens=sum(shard.num_tokens for shard in shards),
    )


def verify(spec: CorpusSpec, *, progress: Progress | None = None) -> Verification:
    """Read every byte of a corpus and compare it with its recorded hashes, if there are any.

    Reports every bad block and every unreadable shard, not only the first.
    """
    if spec.view is not None:
        return _verify_view(spec, progress)
    recorded = load_sidecar(spec)
    was = {} if recorded is None else {shard.name: shard.dtype for shard in recorded.shards}
    dtypes = set(was.values()) - MASK_NAMES
    # If all recorded shards have one dtype, the user need not name it again.
    if spec.dtype is None and len(dtypes) == 1:
        spec = dataclasses.replace(spec, dtype=dtypes.pop())
    found = Verification(sidecar=None if recorded is None else sidecar_path(spec))
    open_file = file_opener(spec)
    shards: list[Shard] = []
    names: list[str] = []
    with ExitStack() as opened, ThreadPoolExecutor(_NUM_THREADS, "hash-blocks") as pool:
        for file in list_shards(spec):
            try:
                runs = [opened.enter_context(run) for run in open_file(file)]
                shards += runs
                names += [each.name for each in contents(runs)]
            except CorpusServerError as error:
                found.add_problem(file.name, error.detail)
                # All its runs and their masks, as far as they were recorded.
                own = [PurePosixPath(file.name).with_name(each) for each in mask_names(file.path.name)]
                runs_of = tuple(f"{each}:" for each in (file.name, *own))
                names += [each for each in was if f"{each}:".startswith(runs_of)] or [file.name]
        if spec.token_range is not None and found.ok:  # without all shards, nobody knows where the range is
            shards = cut_shards(shards, spec.token_range)
            names = [each.name for each in contents(shards)]
        content = contents(shards)
        was |= {each.name: each.dtype.name for each in content}
        found.num_shards = sum(was.get(name) not in MASK_NAMES for name in names)
        expected = _expected(names, recorded, found)
        meter = Meter("hashing", sum(each.data_bytes for each in content), progress)
        for each in content:
            _verify_shard(each, expected.get(each.name), pool, meter, found)
        for shard in {shard.file: shard for shard in shards}.values():  # runs of a file share its index
            if shard.documents is not None:
                found.check(shard, shard.documents.find_problem)
        if recorded is not None and found.ok:
            if sampled_fingerprint(content) == recorded.sampled:
                found.fingerprint = recorded.full
            else:
                found.add_problem(None, "the sidecar's sampled fingerprint is wrong")
        found.num_tokens = sum(shard.num_tokens for shard in shards)
        if files := metadata_files(spec):
            _verify_metadata(files, shards, found)
    return found


def _verify_metadata(files: Sequence[Path], shards: Sequence[Shard], found: Verification) -> None:
    """Compare metadata with its digest, and the number of its rows with that of the documents."""
    try:
        found.add_problem(None, find_problem(files))
        documents = [shard.documents for shard in shards if shard.documents is not None]
        with suppress(MissingPackage):  # without pyarrow the digest alone tells
            DocumentTable(files, sum(index.num_documents for index in documents)).close()
    except UnreadableCorpus as error:
        found.add_problem(None, error.detail)


def _verify_view(spec: CorpusSpec, progress: Progress | None) -> Verification:
    """Verify the corpus of a view, then the view."""
    found = verify(dataclasses.replace(spec, view=None), progress=progress)
    try:
        with open_corpus(spec) as view:
            assert isinstance(view, View)
            found.add_problem(None, view.find_problem())
            found.num_tokens = view.num_tokens
            found.fingerprint = found.fingerprint and view.fingerprint
    except CorpusServerError as error:
        found.add_problem(None, error.detail)
    return found


class _Block(NamedTuple):
    """The xxh3-128 hex of a block's bytes, and the joined xxh3-64 hex of its fine blocks."""

    digest: str
    fine: str


def _hash_shard(shard: Shard, pool: ThreadPoolExecutor, meter: Meter) -> ShardHashes:
    digests, fine = [], []
    for block in _hash_blocks(shard, pool, meter):
        if isinstance(block, CorpusServerError):
            raise block
        digests.append(block.digest)
        fine.append(block.fine)
    return ShardHashes(
        name=shard.name,
        num_tokens=shard.num_tokens,
        dtype=shard.dtype.name,
        digests=tuple(digests),
        fine="".join(fine),
    )


def _hash_blocks(
    shard: Shard, pool: ThreadPoolExecutor, meter: Meter
) -> Iterator[_Block | CorpusServerError]:
    """Yield digests, or why there are none, of a shard's blocks in order; the last one may be shorter."""
    starts = range(0, shard.data_bytes, BLOCK_BYTES)
    # A few at a time: the executor completes what it was given before an error or Ctrl-C gets through.
    for first in range(0, len(starts), _BLOCKS_AT_ONCE):
        batch = starts[first : first + _BLOCKS_AT_ONCE]
        yield from pool.map(partial(_hash_block, shard, meter), batch)


def _hash_block(shard: Shard, meter: Meter, start: int) -> _Block | CorpusServerError:
    stop = min(start + BLOCK_BYTES, shard.data_bytes)
    digest, fine = xxhash.xxh3_128(), []
    try:
        for begin in range(start, stop, FINE_BLOCK_BYTES):
            its = xxhash.xxh3_64()
            for piece in shard.pieces(begin, min(begin + FINE_BLOCK_BYTES, stop), _PIECE_BYTES):
                digest.update(piece)
                its.update(piece)
                meter.add(len(piece))
                if shard.dtype in MASK_DTYPES and (strange := find_strange(piece, shard.dtype)) is not None:
                    return UnreadableCorpus(f"a loss mask: {strange[1]}")
            fine.append(its.hexdigest())
    except (ReadFailed, CorpusChanged) as error:
        return error
    return _Block(digest.hexdigest(), "".join(fine))


def _expected(
    names: Sequence[str], recorded: RecordedHashes | None, found: Verification
) -> dict[str, ShardHashes]:
    """Return the hashes recorded for each shard: by position, or by name if their number changed."""
    if recorded is None:
        return {}
    if len(names) == len(recorded.shards):
        return dict(zip(names, recorded.shards, strict=True))
    by_name = {hashes.name: hashes for hashes in recorded.shards}
    for name in sorted(set(by_name) - set(names)):
        found.add_problem(name, "recorded, but the file is missing")
    for name in sorted(set(names) - set(by_name)):
        found.add_problem(name, "not there when hashes were recorded")
    return by_name


def _verify_shard(
    shard: Shard, expected: ShardHashes | None, pool: ThreadPoolExecutor, meter: Meter, found: Verification
) -> None:
    digests = () if expected is None else expected.digests
    fine = "" if expected is None else expected.fine
    if expected is not None:
        was, now = f"{expected.num_tokens} {expected.dtype}", f"{shard.num_tokens} {shard.dtype.name}"
        if was != now:
            found.add_problem(shard.name, f"holds {now} tokens, recorded were {was}")
    block_tokens = BLOCK_BYTES // shard.dtype.itemsize
    block_digits = FINE_DIGITS * (BLOCK_BYTES // FINE_BLOCK_BYTES)
    for block, its in enumerate(_hash_blocks(shard, pool, meter)):
        if isinstance(its, CorpusServerError):
            reason = its.detail
        elif block < len(digests) and its.digest != digests[block]:
            reason = "its bytes differ from the recorded ones"
        elif fine and not fine.startswith(its.fine, block * block_digits):
            reason = "the recorded digests of parts of it are wrong"
        else:
            continue
        start, stop = block * block_tokens, min((block + 1) * block_tokens, shard.num_tokens)
        found.bad_blocks.append(
            BadBlock(shard=shard.name, block=block, start=start, stop=stop, reason=reason)
        )
    found.check(shard, shard.file.check_unchanged)
