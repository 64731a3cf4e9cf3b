"""The maps of shards as memory: what a gatherer reads, and what reading it cost."""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence
from mmap import PAGESIZE
from types import SimpleNamespace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import expanded


class Reads:
    """What a process has read from its maps.

    Attributes:
        num_hits: pieces whose windows were copied from the page cache.
        num_misses: those that had to wait for the disk, as major page faults tell.
        num_faults: major page faults in them.
    """

    def __init__(self) -> None:
        self.num_hits = self.num_misses = self.num_faults = 0
        self._lock = threading.Lock()

    def add(self, num_faults: int) -> None:
        """Count a piece that was copied."""
        with self._lock:
            if num_faults > 0:
                self.num_misses += 1
                self.num_faults += num_faults
            else:
                self.num_hits += 1


READS = Reads()


def num_major_faults() -> int:
    """Return how often this thread has waited for the disk because it touched a page of a map."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class MappedFile(Protocol):
    """The file of a shard, see `OpenFile`."""

    def check_unchanged(self) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if it is not what was opened."""


class Mapped(Protocol):
    """Numbers in memory that a gatherer reads: a `Shard`, or what stands beside one."""

    @property
    def file(self) -> MappedFile:
        """The file that holds them."""

    @property
    def data_offset(self) -> int:
        """The byte at which they begin in it."""

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Their type."""

    @property
    def num_tokens(self) -> int:
        """How many there are."""

    @property
    def address(self) -> int:
        """Address of the first one; 0 if there is none."""

    def is_resident(self, token: int) -> bool:
        """Tell whether the page cache holds one."""


class Span:
    """The address range that holds all shards of one token type and alignment."""

    def __init__(self, shards: Sequence[Mapped]) -> None:
        self.dtype: np.dtype[np.integer] = shards[0].dtype
        mapped = [shard for shard in shards if shard.num_tokens]
        self.lowest = min((shard.address for shard in mapped), default=0)
        size = self.dtype.itemsize
        self.end = max((shard.address + shard.num_tokens * size for shard in mapped), default=0)

    def addresses(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return byte addresses of tokens, numbered from the lowest map."""
        return np.uint64(self.lowest) + numbers.astype(np.uint64) * np.uint64(self.dtype.itemsize)


def strided(lowest: int, end: int, dtype: np.dtype[Any], length: int | None = None) -> NDArray[Any]:
    """Return the view `(starts, length)` whose row k begins k tokens after `lowest`; `(tokens,)` without.

    Memory between the maps is in the view, and never indexed.
    """
    num_tokens = (end - lowest) // dtype.itemsize
    described = {
        "version": 3,
        "data": (lowest, True),
        "shape": (num_tokens,) if length is None else (num_tokens - length + 1, length),
        "strides": (dtype.itemsize,) * (1 if length is None else 2),
        "typestr": dtype.str,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


_BYTES = strided(PAGESIZE, 1 << 48, np.dtype(np.uint8))  # to the highest address that Linux gives unasked

MEMORY: Final = _BYTES.data
"""All memory of the process but the first page; read only where a map or an array lies."""


def places_in(*addresses: int) -> NDArray[np.int64]:
    """Return the places in `MEMORY` of addresses."""
    return np.array(addresses, dtype=np.int64) - PAGESIZE


def touch(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    """Read a byte of each page of ranges of `MEMORY`.

    NumPy releases the GIL meanwhile, so that nobody else waits for the disk.
    """
    if not (held := stops > starts).all():
        starts, stops = starts[held], stops[held]
    lasts = stops - 1
    _BYTES.take(starts)
    _BYTES.take(lasts)
    first = starts // PAGESIZE + 1
    between = lasts // PAGESIZE - first
    if (large := np.flatnonzero(between > 0)).size:
        _BYTES.take(expanded(first[large], between[large])[1] * PAGESIZE)
