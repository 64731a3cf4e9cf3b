"""Fetch parts of objects into the cache: parallel ranges, each checked, then the part, then the object."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import xxhash

from corpus_server.corpus.fingerprints import BLOCK_BYTES, FINE_BLOCK_BYTES, FINE_DIGITS, ShardHashes
from corpus_server.corpus.shards import Shard
from corpus_server.errors import StoreFailed
from corpus_server.stores.cache import Cache
from corpus_server.stores.objects import Store, StoreObject

RANGE_BYTES: Final = 8 << 20
"""Bytes of one request: at 100 MB/s a connection, the 30 ms until a store responses are a third of it."""

RANGES_AT_ONCE: Final = 16
"""Of all shards together: 16 connections fill 10 Gbit/s where each brings 100 MB/s."""

_READ_BYTES: Final = 1 << 20  # bytes read back and hashed at a time: they stay in the L2 cache


class _Digest(Protocol):
    """A hash of hashlib or xxhash."""

    def update(self, piece: memoryview, /) -> None:
        """Add bytes."""


class Stopped(Exception):
    """Staging was stopped by `stopping`."""


class Part(NamedTuple):
    """Bytes [start, stop) of an object, and their key in the cache."""

    key: str
    start: int
    stop: int


class Recorded(NamedTuple):
    """Digests that `corpus-server verify --record` made of the blocks of a run of tokens.

    Attributes:
        digests: hex, joined: xxh3-64 of fine blocks, xxh3-128 of others.
    """

    data_offset: int
    data_bytes: int
    digests: str
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def of(cls, shard: Shard, hashes: ShardHashes) -> Recorded:
        """Return the finest digests that were recorded of a shard."""
        if hashes.fine:
            return cls(shard.data_offset, shard.data_bytes, hashes.fine, FINE_BLOCK_BYTES)
        return cls(shard.data_offset, shard.data_bytes, "".join(hashes.digests))


def stage(
    store: Store,
    what: StoreObject,
    part: Part,
    cache: Cache,
    recorded: Sequence[Recorded],
    fetchers: ThreadPoolExecutor,
    stopping: threading.Event,
    *,
    is_all: bool,
    urgent: bool = False,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Bring a part of an object into the cache, where it appears when it is whole and its checksums match.

    The checks are, as far as the store or the user gives them: the version and the size of every range, the
    recorded digests, the MD5 of the object. Recorded digests count more than an MD5: an encrypted object
    (SSE-KMS) has an ETag that looks like one and is not.

    Args:
        fetchers: threads that fetch ranges.
        stopping: set by whoever wants the work given up.
        is_all: no other part is staged, so the MD5 can be checked at once; else see `check_whole`.
        urgent: see `Cache.filling`.
        on_bytes: told of each range that has arrived.

    Raises:
        BlockingIOError: another process is staging it.
        CorpusChanged, StoreFailed, CacheFull: nothing is left behind.
        Stopped: `stopping` was set.
    """
    if not recorded and (md5 := cache.wrong_md5(what.key)) is not None:
        raise _wrong_md5(what, md5, cache.mark(what.key))
    with cache.filling(part.key, part.stop - part.start, urgent=urgent) as file:
        fd = file.fileno()

        def fetch(start: int) -> None:
            if stopping.is_set():
                raise Stopped
            stop = min(start + RANGE_BYTES, part.stop)
            _write(fd, start - part.start, store.read(what, start, stop))
            on_bytes(stop - start)

        digest = hashlib.md5(usedforsecurity=False) if is_all and what.md5 and not recorded else None
        if digest is not None:
            _update(digest, store, what, 0, part.start)
        _fetch_all(fd, part, fetch, fetchers, digest)
        if digest is not None:
            _update(digest, store, what, part.stop, what.size_bytes)
            if digest.hexdigest() != what.md5:
                raise _wrong_md5(what, digest.hexdigest())
        for run in recorded:
            _check_recorded(store, what, part, fd, run)


