"""Rows of two plans, made comparable."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.rows import Pieces, UInt64Array
from corpus_server.plan.sampler import Sampler


class Compared:
    """A plan's rows, with shard numbers that mean the same in both plans."""

    def __init__(self, sampler: Sampler, other: Sampler) -> None:
        self.sampler = sampler
        # The corpora of views say what lies where, else their names do.
        viewed = any(each.origins is not None for each in (sampler, other))
        named = {each: each.contents if viewed else each.plan.sources for each in (sampler, other)}
        sizes = {
            name: int(size)
            for each in (sampler, other)
            for name, size in zip(named[each], np.diff(each.windows.first_shard), strict=True)
        }
        # For each shard of the plan's list, its number in a list that does not depend on the plan.
        names = sorted(sizes)
        first = dict(zip(names, accumulate((sizes[name] for name in names), initial=0), strict=False))
        self._common = np.concatenate([first[name] + np.arange(sizes[name]) for name in named[sampler]])

    def rows(self, step: int, count: int) -> tuple[Pieces, int]:
        """Return what the rows of steps are made of, with common shard numbers, and the rows of a step."""
        num_rows = self.sampler.check_part(step, count=count)
        return self.common(self.sampler.pieces(step, range(num_rows), count=count)), num_rows

    def common(self, pieces: Pieces) -> Pieces:
        """Return rows with common shard numbers."""
        found, borders = pieces
        return np.column_stack((self._common[found[:, 0]], found[:, 1:])), borders

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
    differs[near] = unlike(*(side.common(side.sampler.resolved(some(its, near))) for side, its in found))
    return differs


def unlike(a: Pieces, b: Pieces) -> NDArray[np.bool_]:
    """Return which of some rows are made of other pieces than those that they stand against."""
    counts = np.diff(a[1])
    differs: NDArray[np.bool_] = counts != np.diff(b[1])
    same = np.flatnonzero(~differs)
    differing = (some(a, same)[0] != some(b, same)[0]).any(axis=1)
    differs[np.repeat(same, counts[same])[differing]] = True
    return differs


def some(rows: Pieces, which: NDArray[np.intp]) -> Pieces:
    """Return rows by their numbers."""
    pieces, borders = rows
    counts = np.diff(borders)[which]
    ends = counts.cumsum()
    within = np.repeat(borders[which] - ends + counts, counts) + np.arange(counts.sum())
    return pieces[within], np.concatenate(([0], ends))
