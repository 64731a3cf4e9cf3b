"""Substitutes for the units of a family's member that hold a document which it leaves out.

Neither which units these are nor how many is known beforehand: a table of both would be needed for each
member. So the substitute is looked for, along a circle: a keyed permutation of the units of a pool, another
one for each member and each epoch.

    circle           4  0  3  5  2  1     units 0, 3 and 2 hold a document that is left out
    row holds        4  5  5  5  1  1     each of them gives its row to the next one that does not

A unit that is left stands in for those right before it on the circle, so look-ups go the same way back. Where
a share p of the units is left, 1 / p steps are needed in the mean.

Pools are those of exclusions: all windows of a source, or all pieces of a class. A bounded shuffle of windows
looks for a substitute in the group first, as exclusions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, UInt64Array, expanded
from corpus_server.plan.exclusion import REACH, Replacing
from corpus_server.plan.family import Family, circle_keys, member_keys
from corpus_server.plan.mixture import grouped
from corpus_server.plan.numbers import Epochs, UnitNumbers
from corpus_server.plan.orders import Order
from corpus_server.plan.origins import Source
from corpus_server.plan.permutation import Grid, invert, is_one, permute, round_keys
from corpus_server.plan.rows.rows import Rows

COST: Final = 16
"""What a row of a member costs, in rows of a plan without a family."""

_SAMPLE: Final = 1024
_LEAST_KEPT: Final = 32  # of 1/32 of the units each comes 32 times an epoch, after as many steps
_TOKENS_AT_ONCE: Final = 1 << 22
_AT_ONCE: Final = 256  # places of circles, looked at together


class LeftOut(Replacing):
    """What replaces the units of a member, over the sources of a plan.

    Args:
        sources: that know their documents.
        values: of each source, with `by` of the family: what stands for each document, see `leaves_out`.

    Attributes:
        family_keys, keys: of each source, `(sources,) uint64`: of the family, of the member.
        kept: of each source, the share of its units that are kept, of a sample.

    Raises:
        InvalidPlan: the member leaves too little of a source.
    """

    def __init__(
        self,
        family: Family,
        rows: Rows,
        order: Order,
        sources: Sequence[Source],
        values: Sequence[UInt64Array] = (),
    ) -> None:
        assert len(values) == (0 if family.by is None else len(sources))
        self.family, self.rows, self.order, self.sources = family, rows, order, sources
        self._values = values
        self.family_keys = family.keys(rows.sources.names)
        self.keys = member_keys(self.family_keys, family.member)
        self._first, self._pools = rows.first_unit, rows.pools
        self._first_pool = self._pools.searchsorted(self._first)
        self.kept = [self._share_kept(number) for number in range(len(sources))]

    def _share_kept(self, source: int) -> float:
        """Return the share of a source's units that the member keeps, of a sample; refuse too few."""
        first, stop = self._first[source : source + 2].tolist()
        sample = np.unique(np.linspace(first, stop - 1, min(_SAMPLE, stop - first)).astype(np.uint64))
        kept = float(np.mean(~self.holds(source, sample, self.keys[source : source + 1])))
        if kept * _LEAST_KEPT < 1:
            units, name = f"{self.rows.unit}s", self.rows.sources.names[source]
            raise InvalidPlan(
                f"family: member {self.family.member} keeps {kept:.2%} of the {units} of {name!r}; at least "
                f"1/{_LEAST_KEPT} must be kept, and the others hold a document that it leaves out",
                parameter="family.leave_out",
                received=self.family.leave_out,
                remedy="use rows documents, whose pieces hold one document each, or a smaller leave_out",
            )
        return kept

    def leaves_out(self, source: int, keys: UInt64Array, documents: Int64Array) -> NDArray[np.bool_]:
        """Return whether members leave documents of a source out, `(k,)`; see `Family.leaves_out`."""
        its = self._values[source][documents] if self._values else documents.astype(np.uint64)
        return self.family.leaves_out(keys, its)

    def contains(self, units: UnitNumbers) -> NDArray[np.bool_]:
        """See `Replacing.contains`."""
        found = np.zeros(units.shape, dtype=bool)
        for source, here in self._by_source(units):
            found[here] = self.holds(source, units[here], self.keys[source : source + 1])
        return found

    def substitute(self, units: UnitNumbers, epochs: Epochs) -> UnitNumbers:
        """See `Replacing.substitute`."""
        found = units.copy()
        for source, here in self._by_source(units):
            found[here] = self.substitute_of(
                source, units[here], epochs[here], self.keys[source : source + 1]
            )
        return found

    def stood_in_for(
        self, units: UnitNumbers, epochs: Epochs, laps: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """See `Replacing.stood_in_for`."""
        parts = [(units[:0], np.empty(0, np.intp))]
        for source, here in self._by_source(units):
            held, which = self.stood_in_of(source, units[here], epochs[here], self.keys[source : source + 1])
            parts.append((held, np.arange(units.size)[here][which]))
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]

    def substitute_of(
        self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array
    ) -> UnitNumbers:
        """Return what rows hold instead of units of a source; a unit that has no substitute remains.

        Args:
            units, epochs: `(k,)`.
            keys: of a member in the source, `(1,)`, or `(k,)` of several.
        """
        which = np.flatnonzero(self.holds(source, units, keys))
        if not which.size:
            return units
        units, keys = units.copy(), _some(keys, which)
        near, missing = self._nearest(source, units[which], epochs[which], keys)
        units[which] = near
        if missing.size:
            far = which[missing]
            its = _some(keys, missing)
            units[far] = self._farther(source, units[far], epochs[far], its)
        return units

    def stood_in_of(
        self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return the units that others of a source stand in for: the inverse of `substitute_of`.

        Args:
            units, epochs: `(k,)`; none that is left out.
            keys: of a member in the source, `(1,)`, or `(k,)` of several.
        """
        held, which = self._before(source, units, epochs, keys)
        if not self.order.has_groups or not self.rows.is_window:
            return held, which
        its = _some(keys, which)
        _, far = self._nearest(source, held, epochs[which], its)
        parts = [(held[far], which[far])]
        left = np.arange(units.size)
        for distance in range(1, REACH + 1):
            if not left.size:
                break
            its = _some(keys, left)
            before = self._beside(source, units[left], epochs[left], its, -distance)
            is_out = self.holds(source, before, its)
            left = left[is_out]
            parts.append((before[is_out], left))
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]

    def _by_source(self, units: UnitNumbers) -> list[tuple[int, NDArray[np.intp] | slice]]:
        if not units.size:
            return []
        sources = self._first.searchsorted(units, side="right") - 1
        return [(int(sources[0]), slice(None))] if is_one(sources) else list(grouped(sources))

    def holds(self, source: int, units: UnitNumbers, keys: UInt64Array) -> NDArray[np.bool_]:
        """Return whether units of a source hold a document that is left out."""
        distinct, of = np.unique(units, return_inverse=True)
        at_once = max(1, _TOKENS_AT_ONCE // (self.rows.sources.windows.seq_len + 1))
        found = np.zeros(units.shape, dtype=bool)
        for first in range(0, distinct.size, at_once):
            some = distinct[first : first + at_once]
            documents, counts = self.sources[source].documents(*self.rows.tokens_of(source, some))
            begins = counts.cumsum() - counts
            here = np.flatnonzero((of >= first) & (of < first + some.size))
            which, at = expanded(begins[of[here] - first], counts[of[here] - first])
            its = _some(keys, here[which])
            is_out = self.leaves_out(source, its, documents[at])
            found[here[which[is_out]]] = True
        return found

    def _nearest(
        self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return substitutes from the groups of units that are left out, and which have none there."""
        near, missing = units.copy(), np.arange(units.size)
        if not self.order.has_groups or not self.rows.is_window:
            return near, missing
        for distance in range(1, REACH + 1):
            if not missing.size:
                break
            its = _some(keys, missing)
            beside = self._beside(source, units[missing], epochs[missing], its, distance)
            is_out = self.holds(source, beside, its)
            near[missing[~is_out]] = beside[~is_out]
            missing = missing[is_out]
        return near, missing

    def _beside(
        self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array, distance: int
    ) -> UnitNumbers:
        first, its = self._first[source], circle_keys(keys)
        one = int(its[0]) if its.size == 1 else its
        found: UInt64Array = first + self.order.beside(source, epochs, units - first, distance, one)
        return found

    def _farther(self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array) -> UnitNumbers:
        """Return substitutes of units that are left out, from their whole pools."""
        circle, found = self._circle(source, units, epochs, keys), units.copy()
        reach = circle.reach(self.rows.most_places)
        missing, next_ = np.arange(units.size), 1
        while (missing := missing[reach[missing] >= next_]).size:
            count = max(1, _AT_ONCE // missing.size)
            which = np.tile(missing, count)
            distances = np.repeat(np.arange(next_, next_ + count), missing.size)
            places = circle.at(which, distances)
            is_left = ~self.holds(source, places, _some(keys, which))
            is_left &= distances <= reach[which]
            is_left, places = is_left.reshape(count, -1), places.reshape(count, -1)
            which_first, is_found = is_left.argmax(axis=0), is_left.any(axis=0)
            found[missing[is_found]] = places[which_first, np.arange(missing.size)][is_found]
            missing, next_ = missing[~is_found], next_ + count
        return found

    def _before(
        self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return the units that are left out and lie right before others on the circles of their pools."""
        circle = self._circle(source, units, epochs, keys)
        reach = circle.reach(self.rows.most_places)
        parts, left, distance = [(units[:0], np.empty(0, np.intp))], np.arange(units.size), 1
        while (left := left[reach[left] >= distance]).size:
            places = circle.at(left, np.full(left.size, -distance))
            is_out = self.holds(source, places, _some(keys, left))
            left = left[is_out]
            parts.append((places[is_out], left))
            distance += 1
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]

    def _circle(self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array) -> _Circles:
        """Return the circles of the pools of units; each pool of a source counts as an epoch of its own."""
        first_pool, stop_pool = self._first_pool[source : source + 2].tolist()
        pools = self._pools.searchsorted(units, side="right") - 1
        first, sizes = self._pools[pools], self._pools[pools + 1] - self._pools[pools]
        pool_epochs = epochs * np.uint64(stop_pool - first_pool) + (pools - first_pool).astype(np.uint64)
        its = circle_keys(keys)
        rounds = round_keys(int(its[0]) if its.size == 1 else its, pool_epochs)
        grid = int(sizes[0]) if is_one(sizes) else Grid.over(sizes)
        return _Circles(first, sizes, grid, rounds, invert(units - first, grid, rounds).astype(np.int64))


def _some(keys: UInt64Array, which: NDArray[np.intp]) -> UInt64Array:
    """Return the keys of some units: those of one member are one key."""
    return keys if keys.size == 1 else keys[which]


class _Circles(NamedTuple):
    """Units and the circles that they lie on, `(k,)` each."""

    first: UnitNumbers  # of the pool
    sizes: UInt64Array
    grid: Grid | int
    keys: UInt64Array  # round keys, `(rounds, k)` or `(rounds, 1)`
    places: NDArray[np.int64]

    def reach(self, most: int | None) -> NDArray[np.int64]:
        """Return how many places of each circle are looked at, at most."""
        others = self.sizes.astype(np.int64) - 1
        return others if most is None else np.minimum(others, most)

    def at(self, which: NDArray[np.intp], distances: NDArray[np.int64]) -> UnitNumbers:
        """Return the units that lie so many places further on the circles of some; below 0: before."""
        places = (self.places[which] + distances) % self.sizes[which].astype(np.int64)
        grid = self.grid if isinstance(self.grid, int) else self.grid.take(which)
        keys = self.keys if self.keys.shape[1] == 1 else self.keys[:, which]
        units: UInt64Array = self.first[which] + permute(places.astype(np.uint64), grid, keys)
        return units
