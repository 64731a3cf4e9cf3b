"""Rows of two plans, made comparable."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Pieces
from corpus_server.plan.rows import UInt64Array
from corpus_server.plan.sampler import Sampler


class Compared:
    """A plan's rows, with shard numbers that mean the same in both plans."""

    def __init__(self, sampler: Sampler, other: Sampler) -> None:
        self.sampler = sampler
        sizes = {
            content: int(size)
            for each in (sampler, other)
            for content, size in zip(each.contents, np.diff(each.windows.first_shard), strict=True)
        }
        # For each shard of the plan's list, its number in a list that does not depend on the plan.
        ordered = sorted(sizes)
        first = dict(zip(ordered, accumulate((sizes[each] for each in ordered), initial=0), strict=False))
        self._common = np.concatenate([first[each] + np.arange(sizes[each]) for each in sampler.contents])

    def rows(self, step: int, count: int) -> tuple[Pieces, int]:
        """Return what the rows of steps are made of, with common shard numbers, and the rows of a step."""
        num_rows = self.sampler.check_part(step, count=count)
        return self.common(self.sampler.pieces(step, range(num_rows), count=count)), num_rows

    def common(self, pieces: Pieces) -> Pieces:
        """Return rows with common shard numbers."""
        found, borders = pieces
        return Pieces(np.column_stack((self._common[found[:, 0]], found[:, 1:])), borders)

    def begins(self, rows: Pieces) -> NDArray[np.int64]:
        """Return about where the first token of each row lies, `(3, k)`: common shard, start, stop.

        The exact place in a view takes a hundred times as long.
        """
        pieces, borders = rows
        first = np.column_stack((pieces[borders[:-1], :2], np.ones(len(borders) - 1, dtype=np.int64)))
        origins = self.sampler.origins
        extents = np.stack((first[:, 1], first[:, 1] + 1)) if origins is None else origins.extents(first).T
        return np.stack((self._common[first[:, 0]], *extents))


def unlike_rows(
    sides: tuple[Compared, Compared], sources: tuple[int, int], rows: UInt64Array
) -> NDArray[np.bool_]:
    """Return which of the n-th rows, ascending, of a source of each plan differ."""
    pairs = zip(sides, sources, strict=True)
    found = [(side, side.sampler.pieces_of(source, rows)) for side, source in pairs]
    (shards, starts, stops), (its_shards, its_starts, its_stops) = (side.begins(its) for side, its in found)
    differs: NDArray[np.bool_] = (shards != its_shards) | (stops <= its_starts) | (its_stops <= starts)
    near = np.flatnonzero(~differs)
    differs[near] = unlike(*(side.common(side.sampler.resolved(its.rows(near))) for side, its in found))
    return differs


def unlike(a: Pieces, b: Pieces) -> NDArray[np.bool_]:
    """Return which of some rows are made of other pieces than those that they stand against."""
    counts = np.diff(a[1])
    differs: NDArray[np.bool_] = counts != np.diff(b[1])
    same = np.flatnonzero(~differs)
    differing = (a.rows(same).places != b.rows(same).places).any(axis=1)
    differs[np.repeat(same, counts[same])[differing]] = True
    return differs
