"""What a row of a plan consists of: a window, or pieces of several documents laid end to end.

Rows are numbered through all sources of a plan, so that a number says its source. An order permutes the rows
of each source by numbers alone, see `orders/order.py`; here are the tokens that a number stands for.

A row holds *units*, which are numbered through all sources, too, and are what a look-up finds and an
exclusion replaces: its window, or several pieces of documents. Units that may stand in for one another are a
*pool*.

Windows are numbered through the shards in order and never cross a shard. With shards of 10 and 7
tokens, `seq_len = 3` and `stride = 3`:

    number        0     1     2   |  3     4
    shard         0     0     0   |  1     1
    start         0     3     6   |  0     3
    tokens       0-3   3-6   6-9  | 0-3   3-6
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Pieces
from corpus_server.plan.exclusion import Exclusion, Grouped, Pools
from corpus_server.plan.ranges import Ranges
from corpus_server.work import Budget

UInt64Array = NDArray[np.uint64]
Positions = UInt64Array
"""Places of a source in a run, `(k,)`: ascending ones are ascending steps and rows of the global batch."""
Epochs = UInt64Array
"""Passes over a source, `(k,)`: position p of a source with n rows lies in epoch p // n ..."""
Offsets = UInt64Array
"""... at offset p % n, `(k,)`."""
RowNumbers = UInt64Array
"""Rows, `(k,)`: an order numbers those of each source from 0, all others through the sources."""
UnitNumbers = UInt64Array
"""Units of rows, `(k,)`, through the sources: windows, pieces of documents, samples."""
Source = NDArray[np.intp] | int
"""The source of each of k rows, `(k,)`, or one for all."""


