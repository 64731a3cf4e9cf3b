"""Substitutes for the units of a family's member that hold a document which it leaves out.

Neither which units these are nor how many is known beforehand: a table of both would be needed for each
member. So the substitute is looked for, along a circle: a keyed permutation of the units of a pool, another
one for each member and each epoch.

    circle           4  0  3  5  2  1     units 0, 3 and 2 hold a document that is left out
    row holds        4  5  5  5  1  1     each of them gives its row to the next one that does not

A unit that is left stands in for those right before it on the circle, so look-ups go the same way back. Where
a share p of the units is left, 1 / p steps are needed in the mean.

A member may double documents, too. Then units that are left out open parentheses on the circle, and units
that are doubled close them. Who closes a parenthesis takes the row of who opened it, so it comes twice:

    circle           0  3  4  5  2  1     units 0 and 3 are left out, 5 and 2 doubled
                     (  (  .  )  )  .
    row holds        2  5  4  5  2  1

A parenthesis that nothing closes within `MATCH_PLACES` gives its row to the next unit that is neither left
out nor doubled. So a unit that is doubled comes once or twice, never more.

Pools are those of exclusions: all windows of a source, or all pieces of a class. A bounded shuffle of windows
looks for a substitute in the group first, as exclusions do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

MATCH_PLACES: Final = 256
"""Places of a circle. Where a tenth is left out and a tenth doubled, 89 % of the parentheses close within
them."""

_COST: Final = 16
_DOUBLE_COST: Final = 64

_SAMPLE: Final = 1024
_LEAST_KEPT: Final = 32  # of 1/32 of the units each comes 32 times an epoch, after as many steps
_TOKENS_AT_ONCE: Final = 1 << 22
_AT_ONCE: Final = 1024  # places of circles, looked at together


class LeftOut(Replacing):
    """What replaces the units of a member, over the sources of a plan.

    Args:
        sources: that know their documents.
        values: of each source, with `by` of the family: what stands for each document, see `Family.signs`.

    Attributes:
        family_keys, keys: of each source, `(sources,) uint64`: of the family, of the member.
        kept, doubled: of each source, the share of its units that are not left out, that are doubled; of a
            sample.
        cost: what a row of a member costs, in rows of a plan without a family.

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
        self.cost = _COST if family.double is None else _DOUBLE_COST
        # What is looked for along which circle, one after another, until something is found.
        self._searches = [(self._group, False)] * self._in_groups + [(self._circle, False)]
        if family.double is not None:
            self._searches.insert(0, (self._searches[0][0], True))
        shares = [self._shares(number) for number in range(len(sources))]
        self.kept, self.doubled = [kept for kept, _ in shares], [doubled for _, doubled in shares]

    @property
    def _in_groups(self) -> bool:
        return self.order.has_groups and self.rows.is_window

    def _shares(self, source: int) -> tuple[float, float]:
        """Return the shares of a source's units that are not left out, that are doubled; refuse too few."""
        first, stop = self._first[source : source + 2].tolist()
        sample = np.unique(np.linspace(first, stop - 1, min(_SAMPLE, stop - first)).astype(np.uint64))
        signs = self.signs(source, sample, self.keys[source : source + 1])
        if (plain := float(np.mean(signs == 0))) * _LEAST_KEPT < 1:
            units, name = f"{self.rows.unit}s", self.rows.sources.names[source]
            others, field = "that it leaves out", "leave_out"
            if self.family.double is not None:
                units, others, field = f"{units} once", f"{others} or doubles", "leave_out or double"
            raise InvalidPlan(
                f"family: member {self.family.member} keeps {plain:.2%} of the {units} of {name!r}; at least "
                f"1/{_LEAST_KEPT} must be kept, and the others hold a document {others}",
                parameter="family.leave_out",
                received=self.family.leave_out,
                remedy=f"use rows documents, whose pieces hold one document each, or a smaller {field}",
            )
        return float(np.mean(signs <= 0)), float(np.mean(signs < 0))

    def signs_of(self, source: int, keys: UInt64Array, documents: Int64Array) -> NDArray[np.int8]:
        """Return what members do with documents of a source, `(k,)`; see `Family.signs`."""
        its = self._values[source][documents] if self._values else documents.astype(np.uint64)
        return self.family.signs(keys, its)

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
        found = units.copy()
        for search in self._searches:
            its = _some(keys, which)
            others, at = self._found(source, units[which], epochs[which], its, search)
            found[which[at]] = others
            if not (which := np.delete(which, at)).size:
                break
        return found

    def stood_in_of(
        self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return the units that others of a source stand in for: the inverse of `substitute_of`.

        Args:
            units, epochs: `(k,)`; none that is left out.
            keys: of a member in the source, `(1,)`, or `(k,)` of several.
        """
        signs = self.signs(source, units, keys) if len(self._searches) > 1 else np.zeros(units.shape, np.int8)
        parts = [(units[:0], np.empty(0, np.intp))]
        for number, search in enumerate(self._searches):
            is_match = search[1]
            which = np.flatnonzero(signs == (-1 if is_match else 0))
            if not which.size:
                continue
            back = self._found if is_match else self._before
            held, at = back(source, units[which], epochs[which], _some(keys, which), search, step=-1)
            which = which[at]
            for earlier in self._searches[:number]:  # what finds a substitute there does not look further
                _, at = self._found(source, held, epochs[which], _some(keys, which), earlier)
                held, which = np.delete(held, at), np.delete(which, at)
            parts.append((held, which))
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]

    def _by_source(self, units: UnitNumbers) -> list[tuple[int, NDArray[np.intp] | slice]]:
        if not units.size:
            return []
        sources = self._first.searchsorted(units, side="right") - 1
        return [(int(sources[0]), slice(None))] if is_one(sources) else list(grouped(sources))

    def holds(self, source: int, units: UnitNumbers, keys: UInt64Array) -> NDArray[np.bool_]:
        """Return whether units of a source hold a document that is left out."""
        return self.signs(source, units, keys) > 0

    def signs(self, source: int, units: UnitNumbers, keys: UInt64Array) -> NDArray[np.int8]:
        """Return what members do with units of a source, `(k,)`.

        1 leaves out, because it holds a document that is left out; -1 doubles, because it holds a document
        that is doubled, and none that is left out; 0 neither.
        """
        distinct, of = np.unique(units, return_inverse=True)
        at_once = max(1, _TOKENS_AT_ONCE // (self.rows.sources.windows.seq_len + 1))
        found = np.zeros(units.shape, dtype=np.int8)
        for first in range(0, distinct.size, at_once):
            some = distinct[first : first + at_once]
            documents, counts = self.sources[source].documents(*self.rows.tokens_of(source, some))
            begins = counts.cumsum() - counts
            here = np.flatnonzero((of >= first) & (of < first + some.size))
            which, at = expanded(begins[of[here] - first], counts[of[here] - first])
            signs = self.signs_of(source, _some(keys, here[which]), documents[at])
            found[here[which[signs < 0]]] = -1
            found[here[which[signs > 0]]] = 1
        return found

    def _found(
        self,
        source: int,
        units: UnitNumbers,
        epochs: Epochs,
        keys: UInt64Array,
        search: tuple[_WalkOf, bool],
        step: int = 1,
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return what is found along the circles of units: the units there, and for which of those given.

        The first unit that is neither left out nor doubled; or the one that closes the parenthesis that a
        unit opens. With a `step` of -1 the one that opens what a unit closes.
        """
        walk_of, is_match = search
        walk = walk_of(source, units, epochs, keys)
        reach = np.minimum(walk.reach, MATCH_PLACES) if is_match else walk.reach
        parts, depth = [(units[:0], np.empty(0, np.intp))], np.ones(units.shape, dtype=np.int64)
        left, next_ = np.arange(units.size), 1
        while (left := left[reach[left] >= next_]).size:
            count = max(1, _AT_ONCE // left.size)
            distances = np.arange(next_, next_ + count)
            which = np.repeat(left, count)
            others = walk.at(which, step * np.tile(distances, left.size))
            signs = self.signs(source, others, _some(keys, which)).reshape(-1, count)
            if is_match:
                depths = depth[left, None] + step * signs.cumsum(axis=1)
                depth[left] = depths[:, -1]
                is_end = depths == 0
            else:
                is_end = signs == 0
            first, has_end = is_end.argmax(axis=1), is_end.any(axis=1)
            within = has_end & (distances[first] <= reach[left])
            parts.append((others.reshape(-1, count)[within, first[within]], left[within]))
            left, next_ = left[~has_end], next_ + count
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]

    def _before(
        self,
        source: int,
        units: UnitNumbers,
        epochs: Epochs,
        keys: UInt64Array,
        search: tuple[_WalkOf, bool],
        step: int,
    ) -> tuple[UnitNumbers, NDArray[np.intp]]:
        """Return units that are left out and may find those given along their circles, and which of these."""
        walk = search[0](source, units, epochs, keys)
        parts, left, distance = [(units[:0], np.empty(0, np.intp))], np.arange(units.size), 1
        while (left := left[walk.reach[left] >= distance]).size:
            places = walk.at(left, np.full(left.size, step * distance))
            signs = self.signs(source, places, _some(keys, left))
            parts.append((places[signs > 0], left[signs > 0]))
            left = left[signs != 0]
            distance += 1
        return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]

    def _group(self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array) -> _Walk:
        """Return the circles of the groups of windows."""
        first, its = self._first[source], circle_keys(keys)

        def at(which: NDArray[np.intp], distances: Int64Array) -> UnitNumbers:
            one = int(its[0]) if its.size == 1 else its[which]
            rows = units[which] - first
            found: UInt64Array = first + self.order.beside(source, epochs[which], rows, distances, one)
            return found

        return _Walk(at, np.full(units.size, REACH))

    def _circle(self, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array) -> _Walk:
        """Return the circles of the pools of units; each pool of a source counts as an epoch of its own."""
        first_pool, stop_pool = self._first_pool[source : source + 2].tolist()
        pools = self._pools.searchsorted(units, side="right") - 1
        first, sizes = self._pools[pools], self._pools[pools + 1] - self._pools[pools]
        pool_epochs = epochs * np.uint64(stop_pool - first_pool) + (pools - first_pool).astype(np.uint64)
        its = circle_keys(keys)
        rounds = round_keys(int(its[0]) if its.size == 1 else its, pool_epochs)
        grid = int(sizes[0]) if is_one(sizes) else Grid.over(sizes)
        circles = _Circles(first, sizes, grid, rounds, invert(units - first, grid, rounds).astype(np.int64))
        others, most = sizes.astype(np.int64) - 1, self.rows.most_places
        return _Walk(circles.at, others if most is None else np.minimum(others, most))


