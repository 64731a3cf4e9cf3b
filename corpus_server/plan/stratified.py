"""Which source each row of a stage takes in version 2 of the arithmetic: right to a few rows at every step.

Rows here are whole windows, numbered from the stage's start. The sources are joined two by two, those with
the fewest units first, until one *join* is left, which has all 65,536. A join deals its rows to its two
members. The smaller one, with a of the join's n units, gets one row of each *stratum*, a run of about n / a
rows; a hash of the stratum's number chooses which. The other member gets all other rows. A member that is
itself a join deals on what it got.

    units       code 2, math 1, web 5       of 8 here, of 65,536 in truth
    joins       0: math 1 + code 2 = 3      1: join 0 (3) + web (5) = 8
    row of the stage    0  1  2 | 3  4  5 | 6  7      strata of join 1; the next 8 rows have the next three
    row of join 0          0            1   2         one in each stratum
    row of web          0     1   2  3         4      all others
    row of math                         0             one in each three rows of join 0; code has the others

Among the first x rows of a join, a member's differ by at most 1 from its share of x. So among the first x
rows of a stage, a source's differ by less than 4 from its share: docs/arithmetic.md has the proof.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import UInt64Array
from corpus_server.plan.mixture import BLOCK_ROWS, CACHED_TABLES, Mixture
from corpus_server.plan.numbers import SourceRows, StageRows
from corpus_server.plan.permutation import hashed_number

IndexArray = NDArray[np.intp]

_ONE: Final = np.uint64(1)
_32: Final = np.uint64(32)
_CACHED_SHAPES: Final = 256
"""Mixtures whose joins are kept, 3 kB of 64 sources; making them takes 0.1 ms."""


class _Joins(NamedTuple):
    """The joins of a mixture; its members are numbered first, so join j is member `sources + j`.

    Attributes:
        units: `(joins,) uint64`, of both members.
        smaller: `(joins,) uint64`, units of the smaller member.
        members: `(2, joins)`: the smaller member, and the other one.
        parents: by member, the join that it belongs to and whether it is the smaller member there; of all but
            the last join.
        levels: joins by their distance from the last one, the last one first.
    """

    units: UInt64Array
    smaller: UInt64Array
    members: IndexArray
    parents: list[tuple[int, bool]]
    levels: list[IndexArray]


class Stratified(Mixture):
    """The mixture of one stage in version 2."""

    def __init__(self, units: Mapping[str, int], key: int) -> None:
        super().__init__(units, key)
        self._joins = _joined(self._shares)
        self._keys = _join_keys(key, len(self.names))

    def _table(self, block: int) -> NDArray[np.uint16]:
        return _row_table(self._key, block, self._shares)

    def find(self, source: int, numbers: SourceRows) -> StageRows:
        """See `Mixture.find`."""
        joins, member = self._joins, source
        while member < len(joins.parents):
            join, is_smaller = joins.parents[member]
            units, smaller = joins.units[join], joins.smaller[join]
            own = smaller if is_smaller else units - smaller
            laps, within = np.divmod(numbers, own)  # every `units` rows the strata begin anew
            stratum = within if is_smaller else within * smaller // own
            place = _places(self._keys[join], laps * smaller + stratum, stratum, units, smaller)
            if is_smaller:
                row = place
            else:
                row = within + stratum  # a stratum before this one has one row of the smaller member
                row += row >= place
            numbers = laps * units + row
            member = join + len(self.names)
        return numbers

    def count(self, num_rows: UInt64Array) -> UInt64Array:
        """See `Mixture.count`."""
        joins, num_sources = self._joins, len(self.names)
        counts = np.empty((num_sources + len(joins.units), num_rows.size), dtype=np.uint64)
        counts[-1] = num_rows
        for level in joins.levels:
            given, units, smaller = counts[num_sources + level], joins.units[level], joins.smaller[level]
            laps, row = np.divmod(given.T, units)
            stratum = row * smaller // units
            number = laps * smaller + stratum
            before = number + (row > _places(self._keys[level], number, stratum, units, smaller))
            first, second = joins.members[:, level]
            counts[first] = before.T
            counts[second] = given - before.T
        total: UInt64Array = counts[:num_sources].sum(axis=1)
        return total

    def block_of(self, source: int, numbers: SourceRows) -> UInt64Array:
        """See `Mixture.block_of`: `find` computes nothing that several numbers share."""
        return np.zeros_like(numbers)


def _places(
    keys: UInt64Array,
    numbers: UInt64Array,
    strata: UInt64Array,
    units: UInt64Array | np.uint64,
    smaller: UInt64Array | np.uint64,
) -> UInt64Array:
    """Return the rows of the smaller member in strata of joins, counted in their laps of `units` rows.

    Args:
        keys: of the joins.
        numbers: of the strata in the stage.
        strata: the same in their laps.
    """
    begin = (strata * units + smaller - _ONE) // smaller
    width = ((strata + _ONE) * units + smaller - _ONE) // smaller - begin
    places: UInt64Array = begin + ((hashed_number(keys, numbers) >> _32) * width >> _32)
    return places


def _join_keys(key: int, num_sources: int) -> UInt64Array:
    return hashed_number(key, np.arange(num_sources - 1, dtype=np.uint64))


@lru_cache(maxsize=CACHED_TABLES)
def _row_table(key: int, block: int, units: tuple[int, ...]) -> NDArray[np.uint16]:
    """Return where the rows of a block come from, as `Mixture` has it."""
    joins, keys, num_sources = _joined(units), _join_keys(key, len(units)), len(units)
    table = np.empty((2, BLOCK_ROWS), dtype=np.uint16)
    # A lap of the last join is a block, and each join has one lap in it.
    rows_of = {2 * num_sources - 2: np.arange(BLOCK_ROWS, dtype=np.uint16)}
    for join in reversed(range(num_sources - 1)):
        rows, smaller = rows_of.pop(num_sources + join), joins.smaller[join]
        strata = np.arange(smaller, dtype=np.uint64)
        places = _places(keys[join], strata + np.uint64(block) * smaller, strata, joins.units[join], smaller)
        is_other = np.ones(rows.size, dtype=bool)
        is_other[places] = False
        first, second = joins.members[:, join].tolist()
        for member, given in ((first, rows[places]), (second, rows[is_other])):
            if member < num_sources:
                table[0, given] = member
                table[1, given] = np.arange(given.size)
            else:
                rows_of[member] = given
    return table


@lru_cache(maxsize=_CACHED_SHAPES)
def _joined(units: tuple[int, ...]) -> _Joins:
    num_sources = len(units)
    heap = [(own, member) for member, own in enumerate(units)]
    heapq.heapify(heap)
    totals, smaller, members = [], [], []
    parents = [(0, False)] * (2 * num_sources - 2)
    for join in range(num_sources - 1):
        (fewer, first), (more, second) = heapq.heappop(heap), heapq.heappop(heap)
        totals.append(fewer + more)
        smaller.append(fewer)
        members.append((first, second))
        parents[first], parents[second] = (join, True), (join, False)
        heapq.heappush(heap, (fewer + more, num_sources + join))
    depths = [0] * (num_sources - 1)
    for join in reversed(range(num_sources - 2)):
        depths[join] = depths[parents[num_sources + join][0]] + 1
    depth = np.array(depths, dtype=np.intp)
    return _Joins(
        np.array(totals, dtype=np.uint64),
        np.array(smaller, dtype=np.uint64),
        np.array(members, dtype=np.intp).reshape(-1, 2).T,
        parents,
        [np.flatnonzero(depth == level) for level in range(max(depths, default=-1) + 1)],
    )


MIXTURES: Final[Mapping[int, type[Mixture]]] = {1: Mixture, 2: Stratified}
"""By version of the arithmetic; versions differ in nothing else."""
