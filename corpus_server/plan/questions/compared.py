"""Rows of two plans, made comparable."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.rows import Pieces
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

    def rows(self, step: int, places: range, count: int) -> Pieces:
        """Return what rows at the same places of some steps are made of, with common shard numbers."""
        found, borders = self.sampler.pieces(step, places, count=count)
        return np.column_stack((self._common[found[:, 0]], found[:, 1:])), borders


def unlike_rows(a: Pieces, b: Pieces) -> NDArray[np.bool_]:
    """Return which of some rows are made of other pieces than those that they stand against."""
    counts = np.diff(a[1])
    differs: NDArray[np.bool_] = counts != np.diff(b[1])
    same = np.flatnonzero(~differs)
    differing = (_some(a, same) != _some(b, same)).any(axis=1)
    differs[np.repeat(same, counts[same])[differing]] = True
    return differs


def _some(rows: Pieces, which: NDArray[np.intp]) -> NDArray[np.int64]:
    """Return rows by their numbers."""
    pieces, borders = rows
    counts = np.diff(borders)[which]
    ends = counts.cumsum()
    within = np.repeat(borders[which] - ends + counts, counts) + np.arange(counts.sum())
    found: NDArray[np.int64] = pieces[within]
    return found
