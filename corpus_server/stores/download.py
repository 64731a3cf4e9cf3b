"""Fetch a whole object into the cache: parallel ranges, each checked, then the whole."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple

import xxhash

from corpus_server.corpus.fingerprints import BLOCK_BYTES
from corpus_server.errors import StoreFailed
from corpus_server.stores.cache import Cache
from corpus_server.stores.objects import Store, StoreObject

RANGE_BYTES: Final = 8 << 20
"""Bytes of one request: at 100 MB/s a connection, the 30 ms until a store responses are a third of it."""

RANGES_AT_ONCE: Final = 16
"""Of all shards together: 16 connections fill 10 Gbit/s where each brings 100 MB/s."""

_READ_BYTES: Final = 1 << 20  # bytes read back and hashed at a time: they stay in the L2 cache


class Stopped(Exception):
    """Staging was stopped by `stopping`."""


class Recorded(NamedTuple):
    """Digests that `corpus-server verify --record` made of the blocks of a run of tokens."""

    data_offset: int
    data_bytes: int
    digests: Sequence[str]


def stage(
    store: Store,
    what: StoreObject,
    cache: Cache,
    recorded: Sequence[Recorded],
    fetchers: ThreadPoolExecutor,
    stopping: threading.Event,
    *,
    urgent: bool = False,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> None:
    """Bring an object into the cache, where it appears only when it is whole and its checksums match.

    The checks are, as far as the store or the user gives them: the version and the size of every range, the
    MD5 of the whole, the recorded digests. Recorded digests count more than an MD5: an encrypted object
    (SSE-KMS) has an ETag that looks like one and is not.

    Args:
        fetchers: threads that fetch ranges.
        stopping: set by whoever wants the work given up.
        urgent: see `Cache.filling`.
        on_bytes: told of each range that has arrived.

    Raises:
        BlockingIOError: another process is staging it.
        CorpusChanged, StoreFailed, CacheFull: nothing is left behind.
        Stopped: `stopping` was set.
    """
    with cache.filling(what.key, what.size_bytes, urgent=urgent) as file:
        fd = file.fileno()

        def fetch(start: int) -> None:
            if stopping.is_set():
                raise Stopped
            stop = min(start + RANGE_BYTES, what.size_bytes)
            _write(fd, start, store.read(what, start, stop))
            on_bytes(stop - start)

        md5 = None if recorded else what.md5
        _fetch_all(fd, range(0, what.size_bytes, RANGE_BYTES), fetch, fetchers, what, md5)
        for run in recorded:
            _check_recorded(fd, what, run)


def _fetch_all(
    fd: int,
    starts: range,
    fetch: Callable[[int], None],
    fetchers: ThreadPoolExecutor,
    what: StoreObject,
    md5: str | None,
) -> None:
    """Fetch all ranges in parallel, and hash those that are there meanwhile, in order, from the file."""
    digest = hashlib.md5(usedforsecurity=False)
    under_way: deque[tuple[int, Future[None]]] = deque()
    try:
        left = iter(starts)
        while True:
            # As many as the threads take: one that fails soon stops the others.
            while len(under_way) < RANGES_AT_ONCE and (start := next(left, None)) is not None:
                under_way.append((start, fetchers.submit(fetch, start)))
            if not under_way:
                break
            start, future = under_way[0]
            future.result()
            under_way.popleft()
            if md5 is not None:
                _hash(fd, start, min(start + RANGE_BYTES, what.size_bytes), digest.update)
    finally:
        for _, future in under_way:
            future.cancel()
        wait([future for _, future in under_way])  # they write to a file that is closed now
    if md5 is not None and digest.hexdigest() != md5:
        raise StoreFailed(
            f"{what.url}: its bytes have the MD5 {digest.hexdigest()}, its ETag says {md5}",
            remedy="upload the object again; if it is encrypted (SSE-KMS), its ETag is no MD5: put the "
            "hashes that corpus-server verify --record makes beside it",
        )


def _check_recorded(fd: int, what: StoreObject, recorded: Recorded) -> None:
    for block, expected in enumerate(recorded.digests):
        start = recorded.data_offset + block * BLOCK_BYTES
        digest = xxhash.xxh3_128()
        _hash(fd, start, min(start + BLOCK_BYTES, recorded.data_offset + recorded.data_bytes), digest.update)
        if digest.hexdigest() != expected:
            raise StoreFailed(
                f"{what.url}: block {block}, bytes {start} on, differs from its recorded hash",
                remedy="upload the object again, or record the hashes again if the change was meant",
            )


def _hash(fd: int, start: int, stop: int, update: Callable[[memoryview], object]) -> None:
    buffer = memoryview(bytearray(min(_READ_BYTES, stop - start)))
    for offset in range(start, stop, _READ_BYTES):
        piece = buffer[: stop - offset]
        if os.preadv(fd, [piece], offset) != len(piece):
            raise OSError(errno.EIO, "the disk did not return what was written to it")
        update(piece)


def _write(fd: int, offset: int, content: memoryview) -> None:
    while content:
        count = os.pwrite(fd, content, offset)
        content, offset = content[count:], offset + count
