"""Substitutes for the windows that a stage excludes, from a keyed permutation, so that they can be undone.

Of a source with n windows, x are excluded. The excluded window of rank r (among the excluded windows) gets
the window of rank p(r) among the n - x others, where p is a keyed permutation of [0, n - x), another one in
each epoch. If more windows are excluded than left, ranks wrap: lap r // (n - x) has a permutation of its own.

A bounded shuffle takes a substitute from the same group, because any other window may lie on the disk: the
next window of the group's circle (see `Groups.beside`) that is not excluded. Only where `_REACH` windows in a
row are excluded does the substitute come from the whole source, as above.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.orders.order import Grouped
from corpus_server.plan.permutation import Grid, invert, permute, round_keys
from corpus_server.plan.ranges import Ranges

UInt64Array = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_REACH = 32
"""Windows of a circle. Where a tenth is excluded, one excluded window in 10^32 needs more. Each costs as much
as four rows, and where nearly all is excluded, each row pays for 32."""


class Exclusion:
    """The windows excluded from a stage on, over the sources of a plan.

    Args:
        windows: excluded; numbered through all sources, of which source s has [first[s], first[s + 1]).
        first: `(sources + 1,) uint64`.
        keys: `(sources,) uint64`, from `stream_key("exclude", seed, name)`.
        groups: of a bounded shuffle.

    Attributes:
        num_excluded, num_left: `(sources,) uint64` windows.
    """

    def __init__(
        self, windows: Ranges, first: UInt64Array, keys: UInt64Array, groups: Grouped | None = None
    ) -> None:
        self.windows = windows
        self._groups = groups
        self._first = first[:-1]
        self._keys = keys
        inside_before = windows.num_inside_below(first)
        self._inside_before = inside_before[:-1]
        self._outside_before = first[:-1] - inside_before[:-1]
        self.num_excluded = np.diff(inside_before)
        self.num_left = np.diff(first) - self.num_excluded
        # Nothing may be left of a source that the stage does not use; a grid needs a size.
        self._grids = Grid.over([max(1, left) for left in self.num_left.tolist()])

    def substitute(
        self, sources: NDArray[np.intp] | int, windows: UInt64Array, epochs: UInt64Array
    ) -> UInt64Array:
        """Replace the excluded windows among those that rows hold.

        Args:
            sources: `(k,)` source of each row, or one for all.
            windows, epochs: `(k,) uint64`. `windows` is not changed, and returned if none is excluded.
        """
        rows = np.flatnonzero(self.windows.contains(windows))
        if not rows.size:
            return windows
        its = sources if isinstance(sources, int) else sources[rows]
        near, far = self._nearest(its, windows[rows], epochs[rows])
        if far.size:
            its = its if isinstance(its, int) else its[far]
            near[far] = self._farther(its, windows[rows[far]], epochs[rows[far]])
        replaced = windows.copy()
        replaced[rows] = near
        return replaced

    def _nearest(
        self, sources: NDArray[np.intp] | int, windows: UInt64Array, epochs: UInt64Array
    ) -> tuple[UInt64Array, NDArray[np.intp]]:
        """Return substitutes of excluded windows from their groups, and which have none there."""
        found, missing = windows.copy(), np.arange(windows.size)
        for distance in range(1, _REACH + 1 if self._groups is not None else 0):
            if not missing.size:
                break
            its = sources if isinstance(sources, int) else sources[missing]
            found[missing] = self._beside(its, windows[missing], epochs[missing], distance)
            missing = missing[self.windows.contains(found[missing])]
        return found, missing

    def _beside(
        self, sources: NDArray[np.intp] | int, windows: UInt64Array, epochs: UInt64Array, distance: int
    ) -> UInt64Array:
        assert self._groups is not None
        first = self._first[sources]
        return first + self._groups.beside(sources, epochs, windows - first, distance)

    def _farther(
        self, sources: NDArray[np.intp] | int, windows: UInt64Array, epochs: UInt64Array
    ) -> UInt64Array:
        """Return substitutes of excluded windows from their whole sources."""
        ranks = self.windows.num_inside_below(windows) - self._inside_before[sources]
        left = self.num_left[sources]
        grid = int(left) if isinstance(sources, int) else self._grids.take(sources)
        laps = ranks // left
        lap_epochs: UInt64Array = epochs + laps.astype(np.uint64) * _GOLDEN
        keys = round_keys(np.broadcast_to(self._keys[sources], ranks.shape), lap_epochs)
        return self.windows.nth_outside(permute(ranks % left, grid, keys) + self._outside_before[sources])

    def num_laps(self, source: int) -> int:
        """Return how many excluded windows, per epoch, a window that is left may stand in for."""
        left = int(self.num_left[source])
        return -(-int(self.num_excluded[source]) // left) if left else 0

    def stood_in_for(
        self, source: int, windows: UInt64Array, epochs: UInt64Array, laps: UInt64Array
    ) -> tuple[UInt64Array, NDArray[np.intp]]:
        """Return the excluded windows that others of a source stand in for: the inverse of `substitute`.

        Args:
            windows, epochs, laps: `(k,) uint64`; no window excluded, laps below `num_laps`.

        Returns:
            `(m,)` each: excluded windows, and the indices of those that stand in for them.
        """
        left = int(self.num_left[source])
        numbers = self.windows.num_outside_below(windows) - self._outside_before[source]
        keys = round_keys(int(self._keys[source]), laps * _GOLDEN + epochs)
        ranks = invert(numbers, left, keys) + laps * np.uint64(left)
        which = np.flatnonzero(ranks < self.num_excluded[source])  # the last lap may be incomplete
        held = self.windows.nth_inside(ranks[which] + self._inside_before[source])
        if self._groups is None:
            return held, which
        _, far = self._nearest(source, held, epochs[which])
        found, indices = [held[far]], [which[far]]
        which = np.flatnonzero(laps == 0)  # each window and epoch once
        for distance in range(1, _REACH + 1):
            if not which.size:
                break
            held = self._beside(source, windows[which], epochs[which], -distance)
            inside = self.windows.contains(held)
            held, which = held[inside], which[inside]
            found.append(held)
            indices.append(which)
        return np.concatenate(found), np.concatenate(indices)
