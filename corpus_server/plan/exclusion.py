"""Substitutes for the units that a stage excludes, from a keyed permutation, so that they can be undone.

A unit is a window or a piece of a document, see `rows.py`; units of one pool may stand in for one another:
all windows of a source, all pieces of a class. Of a pool of n units, x are excluded. The excluded unit of
rank r (among the excluded units) gets the unit of rank p(r) among the n - x others, where p is a keyed
permutation of [0, n - x), another one in each epoch. If more units are excluded than left, ranks wrap: lap
r // (n - x) has a permutation of its own.

A bounded shuffle of windows takes a substitute from the same group, because any other window may lie on the
disk: the next window of the group's circle (see `Order.beside`) that is not excluded. Only where `REACH`
windows in a row are excluded does the substitute come from the whole source, as above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import UInt64Array, expanded
from corpus_server.plan.numbers import Epochs, RowNumbers, SourceNumbers, UnitNumbers
from corpus_server.plan.permutation import Grid, invert, is_one, permute, round_keys
from corpus_server.plan.ranges import Ranges

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
REACH = 32
"""Windows of a circle. Where a tenth is excluded, one excluded window in 10^32 needs more. Each costs as much
as four rows, and where nearly all is excluded, each row pays for 32."""


Beside = Callable[[SourceNumbers, Epochs, RowNumbers, int], RowNumbers]
"""From windows, numbered in their sources, to others of the same groups, another one for each distance: see
`Order.beside`."""


class Replacing(ABC):
    """What replaces units of rows by others: exclusions of a stage, or what a member of a family leaves out.

    Attributes:
        num_excluded: `(sources,) uint64` units that are replaced, or empty if nobody counted them.
    """

    num_excluded: UInt64Array = np.empty(0, dtype=np.uint64)

    @abstractmethod
    def contains(self, units: UnitNumbers) -> NDArray[np.bool_]:
        """Return which units are replaced."""

    @abstractmethod
    def substitute(self, units: UnitNumbers, epochs: Epochs) -> UnitNumbers:
        """Replace units among those that rows hold; one whose pool has no other one remains.

        Args:
            units, epochs: `(k,)`. `units` is not changed, and may be returned if none is replaced.
        """

    def num_laps(self, units: UnitNumbers) -> int:
        """Return how many numbers of laps `stood_in_for` must be asked with for these units."""
        return 1

    @abstractmethod
    def stood_in_for(
        self, units: UnitNumbers, epochs: Epochs, laps: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return the replaced units that others stand in for: the inverse of `substitute`.

        Args:
            units, epochs, laps: `(k,)`; no unit replaced, laps below `num_laps`.

        Returns:
            `(m,)` each: replaced units, and the indices of those that stand in for them.
        """


