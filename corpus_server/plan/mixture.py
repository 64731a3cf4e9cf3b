"""Which source each row of a stage takes, and how many rows each source has given.

A row here is a whole window; a stage that reads windows in parts has several rows of its batch in one.
Rows of a stage are numbered from its start and fall into blocks of 65,536. Within a block every
source has exactly its units, and a keyed permutation of the block decides which rows: row o of a
block goes to the source whose share holds the slot that o is sent to.

    units          code 2, web 6            (of 8 here, of 65,536 in truth)
    slot           0  1 | 2  3  4  5  6  7
    row o          0  1  2  3  4  5  6  7
    permuted       5  0  7  2  1  4  6  3
    source         w  c  w  w  c  w  w  w
    rank           0  0  1  2  1  3  4  5   row o is the rank-th row of its source in the block
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import UInt64Array
from corpus_server.plan.numbers import SourceNumbers, SourceRows, StageRows
from corpus_server.plan.permutation import permute_block, round_keys

BLOCK_ROWS = 65_536
_BLOCK_ROWS = np.array(BLOCK_ROWS, dtype=np.uint64)
BLOCK_COST = 256
"""What a block costs a budget, in rows: 0.4 ms."""
CACHED_TABLES = 64
"""Blocks; the table of one has 256 kB, its slots have 128 kB."""


def quantise(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Return units of 1/65536 by name, sorted by name, by largest remainder; they sum to 65,536.

    Raises:
        InvalidPlan: a weight is too small for a single unit.
    """
    names = sorted(weights)
    # In integers over a common denominator: a sum of floats depends on their order and may be infinite.
    ratios = [weights[name].as_integer_ratio() for name in names]
    denominator = lcm(*(below for _, below in ratios))
    exact = [above * (denominator // below) for above, below in ratios]
    total = sum(exact)
    shares = [divmod(each * BLOCK_ROWS, total) for each in exact]
    units = [share for share, _ in shares]
    by_remainder = sorted(range(len(names)), key=lambda k: (-shares[k][1], names[k]))
    for k in by_remainder[: BLOCK_ROWS - sum(units)]:
        units[k] += 1
    for name, own, share in zip(names, exact, units, strict=True):
        if share == 0:
            weight = weights[name]
            given = float(weight) if isinstance(weight, Fraction) else weight
            raise InvalidPlan(
                f"stages[].mixture.{name}: weight {given} is {own / total:.2g} of the sum, "
                f"less than the smallest share of 1/{BLOCK_ROWS}; raise it or leave the source out",
                parameter=f"stages[].mixture.{name}",
                received=given,
                accepted=f"at least 1/{BLOCK_ROWS} of the sum of weights",
            )
    return dict(zip(names, units, strict=True))


def grouped(numbers: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield each number that occurs, in ascending order, with the indices where it occurs."""
    order = np.argsort(numbers, kind="stable")
    begins = np.flatnonzero(np.diff(numbers[order])) + 1
    for where in np.split(order, begins):
        if where.size:
            yield int(numbers[where[0]]), where


class Mixture:
    """The mixture of one stage: units of 1/65536 by name, sorted by name, and the stage's `stream_key`."""

    def __init__(self, units: Mapping[str, int], key: int) -> None:
        self.names = tuple(units)
        self.units = np.array(list(units.values()), dtype=np.uint64)
        self._key = key
        self._shares = tuple(units.values())
        # First slot of each source's share.
        self._first = (np.cumsum(self.units) - self.units).astype(np.intp)

    def place(self, rows: StageRows) -> tuple[SourceNumbers, SourceRows]:
        """Return the source of each row, and which of that source's rows in the stage it is.

        Args:
            rows: `(k,) uint64`, at least one, numbered from the stage's start.

        Returns:
            `(k,)` indices into `names` (one number for all if there is one source) and `(k,) uint64`.
        """
        if len(self.names) == 1:
            return 0, rows
        blocks, offsets = np.divmod(rows, _BLOCK_ROWS)
        sources = np.empty(rows.shape, dtype=np.intp)
        ranks = np.empty(rows.shape, dtype=np.uint64)
        # Most requests lie in one block and need no grouping.
        parts: Iterable[tuple[int, Any]] = grouped(blocks)
        if (blocks == blocks[0]).all():
            parts = [(int(blocks[0]), slice(None))]
        for block, here in parts:
            table = self._table(block)
            sources[here], ranks[here] = table[:, offsets[here]]
        return sources, blocks * self.units[sources] + ranks

    def _table(self, block: int) -> NDArray[np.uint16]:
        """Return where the rows of a block come from: the only table that the arithmetic needs.

        `(2, 65536)`: index of each row's source in the mixture; how many earlier rows have the same source.
        """
        return _row_table(self._key, block, self._shares)

    def find(self, source: int, numbers: SourceRows) -> StageRows:
        """Return the rows of the stage that are the `numbers`-th of a source: the inverse of `place`."""
        if len(self.names) == 1:
            return numbers
        blocks, ranks = np.divmod(numbers, self.units[source])
        start = int(self._first[source])
        stop = start + self._shares[source]
        rows = np.empty(numbers.shape, dtype=np.uint64)
        for block, here in grouped(blocks):
            slots = _block_slots(self._key, block)
            rows[here] = np.flatnonzero((slots >= start) & (slots < stop))[ranks[here]]
        return blocks * _BLOCK_ROWS + rows

    def block_of(self, source: int, numbers: SourceRows) -> UInt64Array:
        """Return the block that `find` computes for each number: 0 for all if there is one source."""
        return numbers // self.units[source] if len(self.names) > 1 else np.zeros_like(numbers)

    def count(self, num_rows: UInt64Array) -> UInt64Array:
        """Return how many of the stage's first rows each source has: `(names,) uint64`.

        Of several numbers of rows it is the sum, modulo 2^64. Each number within a block takes 0.3 ms.
        """
        counts: UInt64Array
        if len(self.names) == 1:
            counts = num_rows.sum(keepdims=True)
            return counts
        blocks, offsets = np.divmod(num_rows, _BLOCK_ROWS)
        counts = blocks.sum() * self.units
        for k in np.flatnonzero(offsets).tolist():
            counts += self._count_in_block(int(blocks[k]), int(offsets[k]))
        return counts

    def _count_in_block(self, block: int, offset: int) -> UInt64Array:
        """Return how many rows before an offset of a block each source has."""
        taken = np.zeros(BLOCK_ROWS, dtype=np.uint8)
        taken[_slots(self._key, block, offset)] = 1
        counts: UInt64Array = np.add.reduceat(taken, self._first, dtype=np.uint64)
        return counts


@lru_cache(maxsize=CACHED_TABLES)
def _row_table(key: int, block: int, units: tuple[int, ...]) -> NDArray[np.uint16]:
    of_slot = np.repeat(np.arange(len(units), dtype=np.uint16), units)
    sources = of_slot[_block_slots(key, block)]
    rows = np.argsort(sources, kind="stable")  # by source, then by rank
    first = np.cumsum((0, *units[:-1]))
    ranks = np.empty(BLOCK_ROWS, dtype=np.uint16)
    ranks[rows] = np.arange(BLOCK_ROWS) - np.repeat(first, units)
    return np.stack((sources, ranks))


@lru_cache(maxsize=CACHED_TABLES)
def _block_slots(key: int, block: int) -> NDArray[np.uint16]:
    # Cached, because the small sources of a plan have many epochs in one block.
    return _slots(key, block, BLOCK_ROWS)


def _slots(key: int, block: int, stop: int) -> NDArray[np.uint16]:
    """Return the slots of the first rows of a block: `(stop,) uint16`."""
    return permute_block(round_keys(key, np.array([block], dtype=np.uint64)), stop)
