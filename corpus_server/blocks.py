"""Hashes a shard block by block, in order, with bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import xxhash

from corpus_server.errors import CorpusChanged, CorpusServerError, ReadFailed
from corpus_server.fingerprint import BLOCK_BYTES
from corpus_server.shard import Shard

_NUM_THREADS: Final = 2  # one waits for the disk while the other hashes
_PIECE_BYTES: Final = 1 << 20  # stays in the processor's cache between reading and hashing

_buffers = threading.local()


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a shard: the xxh3-128 hex of its bytes, or the error that reading it gave."""

    number: int
    num_bytes: int
    digest: str | None
    error: CorpusServerError | None


def hashing_pool() -> ThreadPoolExecutor:
    """Return the threads that `hash_blocks` uses; a context manager."""
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash-blocks")


def hash_blocks(shard: Shard, pool: ThreadPoolExecutor) -> Iterator[Block]:
    """Yield the blocks of `shard` in order, each `BLOCK_BYTES` long but for the last."""
    pending: deque[Future[Block]] = deque()
    for number in range(-(-shard.data_bytes // BLOCK_BYTES)):
        pending.append(pool.submit(_hash_block, shard, number))
        if len(pending) > 2 * _NUM_THREADS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _hash_block(shard: Shard, number: int) -> Block:
    buffer: bytearray | None = getattr(_buffers, "piece", None)
    if buffer is None:
        buffer = _buffers.piece = bytearray(_PIECE_BYTES)
    start = number * BLOCK_BYTES
    stop = min(start + BLOCK_BYTES, shard.data_bytes)
    digest = xxhash.xxh3_128()
    try:
        for offset in range(start, stop, _PIECE_BYTES):
            piece = memoryview(buffer)[: stop - offset]
            shard.read_data_into(offset, piece)
            digest.update(piece)
    except (ReadFailed, CorpusChanged) as error:
        return Block(number, stop - start, None, error)
    return Block(number, stop - start, digest.hexdigest(), None)
