"""Which source each row of a stage takes, and how many rows each source has given.

Rows of a stage are numbered from its start and fall into blocks of 65,536. Within a block every
source has exactly its units, and a keyed permutation of the block decides which rows: row o of a
block goes to the source whose share holds the slot that o is sent to.

    units          code 2, web 6            (of 8 here, of 65,536 in truth)
    slot           0  1 | 2  3  4  5  6  7
    row o          0  1  2  3  4  5  6  7
    permuted       5  0  7  2  1  4  6  3
    source         w  c  w  w  c  w  w  w
    rank           0  0  1  2  1  3  4  5   the o-th row is the rank-th of its source in the block
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.permutation import invert, permute, round_keys

BLOCK_ROWS = 65_536
_BLOCK_ROWS = np.array(BLOCK_ROWS, dtype=np.uint64)
_CACHED_BLOCKS = 64
"""256 kB each."""


def quantise(weights: Mapping[str, float]) -> dict[str, int]:
    """Return units of 1/65536 by name, sorted by name, by largest remainder; they sum to 65,536.

    Raises:
        InvalidPlan: a weight is too small for a single unit.
    """
    names = sorted(weights)
    # Exactly: a sum of floats depends on their order and need not be finite.
    total = sum(map(Fraction, weights.values()))
    exact = [Fraction(weights[name]) / total * BLOCK_ROWS for name in names]
    units = [int(share) for share in exact]
    by_remainder = sorted(range(len(names)), key=lambda k: (units[k] - exact[k], names[k]))
    for k in by_remainder[: BLOCK_ROWS - sum(units)]:
        units[k] += 1
    for name, share in zip(names, units, strict=True):
        if share == 0:
            fraction = float(Fraction(weights[name]) / total)
            raise InvalidPlan(
                f"stages[].mixture.{name}: weight {weights[name]} is {fraction:.2g} of the sum, "
                f"less than the smallest share of 1/{BLOCK_ROWS}; raise it or leave the source out",
                parameter=f"stages[].mixture.{name}",
                received=weights[name],
                accepted=f"at least 1/{BLOCK_ROWS} of the sum of weights",
            )
    return dict(zip(names, units, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The table of one block, the only table there is.

    Args:
        sources: `(65536,) uint16`, index of each row's source in the mixture.
        ranks: `(65536,) uint16`, which of its source's rows in the block each row is.
    """

    sources: NDArray[np.uint16]
    ranks: NDArray[np.uint16]


class Mixture:
    """The mixture of one stage.

    Args:
        units: units of 1/65536 by name, in sorted order of the names.
        key: of the stage, from `stream_key`.
    """

    def __init__(self, units: Mapping[str, int], key: int) -> None:
        self.names = tuple(units)
        self.units = np.array(list(units.values()), dtype=np.uint64)
        self._key = key
        self._shares = tuple(units.values())
        self._first = np.cumsum(self.units) - self.units

    def block(self, number: int) -> Block:
        """Return a block's table, computed once and kept for a while."""
        return _block(self._key, number, self._shares)

    def place(self, rows: NDArray[np.uint64]) -> tuple[NDArray[np.intp] | int, NDArray[np.uint64]]:
        """Return for rows of the stage their source and which of its rows in the stage they are.

        Args:
            rows: `(k,) uint64`, ascending, at least one, numbered from the stage's start.

        Returns:
            `(k,)` indices into `names` (one number for all where there is one source) and `(k,) uint64`.
        """
        if len(self.names) == 1:
            return 0, rows
        numbers, offsets = np.divmod(rows, _BLOCK_ROWS)
        if numbers[0] == numbers[-1]:
            block = self.block(int(numbers[0]))
            sources = block.sources[offsets].astype(np.intp)
            return sources, numbers[0] * self.units[sources] + block.ranks[offsets]
        sources = np.empty(rows.shape, dtype=np.intp)
        ranks = np.empty(rows.shape, dtype=np.uint64)
        for number in np.unique(numbers).tolist():
            here = numbers == np.uint64(number)
            block = self.block(number)
            sources[here] = block.sources[offsets[here]]
            ranks[here] = block.ranks[offsets[here]]
        return sources, numbers * self.units[sources] + ranks

    def find(self, source: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the rows of the stage that are the `numbers`-th of a source: the inverse of `place`."""
        if len(self.names) == 1:
            return numbers
        blocks, ranks = np.divmod(numbers, self.units[source])
        first, units = int(self._first[source]), int(self.units[source])
        rows = np.empty(numbers.shape, dtype=np.uint64)
        for number in np.unique(blocks).tolist():
            here = blocks == np.uint64(number)
            rows[here] = _rows(self._key, number, first, units)[ranks[here]]
        return blocks * np.uint64(BLOCK_ROWS) + rows

    def count(self, num_rows: int) -> list[int]:
        """Return how many of the stage's first rows each source has."""
        if len(self.names) == 1:
            return [num_rows]
        blocks, rest = divmod(num_rows, BLOCK_ROWS)
        counts = [blocks * share for share in self._shares]
        if rest:
            partial = np.bincount(self.block(blocks).sources[:rest], minlength=len(counts))
            counts = [count + more for count, more in zip(counts, partial.tolist(), strict=True)]
        return counts


@lru_cache(maxsize=_CACHED_BLOCKS)
def _block(key: int, number: int, units: tuple[int, ...]) -> Block:
    keys = round_keys(key, np.array([number], dtype=np.uint64))
    slots = permute(np.arange(BLOCK_ROWS, dtype=np.uint64), BLOCK_ROWS, keys)
    of_slot = np.repeat(np.arange(len(units), dtype=np.uint16), units)
    sources = of_slot[slots]
    rows = np.argsort(sources, kind="stable")  # by (source, rank)
    first = np.cumsum((0, *units[:-1]))
    ranks = np.empty(BLOCK_ROWS, dtype=np.uint16)
    ranks[rows] = np.arange(BLOCK_ROWS) - np.repeat(first, units)
    return Block(sources, ranks)


@lru_cache(maxsize=_CACHED_BLOCKS)
def _rows(key: int, number: int, first: int, units: int) -> NDArray[np.uint16]:
    """Return the rows of a block that go to one source, in row order: its slots sent back, `(units,)`."""
    keys = round_keys(key, np.array([number], dtype=np.uint64))
    slots = np.arange(first, first + units, dtype=np.uint64)
    return np.sort(invert(slots, BLOCK_ROWS, keys)).astype(np.uint16)
