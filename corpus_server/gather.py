"""Copy windows from the maps of shards into one array.

All maps of a process lie in one address space, so windows of any number of shards are one fancy
index over one strided view that begins at the lowest map:

    address of a window   = address of its shard's token 0 + start * itemsize
    row of the view       = (address - lowest address) / itemsize

NumPy releases the GIL for that copy, whatever the number of windows or shards. Its result is what is
sent: copying on, into memory of one's own, would cost half as much again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.readahead import num_major_faults, read_ahead

_MAX_VIEW_BYTES = 2**63
"""NumPy refuses larger views. Maps lie within 2^47 bytes, so only windows of 65,536 tokens and more
get there; those cost nothing more when they are copied one by one."""

_SAMPLE_WINDOWS = 16
"""Looked at before all windows are asked for in vain."""


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

    def is_resident(self, token: int) -> bool:
        """Tell whether the page cache holds a token; False where it cannot be known."""


class Gatherer:
    """Gathers windows of a fixed list of open shards; safe to use from several threads.

    The shards must stay open for as long as the gatherer and its selections are used.

    Args:
        shards: numbered as in locations.
        reads_ahead: once a window had to be read from disk, the windows that follow are asked for all at
            once; without, each is read when the copy reaches it.

    Attributes:
        cold: the disk was waited for, and the windows since were not found resident.
        num_faults: how often it was waited for, for a page that nobody had asked for.
    """

    def __init__(self, shards: Sequence[MappedShard], *, reads_ahead: bool = True) -> None:
        self._shards = shards
        self.reads_ahead = reads_ahead
        self.cold = False
        self.num_faults = 0
        self._num_tokens = np.array([shard.num_tokens for shard in shards], dtype=np.int64)
        self._shard_type = np.min_scalar_type(len(shards))  # selections keep a number of each window
        # One view steps by whole tokens, so it reaches only shards of one type and one alignment.
        kinds = [(shard.dtype.str, shard.address % shard.dtype.itemsize) for shard in shards]
        distinct = sorted(set(kinds))
        self._span_of_shard = np.array([distinct.index(kind) for kind in kinds], dtype=np.intp)
        self._spans = [
            _Span([shard for shard, its in zip(shards, kinds, strict=True) if its == kind])
            for kind in distinct
        ]
        # In tokens from the lowest map of its span.
        self._first_token = np.array(
            [
                max(0, shard.address - self._spans[span].lowest) // shard.dtype.itemsize
                for shard, span in zip(shards, self._span_of_shard.tolist(), strict=True)
            ],
            dtype=np.int64,
        )

    def select(self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]) -> Selection:
        """Choose windows, to be read as a whole or in pieces.

        Args:
            locations: `(k, 2) int64`: shard number, start token; every window inside its shard.
            length: tokens of a window.
            dtype: of what is read; one that holds the shards' tokens.

        Raises:
            CorpusChanged: a shard was truncated or written to.
        """
        shard_numbers, starts = locations[:, 0], locations[:, 1]
        # The indices below are trusted to be inside a map: this is the line that makes them so.
        if (starts < 0).any() or (starts + length > self._num_tokens[shard_numbers]).any():
            raise IndexError(f"a window of {length} tokens lies outside its shard")
        touched = self.touched(shard_numbers)
        self.check_unchanged(touched)
        return Selection(
            self,
            touched,
            shard_numbers.astype(self._shard_type),
            self._first_token[shard_numbers] + starts,
            [_Windows(span, length) for span in self._spans],
            dtype,
        )

    def gather(
        self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]
    ) -> NDArray[np.integer]:
        """Return windows, `(k, length)`: `select` and `read` in one."""
        return self.select(locations, length, dtype).read(0, len(locations))

    def touched(self, shard_numbers: NDArray[np.integer]) -> set[int]:
        """Return the different ones among shard numbers."""
        if len(self._shards) == 1:
            return {0} if len(shard_numbers) else set()
        return set(shard_numbers.tolist())

    def check_unchanged(self, shard_numbers: Iterable[int]) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if one of the shards is not what was opened."""
        for number in shard_numbers:
            self._shards[number].check_unchanged()

    def spans_of(self, shard_numbers: NDArray[np.unsignedinteger]) -> NDArray[np.intp]:
        """Return the numbers of the spans that shards lie in."""
        spans: NDArray[np.intp] = self._span_of_shard[shard_numbers]
        return spans

    def locations(
        self, shard_numbers: NDArray[np.unsignedinteger], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return where windows lie, `(k, 2) int64`, of their shards and their numbers in spans."""
        return np.stack([shard_numbers, numbers - self._first_token[shard_numbers]], axis=1)

    def read_ahead(self, locations: NDArray[np.int64], length: int) -> None:
        """Start to read windows of `length` tokens from disk; waits only while the disk's queue is full."""
        shard_numbers, starts = locations[:, 0], locations[:, 1]
        numbers, spans = self._first_token[shard_numbers] + starts, self._span_of_shard[shard_numbers]
        for number, span in enumerate(self._spans):
            here = numbers[spans == number]
            if here.size:
                read_ahead(span.addresses(here), length * span.dtype.itemsize)

    def are_resident(self, locations: NDArray[np.int64]) -> bool:
        """Tell whether the page cache holds the first token of every window; ends at one it does not."""
        return all(self._shards[number].is_resident(start) for number, start in locations.tolist())


class Selection:
    """Windows that are known to lie inside their shards; for one thread at a time.

    Where windows had to be read from disk one after another, the rest is asked for all at once.

    Args:
        touched: the shards that windows lie in.
        shard_numbers, numbers: `(k,)`: each window's shard, its number in the span.
        windows: of each span.
        dtype: of what is read.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        touched: set[int],
        shard_numbers: NDArray[np.unsignedinteger],
        numbers: NDArray[np.int64],
        windows: Sequence[_Windows],
        dtype: np.dtype[np.integer],
    ) -> None:
        self._gatherer = gatherer
        self.touched = touched
        self._shard_numbers = shard_numbers
        self._numbers = numbers
        self._windows = windows
        self._dtype = dtype
        self._asked_ahead = not gatherer.reads_ahead

    def read(self, first: int, num_windows: int) -> NDArray[np.integer]:
        """Return windows from `first` on: `(num_windows, length)`, C order, the caller's own.

        Blocks while pages are read from disk: never call it in an event loop's thread.

        Raises:
            CorpusChanged: a shard was truncated or written to.
            ReadFailed: the disk did not deliver.
        """
        if self._gatherer.cold and not self._asked_ahead:
            self._ask_ahead(first)
        part = slice(first, first + num_windows)
        before = num_major_faults()
        tokens = self._copy(part)
        if (num_faults := num_major_faults() - before) > 0:
            self._gatherer.num_faults += num_faults
            self._gatherer.cold = True
        # A file cut during the copy reads as zeros: only now is it known that every token copied was
        # the file's own.
        self._gatherer.check_unchanged(self._gatherer.touched(self._shard_numbers[part]))
        return tokens

    def _copy(self, part: slice) -> NDArray[np.integer]:
        numbers, windows = self._numbers[part], self._windows
        if len(windows) == 1 and windows[0].span.dtype == self._dtype:
            return windows[0].copy(numbers)
        spans = self._gatherer.spans_of(self._shard_numbers[part])
        tokens = np.empty((len(numbers), windows[0].length), dtype=self._dtype)
        for span in np.unique(spans).tolist():
            rows = np.flatnonzero(spans == span)
            tokens[rows] = windows[span].copy(numbers[rows])
        return tokens

    def _ask_ahead(self, first: int) -> None:
        """Start reading all windows from `first` on, unless they are resident."""
        self._asked_ahead = True
        rest = self._gatherer.locations(self._shard_numbers[first:], self._numbers[first:])
        if self._gatherer.are_resident(rest[:: max(1, len(rest) // _SAMPLE_WINDOWS)]):
            self._gatherer.cold = False
        else:
            self._gatherer.read_ahead(rest, self._windows[0].length)


class _Span:
    """The stretch of address space that holds shards of one token type and alignment."""

    def __init__(self, shards: Sequence[MappedShard]) -> None:
        self.dtype = shards[0].dtype
        itemsize = self.dtype.itemsize
        mapped = [shard for shard in shards if shard.num_tokens]
        self.lowest = min((shard.address for shard in mapped), default=0)
        self.end = max((shard.address + shard.num_tokens * itemsize for shard in mapped), default=0)

    def addresses(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return byte addresses of tokens, numbered from the lowest map."""
        return np.uint64(self.lowest) + numbers.astype(np.uint64) * np.uint64(self.dtype.itemsize)


class _Windows:
    """All windows of `length` tokens in a span: number k begins k tokens after its lowest map."""

    def __init__(self, span: _Span, length: int) -> None:
        self.span = span
        self.length = length
        self._view: NDArray[np.integer] | None = None

    def copy(self, numbers: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return windows, `(k, length)`; every one of them inside a map."""
        span, length = self.span, self.length
        if (span.end - span.lowest) * length >= _MAX_VIEW_BYTES:
            starts = span.addresses(numbers).tolist()
            stops = [start + length * span.dtype.itemsize for start in starts]
            return np.concatenate(
                [_strided(*ends, span.dtype, length) for ends in zip(starts, stops, strict=True)]
            )
        if self._view is None:
            self._view = _strided(span.lowest, span.end, span.dtype, length)
        tokens: NDArray[np.integer] = self._view[numbers]
        return tokens


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
