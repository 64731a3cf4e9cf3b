"""Copy windows from the maps of shards into a caller's buffer.

All maps of a process lie in one address space, so windows of any number of shards are one fancy
index over one strided view that begins at the lowest map:

    address of a window   = address of its shard's token 0 + start * itemsize
    row of the view       = (address - lowest address) / itemsize

NumPy releases the GIL for that copy, whatever the number of windows or shards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.readahead import read_ahead

_CHUNK_BYTES = 64 * 1024
"""Windows are copied in pieces that stay in the cache between NumPy's gather and the buffer, and below
malloc's threshold for memory that goes back to the kernel, and faults again, every time."""

_MAX_VIEW_BYTES = 2**63
"""NumPy refuses larger views. Maps lie within 2^47 bytes, so only windows of 65,536 tokens and more
get there; those cost nothing more when they are copied one by one."""

_COLD_SECONDS_PER_WINDOW = 20e-6
_COLD_SECONDS_PER_BYTE = 1e-9
"""Copying resident windows takes a twentieth of this; reading one from a fast disk 50 us and more."""


class MappedShard(Protocol):
    """What gathering needs to know of a shard."""

    @property
    def tokens(self) -> NDArray[np.integer]:
        """Read-only view over the map, `(num_tokens,)`."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the shard."""

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Type of a token."""

    @property
    def address(self) -> int:
        """Address of the first token."""

    def check_unchanged(self) -> None:
        """Raise if the file was truncated or written to since it was opened, or a page was unreadable."""


class Gatherer:
    """Gathers windows of a fixed list of open shards; safe to use from several threads.

    Where the last windows had to be read from disk, the next ones are asked for all at once first.

    The shards must stay open for as long as the gatherer is used.
    """

    def __init__(self, shards: Sequence[MappedShard]) -> None:
        self._shards = shards
        self._addresses = np.array([shard.address for shard in shards], dtype=np.uint64)
        self._num_tokens = np.array([shard.num_tokens for shard in shards], dtype=np.int64)
        # One view steps by whole tokens, so it reaches only shards of one type and one alignment.
        kinds = [(shard.dtype.str, shard.address % shard.dtype.itemsize) for shard in shards]
        distinct = sorted(set(kinds))
        self._span_of_shard = np.array([distinct.index(kind) for kind in kinds], dtype=np.intp)
        self._spans = [
            _Span([shard for shard, its in zip(shards, kinds, strict=True) if its == kind])
            for kind in distinct
        ]
        self._cold = False

    def gather(self, locations: NDArray[np.int64], out: NDArray[np.integer]) -> None:
        """Copy windows into a buffer.

        Blocks while pages are read from disk: never call it in an event loop's thread.

        Args:
            locations: `(k, 2) int64`: shard number, start token; every window inside its shard.
            out: `(k, length)`, C order, of a type that holds the shards' tokens; filled.

        Raises:
            CorpusChanged: a shard was truncated or written to; `out` then holds nothing of worth.
            ReadFailed: the disk did not deliver.
        """
        num_windows, length = out.shape
        if num_windows == 0:
            return
        shard_numbers, starts = locations[:, 0], locations[:, 1]
        # The addresses below are trusted to be inside a map: this is the line that makes them so.
        if (starts < 0).any() or (starts + length > self._num_tokens[shard_numbers]).any():
            raise IndexError(f"a window of {length} tokens lies outside its shard")
        touched = [self._shards[number] for number in np.unique(shard_numbers).tolist()]
        for shard in touched:
            shard.check_unchanged()
        cold = self._cold
        began = time.perf_counter()
        for number, span in enumerate(self._spans):
            if len(self._spans) == 1:
                rows: slice | NDArray[np.intp] = slice(None)
            else:
                rows = np.flatnonzero(self._span_of_shard[shard_numbers] == number)
            offsets = starts[rows].astype(np.uint64) * np.uint64(span.itemsize)
            addresses = self._addresses[shard_numbers[rows]] + offsets
            if addresses.size:
                if cold:
                    read_ahead(addresses, length * span.itemsize)
                span.copy(addresses, out, rows)
        limit = num_windows * (_COLD_SECONDS_PER_WINDOW + out.itemsize * length * _COLD_SECONDS_PER_BYTE)
        self._cold = time.perf_counter() - began > limit
        # A file cut during the copy reads as zeros: only now is it known that every token copied was
        # the file's own.
        for shard in touched:
            shard.check_unchanged()


class _Span:
    """The stretch of address space that holds shards of one token type and alignment."""

    def __init__(self, shards: Sequence[MappedShard]) -> None:
        self._dtype = shards[0].dtype
        self.itemsize = self._dtype.itemsize
        mapped = [shard for shard in shards if shard.num_tokens]
        self._lowest = min((shard.address for shard in mapped), default=0)
        self._end = max((shard.address + shard.num_tokens * self.itemsize for shard in mapped), default=0)

    def copy(
        self,
        addresses: NDArray[np.uint64],
        out: NDArray[np.integer],
        rows: slice | NDArray[np.intp],
    ) -> None:
        """Copy the windows at some addresses to some rows of `out`."""
        length = out.shape[1]
        if (self._end - self._lowest) * length >= _MAX_VIEW_BYTES:
            for row, address in zip(np.arange(len(out))[rows].tolist(), addresses.tolist(), strict=True):
                out[row] = _strided(address, address + length * self.itemsize, self._dtype, length)[0]
            return
        view = _strided(self._lowest, self._end, self._dtype, length)
        indices = ((addresses - np.uint64(self._lowest)) // np.uint64(self.itemsize)).astype(np.intp)
        step = max(1, _CHUNK_BYTES // (length * self.itemsize))
        for first in range(0, len(indices), step):
            part = slice(first, first + step)
            out[part if isinstance(rows, slice) else rows[part]] = view[indices[part]]


class _AddressSpace:
    """Exposes a stretch of memory to NumPy; what lies between the maps is never indexed."""

    def __init__(self, lowest: int, shape: tuple[int, int], itemsize: int, typestr: str) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (lowest, True),
            "shape": shape,
            "strides": (itemsize, itemsize),
            "typestr": typestr,
        }


def _strided(lowest: int, end: int, dtype: np.dtype[np.integer], length: int) -> NDArray[np.integer]:
    """Return the view `(starts, length)` whose row k begins k tokens after `lowest`."""
    num_starts = (end - lowest) // dtype.itemsize - length + 1
    return np.asarray(_AddressSpace(lowest, (num_starts, length), dtype.itemsize, dtype.str))