class Exclusion(Replacing):
    """The units excluded from a stage on, over the sources of a plan.

    Args:
        units: excluded.
        pools: `(pools + 1,) uint64`, each pool's first unit; then the number of all units.
        first_unit: `(sources + 1,) uint64`, each source's first unit, which begins a pool.
        keys: `(sources,) uint64`, from `stream_key("exclude", seed, name)`.
        beside: of a bounded shuffle, whose units are windows and whose pools are sources.

    Attributes:
        num_excluded, num_left: `(sources,) uint64` units.
    """

    def __init__(
        self,
        units: Ranges,
        pools: UInt64Array,
        first_unit: UInt64Array,
        keys: UInt64Array,
        beside: Beside | None = None,
    ) -> None:
        self.units = units
        self._beside_in_source, self._keys, self._first = beside, keys, pools
        self._first_pool = pools.searchsorted(first_unit)  # of each source; then the number of all
        self.num_excluded = np.diff(units.num_inside_below(first_unit))
        self.num_left = np.diff(first_unit) - self.num_excluded
        # Of the pools that have excluded units, which may be few of very many.
        self._pools = _touched(pools, units)
        first, stop = pools[self._pools], pools[self._pools + 1]
        self._inside_before = units.num_inside_below(first)
        self._outside_before = first - self._inside_before
        self._excluded = units.num_inside_below(stop) - self._inside_before
        self._left = stop - first - self._excluded
        # Nothing may be left of a pool; a grid needs a size.
        self._grids = Grid.over([max(1, left) for left in self._left.tolist()])

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.units.num_bytes + 56 * self._pools.size

    def contains(self, units: UnitNumbers) -> NDArray[np.bool_]:
        """See `Replacing.contains`."""
        return self.units.contains(units)

    def substitute(self, units: UnitNumbers, epochs: Epochs) -> UnitNumbers:
        """See `Replacing.substitute`."""
        which = np.flatnonzero(self.units.contains(units))
        if not which.size:
            return units
        near, far = self._nearest(units[which], epochs[which])
        if far.size:
            near[far] = self._farther(units[which[far]], epochs[which[far]])
        replaced = units.copy()
        replaced[which] = near
        return replaced

    def _nearest(self, units: UnitNumbers, epochs: Epochs) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return substitutes of excluded windows from their groups, and which have none there."""
        near, missing = units.copy(), np.arange(units.size)
        if self._beside_in_source is None:
            return near, missing
        for distance in range(1, REACH + 1):
            if not missing.size:
                break
            near[missing] = self._beside(self._beside_in_source, units[missing], epochs[missing], distance)
            missing = missing[self.units.contains(near[missing])]
        return near, missing

    def _beside(self, beside: Beside, windows: UnitNumbers, epochs: Epochs, distance: int) -> UnitNumbers:
        sources = self._first.searchsorted(windows, side="right") - 1  # which are their own pools
        source = int(sources[0]) if is_one(sources) else sources
        first = self._first[source]
        return first + beside(source, epochs, windows - first, distance)

    def _farther(self, units: UnitNumbers, epochs: Epochs) -> UnitNumbers:
        """Return substitutes of excluded units from their whole pools."""
        pools = self._numbers(units)
        ranks = self.units.num_inside_below(units) - self._inside_before[pools]
        left = np.maximum(np.uint64(1), self._left[pools])
        laps, ranks = np.divmod(ranks, left)
        places = permute(ranks, self._grid(pools), self._round_keys(pools, epochs, laps))
        substitutes = self.units.nth_outside(places + self._outside_before[pools])
        return np.where(self._left[pools] > 0, substitutes, units)

    def _numbers(self, units: UnitNumbers) -> NDArray[np.intp]:
        """Return the pools of units, as numbers of those that have excluded ones; others have a wrong one."""
        pools = self._pools.searchsorted(self._first.searchsorted(units, side="right") - 1)
        return np.minimum(pools, self._pools.size - 1)

    def _grid(self, pools: NDArray[np.intp]) -> Grid | int:
        return max(1, int(self._left[pools[0]])) if is_one(pools) else self._grids.take(pools)

    def _round_keys(self, pools: NDArray[np.intp], epochs: Epochs, laps: UInt64Array) -> UInt64Array:
        """Return the round keys of laps of pools; each pool of a source counts as an epoch of its own."""
        numbers = self._pools[pools[:1] if is_one(pools) else pools]
        sources = self._first_pool.searchsorted(numbers, side="right") - 1
        num_pools = np.diff(self._first_pool)[sources].astype(np.uint64)
        pool_epochs = epochs * num_pools + (numbers - self._first_pool[sources]).astype(np.uint64)
        keys = self._keys[sources]
        return round_keys(int(keys[0]) if numbers.size < pools.size else keys, pool_epochs + laps * _GOLDEN)

    def num_laps(self, units: UnitNumbers) -> int:
        """Return how many excluded units, per epoch, one of these units that are left replaces at most."""
        pools = np.unique(self._first.searchsorted(units, side="right") - 1)
        known = np.isin(self._pools, pools) & (self._left > 0)
        laps = -(-self._excluded[known].astype(np.int64) // self._left[known].astype(np.int64))
        return int(laps.max(initial=0))

    def stood_in_for(
        self, units: UnitNumbers, epochs: Epochs, laps: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """See `Replacing.stood_in_for`."""
        pools = self._numbers(units)
        numbers = self.units.num_outside_below(units) - self._outside_before[pools]
        # Those in a pool with an excluded unit: the number of another one is too large, or below 0 and wraps.
        which = np.flatnonzero(numbers < self._left[pools])
        pools, numbers = pools[which], numbers[which]
        keys = self._round_keys(pools, epochs[which], laps[which])
        ranks = invert(numbers, self._grid(pools), keys) + laps[which] * self._left[pools]
        kept = np.flatnonzero(ranks < self._excluded[pools])  # the last lap may be incomplete
        excluded = self.units.nth_inside(ranks[kept] + self._inside_before[pools[kept]])
        which = which[kept]
        if (beside := self._beside_in_source) is None:
            return excluded, which
        _, far = self._nearest(excluded, epochs[which])
        parts = [(excluded[far], which[far])]
        which = np.flatnonzero(laps == 0)  # each window and epoch once
        for distance in range(1, REACH + 1):
            if not which.size:
                break
            windows = self._beside(beside, units[which], epochs[which], -distance)
            is_excluded = self.units.contains(windows)
            which = which[is_excluded]
            parts.append((windows[is_excluded], which))
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]


def _touched(pools: UInt64Array, units: Ranges) -> NDArray[np.intp]:
    """Return the pools that some units belong to, ascending."""
    if pools.size <= units.starts.size:
        return np.flatnonzero(np.diff(units.num_inside_below(pools)))
    low = pools.searchsorted(units.starts, side="right") - 1
    num_pools = pools.searchsorted(units.stops - np.uint64(1), side="right") - low
    return np.unique(expanded(low, num_pools)[1])