class Rows(ABC):
    """The rows of a plan's sources.

    Attributes:
        name: how messages call them.
        unit: the word for what they hold.
        is_window: whether each row is one piece, so that a shard and a start token say where it lies.
        holds_several: whether a row may hold several units.
        num_rows: `(sources,) uint64`, over which the order permutes.
        epoch_rows: `(sources,) uint64`, rows of one pass over a source, by which epochs are counted.
        first_row: `(sources + 1,) uint64`, number of each source's first row; then of all rows.
        shard_row: `(shards + 1,) uint64`, number of each shard's first row; then of all rows. None if a row
            may join pieces of several shards.
        pools: of units.
    """

    name: str
    unit: str
    is_window: bool
    holds_several = False
    num_rows: UInt64Array
    epoch_rows: UInt64Array
    first_row: UInt64Array
    shard_row: UInt64Array | None
    pools: Pools

    @abstractmethod
    def pieces(
        self, sources: Source, rows: RowNumbers, epochs: Epochs, exclusion: Exclusion | None = None
    ) -> Pieces:
        """Return what rows consist of, in these epochs of their sources: `(k,)` each.

        Each row has a piece at least. A piece of no token is a place that an exclusion left empty.
        """

    def shards(
        self, sources: Source, rows: RowNumbers, epochs: Epochs, exclusion: Exclusion | None
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which shards rows read: `(m,)` each, a shard, and the row among those given; pairs once."""
        if self.shard_row is None:
            pieces = self.pieces(sources, rows, epochs, exclusion)
            pairs = np.unique(np.stack((pieces.each_once(), pieces.places[:, 0]), axis=1), axis=0)
            return pairs[:, 1], pairs[:, 0]
        if exclusion is not None and self.is_window:
            rows = exclusion.substitute(rows, epochs)  # of other rows what stands in lies in the same shard
        return self.shard_row.searchsorted(rows, side="right") - 1, np.arange(rows.size)

    def costs(self, sources: Source, rows: RowNumbers) -> NDArray[np.int64]:
        """Return what attention within the documents of rows costs, `(k,)`: tokens squared, of each piece.

        The same in every epoch, whatever is excluded. Needed of layouts that can balance ranks.
        """
        raise NotImplementedError(f"{self.name} have no costs")

    def holders(self, source: int, units: UnitNumbers, epochs: Epochs) -> RowNumbers:
        """Return the rows that hold units of a source in epochs, `(k,)` or `(1,)`."""
        return units

    @abstractmethod
    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """Return the units that hold a token of a source in some ranges: `(k, 2)`, half-open ranges."""

    def exclusion(self, units: Ranges, keys: UInt64Array, groups: Grouped | None) -> Exclusion:
        """Return what replaces excluded units.

        Args:
            keys: `(sources,) uint64`, from `stream_key("exclude", seed, name)`.
            groups: of a bounded shuffle.
        """
        return Exclusion(units, self.pools, keys, groups)

    @abstractmethod
    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where rows [start, stop), at least one, lie: shard number, tokens [start, stop) in it."""

    @abstractmethod
    def reach(self, source: int, num_rows: int) -> int:
        """Return about how many tokens of a source so many neighbouring rows lie among, at most."""

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays that no table holds."""
        return 0

    @property
    def row_pieces(self) -> int:
        """Pieces of a row, in the mean."""
        return 1

    def describe(self, source: int) -> dict[str, Any]:
        """Return what a plan's description says of a source besides."""
        return {}


class Windows(Rows):
    """Windows of `seq_len + 1` tokens as rows; those of a shard begin `stride` tokens apart.

    Takes O(shards) memory, and O(log shards) time per look-up.

    Args:
        shard_tokens: of each source, the tokens of its shards.

    Attributes:
        shard_window: `(shards + 1,) uint64`, number of each shard's first window; then of all windows.
        shard_token: `(shards + 1,) uint64`, tokens in the shards before each; then in all.
        first_shard: `(sources + 1,)`, number of each source's first shard; then of all shards.
        first_token: `(sources + 1,) uint64`, tokens of the sources before each; then of all.
        longest: tokens of each source's longest shard.
    """

    name, unit, is_window = "windows", "window", True

    def __init__(self, shard_tokens: Sequence[Sequence[int]], *, seq_len: int, stride: int) -> None:
        self.seq_len, self.stride = seq_len, stride
        every = [num_tokens for shards in shard_tokens for num_tokens in shards]
        counts = [max(0, (num_tokens - seq_len - 1) // stride + 1) for num_tokens in every]
        self.shard_window = np.cumsum([0, *counts], dtype=np.uint64)
        self.shard_token = np.cumsum([0, *every], dtype=np.uint64)
        self.first_shard = np.cumsum([0, *map(len, shard_tokens)])
        self.first_row, self.first_token = (
            each[self.first_shard] for each in (self.shard_window, self.shard_token)
        )
        self.num_rows = self.epoch_rows = np.diff(self.first_row)
        self.shard_row = self.shard_window
        self.pools = Pools.of_sources(self.first_row)
        self.longest = [max(shards, default=0) for shards in shard_tokens]

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.shard_window.nbytes + self.shard_token.nbytes

    def locate(self, windows: UInt64Array) -> NDArray[np.int64]:
        """Return where `(k,)` windows lie: `(k, 2) int64`, shard number and start token in it."""
        return self._pieces(windows).places[:, :2]

    def _pieces(self, windows: UInt64Array) -> Pieces:
        shards = self.shard_window.searchsorted(windows, side="right") - 1
        places = np.empty((len(windows), 3), dtype=np.int64)
        places[:, 0] = shards
        places[:, 1] = (windows - self.shard_window[shards]) * np.uint64(self.stride)
        places[:, 2] = self.seq_len + 1
        return Pieces(places, np.arange(len(windows) + 1))

    def pieces(
        self, sources: Source, rows: RowNumbers, epochs: Epochs, exclusion: Exclusion | None = None
    ) -> Pieces:
        """See `Rows.pieces`: one each."""
        return self._pieces(rows if exclusion is None else exclusion.substitute(rows, epochs))

    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """See `Rows.within`."""
        first = self.first_token[source]
        return self.holding(first + ranges.starts, first + ranges.stops)

    def reach(self, source: int, num_rows: int) -> int:
        """See `Rows.reach`."""
        return num_rows * self.stride + self.seq_len

    def holding(self, starts: UInt64Array, stops: UInt64Array) -> UInt64Array:
        """Return the windows that hold a token of each range: `(k, 2) uint64`, half-open, maybe empty.

        The windows that touch a range are neighbours, so that one range of numbers holds them.

        Args:
            starts, stops: `(k,) uint64`, half-open ranges of tokens over all shards, none empty.
        """
        lowest = self._window_at(starts, reach=self.seq_len + 1)
        above = self._window_at(stops - np.uint64(1), reach=0)
        return np.stack((np.minimum(lowest, above), above), axis=1)

    def _window_at(self, tokens: UInt64Array, *, reach: int) -> UInt64Array:
        """Return for each token the first window that starts after `token - reach`."""
        shards = np.searchsorted(self.shard_token, tokens, side="right") - 1
        local = (tokens - self.shard_token[shards]).astype(np.int64)
        count = (self.shard_window[shards + 1] - self.shard_window[shards]).astype(np.int64)
        number = np.clip((local - reach) // self.stride + 1, 0, count)
        return self.shard_window[shards] + number.astype(np.uint64)

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`."""
        first, last = (self.shard_window.searchsorted((start, stop - 1), side="right") - 1).tolist()
        bounds = [start, *self.shard_window[first + 1 : last + 1].tolist(), stop]
        found = []
        for shard, (low, high) in enumerate(pairwise(bounds), first):
            if low < high:  # a shard may have no window
                origin = int(self.shard_window[shard])
                begin, last_begin = ((at - origin) * self.stride for at in (low, high - 1))
                found.append((shard, begin, last_begin + self.seq_len + 1))
        return found