def _some(keys: UInt64Array, which: NDArray[np.intp]) -> UInt64Array:
    """Return the keys of some units: those of one member are one key."""
    return keys if keys.size == 1 else keys[which]


class _Walk(NamedTuple):
    """Circles that units lie on."""

    at: Callable[[NDArray[np.intp], Int64Array], UnitNumbers]
    """From some of the units to those that lie so many places further; below 0: before."""
    reach: Int64Array  # how many places of each are looked at, at most


_WalkOf = Callable[[int, UnitNumbers, Epochs, UInt64Array], _Walk]


class _Circles(NamedTuple):
    """Units and the circles that they lie on, `(k,)` each."""

    first: UnitNumbers  # of the pool
    sizes: UInt64Array
    grid: Grid | int
    keys: UInt64Array  # round keys, `(rounds, k)` or `(rounds, 1)`
    places: NDArray[np.int64]

    def at(self, which: NDArray[np.intp], distances: NDArray[np.int64]) -> UnitNumbers:
        """Return the units that lie so many places further on the circles of some; below 0: before."""
        places = (self.places[which] + distances) % self.sizes[which].astype(np.int64)
        grid = self.grid if isinstance(self.grid, int) else self.grid.take(which)
        keys = self.keys if self.keys.shape[1] == 1 else self.keys[:, which]
        units: UInt64Array = self.first[which] + permute(places.astype(np.uint64), grid, keys)
        return units
