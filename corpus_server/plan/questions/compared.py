"""Rows of two plans, made comparable."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Pieces
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

    def rows(self, step: int, places: range, count: int) -> Pieces:
        """Return what rows at the same places of some steps are made of, with common shard numbers."""
        found, borders = self.sampler.pieces(step, places, count=count)
        return Pieces(np.column_stack((self._common[found[:, 0]], found[:, 1:])), borders)


def unlike_rows(a: Pieces, b: Pieces) -> NDArray[np.bool_]:
    """Return which of some rows are made of other pieces than those that they stand against."""
    counts = np.diff(a[1])
    differs: NDArray[np.bool_] = counts != np.diff(b[1])
    same = np.flatnonzero(~differs)
    differing = (a.rows(same).places != b.rows(same).places).any(axis=1)
    differs[np.repeat(same, counts[same])[differing]] = True
    return differs