def check_whole(store: Store, what: StoreObject, data: range, cache: Cache) -> None:
    """Compare the MD5 of an object with its ETag, if the cache has all of `data` and the object has one.

    Whoever brings a part asks; the last one finds all of them.

    Raises:
        StoreFailed: it differs. The cache gives up all parts, and takes none of this version any more.
    """
    if what.md5 is None:
        return
    parts = [Part(key, *bounds) for key, bounds in cache.parts_of(what.key).items()]
    parts.sort(key=lambda part: part.start)
    if _reached(parts, data.start) < data.stop:
        return
    digest = hashlib.md5(usedforsecurity=False)
    _update(digest, store, what, 0, data.start)
    at = data.start
    for part in parts:
        if part.stop <= at:
            continue
        local = cache.open(part.key)
        if local is None:  # removed a moment ago: whoever brings it again asks again
            return
        with local:
            _hash(local.fd, at - part.start, part.stop - part.start, digest)
        at = part.stop
    _update(digest, store, what, at, what.size_bytes)
    if digest.hexdigest() != what.md5:
        cache.mark_wrong(what.key, digest.hexdigest(), [part.key for part in parts])
        raise _wrong_md5(what, digest.hexdigest(), cache.mark(what.key))


def _reached(parts: Sequence[Part], start: int) -> int:
    """Return up to which byte parts, in the order of their starts, hold all bytes from `start` on."""
    for part in parts:
        if part.start > start:
            break
        start = max(start, part.stop)
    return start


def _wrong_md5(what: StoreObject, md5: str, mark: Path | None = None) -> StoreFailed:
    again = (
        "upload the object again"
        if mark is None
        else f"upload the object again, or remove {mark} to try again"
    )
    return StoreFailed(
        f"{what.url}: its bytes have the MD5 {md5}, its ETag says {what.md5}",
        remedy=f"{again}; if it is encrypted (SSE-KMS), its ETag is no MD5: put the hashes that "
        "corpus-server verify --record makes beside it",
    )


def _fetch_all(
    fd: int, part: Part, fetch: Callable[[int], None], fetchers: ThreadPoolExecutor, digest: _Digest | None
) -> None:
    """Fetch all ranges in parallel, and hash those that are there meanwhile, in order, from the file."""
    under_way: deque[tuple[int, Future[None]]] = deque()
    try:
        left = iter(range(part.start, part.stop, RANGE_BYTES))
        while True:
            # As many as the threads take: one that fails soon stops the others.
            while len(under_way) < RANGES_AT_ONCE and (start := next(left, None)) is not None:
                under_way.append((start, fetchers.submit(fetch, start)))
            if not under_way:
                break
            start, future = under_way[0]
            future.result()
            under_way.popleft()
            if digest is not None:
                _hash(fd, start - part.start, min(start + RANGE_BYTES, part.stop) - part.start, digest)
    finally:
        for _, future in under_way:
            future.cancel()
        wait([future for _, future in under_way])  # they write to a file that is closed now


def _check_recorded(store: Store, what: StoreObject, part: Part, fd: int, recorded: Recorded) -> None:
    """Compare the blocks of which a part holds something; fetch what it lacks of them, to be hashed.

    Extents begin and end with blocks, so a file of one run lacks nothing.
    """
    offset, num_bytes, digests, block_bytes = recorded
    num_digits = len(digests) // max(1, -(-num_bytes // block_bytes))
    first, last = (max(0, (at - offset) // block_bytes) for at in (part.start, part.stop - 1))
    for block in range(first, last + 1):
        start = offset + block * block_bytes
        stop = min(start + block_bytes, offset + num_bytes)
        begin, until = max(start, part.start), min(stop, part.stop)
        if begin >= until:
            continue
        expected = digests[block * num_digits :][:num_digits]
        digest = xxhash.xxh3_64() if num_digits == FINE_DIGITS else xxhash.xxh3_128()
        _update(digest, store, what, start, begin)
        _hash(fd, begin - part.start, until - part.start, digest)
        _update(digest, store, what, until, stop)
        if digest.hexdigest() != expected:
            raise StoreFailed(
                f"{what.url}: block {block}, bytes {start} on, differs from its recorded hash",
                remedy="upload the object again, or record the hashes again if the change was meant",
            )


def _update(digest: _Digest, store: Store, what: StoreObject, start: int, stop: int) -> None:
    """Hash bytes of an object that are not kept."""
    for offset in range(start, stop, RANGE_BYTES):
        digest.update(store.read(what, offset, min(offset + RANGE_BYTES, stop)))


def _hash(fd: int, start: int, stop: int, digest: _Digest) -> None:
    """Hash bytes of a file."""
    buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
    for offset in range(start, stop, _READ_BYTES):
        piece = buffer[: stop - offset]
        if os.preadv(fd, [piece], offset) != len(piece):
            raise OSError(errno.EIO, "the disk did not return what was written to it")
        digest.update(piece)


def _write(fd: int, offset: int, content: memoryview) -> None:
    while content:
        count = os.pwrite(fd, content, offset)
        content, offset = content[count:], offset + count
