"""The maps of shards as memory: what a gatherer reads, and what reading it cost."""

from __future__ import annotations

import resource
import threading
from functools import lru_cache
from mmap import PAGESIZE
from types import SimpleNamespace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray


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


_ADDRESSES: Final = 1 << 48
"""Linux gives no higher ones unasked."""

MEMORY: Final = np.asarray(
    SimpleNamespace(
        __array_interface__={
            "version": 3,
            "data": (PAGESIZE, True),
            "shape": (_ADDRESSES - PAGESIZE,),
            "typestr": "|u1",
        }
    )
).data
"""All memory of the process but the first page; read only where a map or an array lies."""

_BLOCK_BITS: Final = 8
_BLOCK: Final = 1 << _BLOCK_BITS
"""Bytes that are copied at once of ranges that differ in size; 128 and 512 take 1.1 times as long."""

BEYOND: Final = _BLOCK - 1
"""Bytes that may be read behind a range; their content does not matter."""

_MAX_ITEM: Final = 2**63 // _ADDRESSES - 1  # bytes of an item of all memory: NumPy's limit


def places_in(*addresses: int) -> NDArray[np.int64]:
    """Return the places in `MEMORY` of addresses."""
    return np.array(addresses, dtype=np.int64) - PAGESIZE


def addresses_of(places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the addresses of places in `MEMORY`."""
    return (places + PAGESIZE).astype(np.uint64)


def copied(
    starts: NDArray[np.int64], sizes: NDArray[np.int64] | int, safe: NDArray[np.int64] | int = 0
) -> NDArray[np.uint8]:
    """Return ranges of `MEMORY` one after another. NumPy releases the GIL while it copies.

    Ranges of one size are items of memory that may begin at any byte, copied by an index. Others are made of
    such items of 256 bytes, which lie on a grid in the result:

        ranges     aaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbbbbbbbccc
        grid       aaaaaaaa|aaaaaaa?|bbbbbbbb|bbbbbbb?|b????       an item holds what follows where it begins
        begins                     |bbbbbbbb               |ccc?

    Then 256 bytes from the begin of each range on are copied again, range by range: what is wrong in the grid
    lies there, and so does what a shorter range has too much before the next one.

    Args:
        starts: `(k,)`, places.
        sizes: `(k,)` bytes, or those of each.
        safe: `(k,)`, or of all: where a range may end of which `BEYOND` more bytes may be read. Of others no
            page is touched but their own.
    """
    if isinstance(sizes, int):
        if 0 < sizes <= _MAX_ITEM:
            _fetch_first(starts)
            return np.asarray(_items(sizes)[starts].view(np.uint8))
        sizes = np.full(starts.shape, sizes)
    if not sizes.all():
        some = sizes > 0
        starts, sizes, safe = starts[some], sizes[some], safe if isinstance(safe, int) else safe[some]
    if not starts.size:
        return np.empty(0, np.uint8)
    _fetch_first(starts)
    ends = sizes.cumsum()
    begins = ends - sizes
    lines = ends + BEYOND >> _BLOCK_BITS  # of the grid: before how many items each range ends
    counts = lines.copy()
    counts[1:] -= lines[:-1]
    counts[-1] += 1  # what is copied again may end behind the grid
    grid = (starts - begins).repeat(counts)
    grid += np.arange(0, grid.size << _BLOCK_BITS, _BLOCK)
    stops, again = starts + sizes, starts
    close = np.flatnonzero(stops > safe)
    if close.size and (close := close[-stops[close] & PAGESIZE - 1 < BEYOND]).size:
        limits = (stops[close] - 1 | PAGESIZE - 1) - BEYOND  # an item from there on ends with the page
        again = starts.copy()
        again[close] = np.minimum(starts[close], limits)
        its = begins[close] <= (at := lines[close] - 1) << _BLOCK_BITS
        grid[at[its]] = np.minimum(grid[at[its]], limits[its])
    grid[-1] = grid[0]
    items = _items(_BLOCK)
    heads = items[again]  # now: after the copy they are out of the cache
    result = items[grid].view(np.uint8)
    anywhere = np.ndarray(result.size - _BLOCK + 1, items.dtype, result, 0, (1,))
    anywhere[begins] = heads
    if close.size:
        is_long = sizes[close] >= _BLOCK
        long, short = close[is_long], close[~is_long]
        anywhere[ends[long] - _BLOCK] = items[stops[long] - _BLOCK]
        for begin, end, start in zip(*(each[short].tolist() for each in (begins, ends, starts)), strict=True):
            result.data[begin:end] = MEMORY[start : start + end - begin]
    return np.asarray(result[: ends[-1]])


def _fetch_first(places: NDArray[np.int64]) -> None:
    """Have the processor wait for the bytes at all places at once.

    The copy would wait for the first bytes of one range after another, and takes 1.1 to 1.16 times as long.
    """
    _items(1)[places]


def safe_ends(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where ranges may end that may be read beyond, if memory holds what ends at places."""
    ends: NDArray[np.int64] = (places - 1 | PAGESIZE - 1) + 1 - BEYOND
    return ends


@lru_cache(maxsize=256)
def _items(size: int) -> NDArray[np.void]:
    """Return the view of memory whose item k is the `size` bytes from place k on."""
    return np.ndarray(_ADDRESSES - PAGESIZE - size + 1, np.dtype((np.void, size)), MEMORY, 0, (1,))
