"""Substitutes for windows that a stage excludes, from a keyed permutation, so that they can be undone.

Of a source with n windows, x of them excluded, the excluded window of rank r (among the excluded ones)
gets the window of rank p(r) among the n - x others, where p is a permutation of those n - x, another one
for each epoch. Should more be excluded than left, ranks go round: lap r // (n - x) uses a p of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.permutation import Grid, invert, permute, round_keys
from corpus_server.plan.ranges import Ranges

UInt64Array = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Exclusion:
    """The windows that one stage excludes, over the sources of a plan.

    Windows are numbered through all sources, source s having [first[s], first[s + 1]).

    Args:
        names: of the sources.
        windows: excluded windows.
        first: `(sources + 1,) uint64`.
        keys: `(sources,) uint64`, from `stream_key("exclude", seed, name)`.

    Raises:
        InvalidPlan: nothing of a source that the stage uses is left.
    """

    def __init__(
        self,
        names: Sequence[str],
        windows: Ranges,
        first: UInt64Array,
        keys: UInt64Array,
        used: Sequence[int],
    ) -> None:
        self.windows = windows
        self._first = first[:-1]
        self._keys = keys
        inside_before = windows.num_inside_below(first)
        self._inside_before = inside_before[:-1]
        self._outside_before = first[:-1] - inside_before[:-1]
        self.num_excluded = np.diff(inside_before)
        self.num_left = np.diff(first) - self.num_excluded
        # Of a source that the stage does not use nothing may be left: no grid, but nothing is asked of it.
        self._grids = Grid.over([max(1, left) for left in self.num_left.tolist()])
        for source in used:
            if self.num_left[source] == 0:
                raise InvalidPlan(
                    f"exclude leaves none of the {int(self.num_excluded[source])} windows of "
                    f"{names[source]!r}; leave the source out of the mixture instead",
                    parameter=f"stages[].exclude.{names[source]}",
                )

    def substitute(
        self, sources: NDArray[np.intp] | int, windows: UInt64Array, epochs: UInt64Array
    ) -> UInt64Array:
        """Return the windows that rows hold once excluded ones are replaced.

        Args:
            sources: `(k,)` source of each row, or one for all.
            windows: `(k,) uint64`; left as it is.
            epochs: `(k,) uint64`.
        """
        rows = np.flatnonzero(self.windows.contains(windows))
        if not rows.size:
            return windows
        its = sources if isinstance(sources, int) else sources[rows]
        ranks = self.windows.num_inside_below(windows[rows]) - self._inside_before[its]
        left = self.num_left[its]
        grid = int(left) if isinstance(its, int) else self._grids.take(its)
        laps = ranks // left
        lap_epochs: UInt64Array = epochs[rows] + laps.astype(np.uint64) * _GOLDEN
        keys = round_keys(np.broadcast_to(self._keys[its], ranks.shape), lap_epochs)
        replaced = windows.copy()
        replaced[rows] = self.windows.nth_outside(
            permute(ranks % left, grid, keys) + self._outside_before[its]
        )
        return replaced

    def num_laps(self, source: int) -> int:
        """Return for how many excluded windows of a source one that is left may stand in, per epoch."""
        left = int(self.num_left[source])
        # Nothing may be left of a source that the stage does not use.
        return -(-int(self.num_excluded[source]) // left) if left else 0

    def stood_in_for(self, source: int, windows: UInt64Array, epoch: int) -> tuple[UInt64Array, UInt64Array]:
        """Return the excluded windows for which some others stand in, in an epoch.

        Args:
            source: index of the source of all windows.
            windows: `(k,) uint64`, none of them excluded.
            epoch: which pass over the source.

        Returns:
            `(m,) uint64` the excluded windows, and `(m,)` the window that stands in for each.
        """
        left, excluded = int(self.num_left[source]), int(self.num_excluded[source])
        numbers = self.windows.num_outside_below(windows) - self._outside_before[source]
        laps = np.arange(self.num_laps(source), dtype=np.uint64).repeat(windows.size)
        by = np.tile(windows, self.num_laps(source))
        keys = round_keys(int(self._keys[source]), laps * _GOLDEN + np.uint64(epoch))
        ranks = invert(np.tile(numbers, self.num_laps(source)), left, keys) + laps * np.uint64(left)
        real = ranks < np.uint64(excluded)
        return self.windows.nth_inside(ranks[real] + self._inside_before[source]), by[real]


def excluded_windows(
    excludes: Mapping[str, Ranges], token_ranges: Mapping[str, tuple[int, int]]
) -> NDArray[np.uint64]:
    """Return excluded token ranges numbered over all shards of the plan: `(k, 2) uint64`.

    Args:
        excludes: corpus-wide ranges by corpus name.
        token_ranges: where each corpus lies over all shards: (first token, number of tokens).

    Raises:
        InvalidPlan: a range reaches beyond its corpus.
    """
    found = [np.empty((0, 2), dtype=np.uint64)]
    for name, ranges in excludes.items():
        first, num_tokens = token_ranges[name]
        if int(ranges.stops[-1]) > num_tokens:
            raise InvalidPlan(
                f"stages[].exclude.{name} reaches to token {int(ranges.stops[-1])}, "
                f"the corpus has {num_tokens}",
                parameter=f"stages[].exclude.{name}",
                received=int(ranges.stops[-1]),
                accepted=f"at most {num_tokens}",
            )
        found.append(np.stack((ranges.starts, ranges.stops), axis=1) + np.uint64(first))
    return np.concatenate(found)
