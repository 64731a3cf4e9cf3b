"""Rows `windows`: each is `seq_len + 1` consecutive tokens of a shard."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, Pieces, UInt64Array, at_or_below
from corpus_server.plan.exclusion import Replacing
from corpus_server.plan.numbers import Epochs, RowNumbers, SourceNumbers, UnitNumbers
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows.rows import Rows, Sources
from corpus_server.work import Budget


class WindowRows(Rows):
    """Windows as rows; each is one unit."""

    name = "windows"
    sentence = "each row is seq_len + 1 consecutive tokens, wherever documents begin and end"
    unit = "window"
    is_window = True

    def over(self, sources: Sources) -> Self:
        """See `Rows.over`."""
        windows = sources.windows
        for number in np.flatnonzero(windows.num_windows == 0).tolist():
            longest = windows.longest[number]
            raise InvalidPlan(
                f"corpus {sources.names[number]!r}: no shard holds a window of seq_len + 1 = "
                f"{windows.seq_len + 1} tokens; the longest has {longest}",
                parameter="seq_len",
                received=windows.seq_len,
                accepted=f"at most {longest - 1}" if longest > 1 else "no value fits this corpus",
            )
        return super().over(sources)

    @cached_property
    def num_rows(self) -> UInt64Array:
        """See `Rows.num_rows`."""
        return self.sources.windows.num_windows

    @cached_property
    def first_row(self) -> UInt64Array:
        """See `Rows.first_row`."""
        return self.sources.windows.first_window

    @cached_property
    def shard_row(self) -> UInt64Array:
        """See `Rows.shard_row`."""
        return self.sources.windows.shard_window

    def pieces(
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None = None
    ) -> Pieces:
        """See `Rows.pieces`: one each."""
        windows = self.sources.windows
        if exclusion is not None:
            rows = exclusion.substitute(rows, epochs)
        shards = at_or_below(windows.shard_window, rows)
        places = np.empty((len(rows), 3), dtype=np.int64)
        places[:, 0] = shards
        places[:, 1] = (rows - windows.shard_window[shards]) * np.uint64(windows.stride)
        places[:, 2] = windows.seq_len + 1
        return Pieces(places, np.arange(len(rows) + 1))

    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """See `Rows.within`: the windows that touch a range are neighbours, and so one range of numbers."""
        first = self.sources.windows.first_token[source]
        lowest = self._window_at(first + ranges.starts, reach=self.sources.windows.seq_len + 1)
        above = self._window_at(first + ranges.stops - np.uint64(1), reach=0)
        return np.stack((np.minimum(lowest, above), above), axis=1)

    def _window_at(self, tokens: UInt64Array, *, reach: int) -> UnitNumbers:
        """Return for each token the first window that starts after `token - reach`."""
        windows = self.sources.windows
        shards, within = windows.in_shards(tokens)
        count = (windows.shard_window[shards + 1] - windows.shard_window[shards]).astype(np.int64)
        number = np.clip((within - reach) // windows.stride + 1, 0, count)
        return windows.shard_window[shards] + number.astype(np.uint64)

    def tokens_of(self, source: int, units: UnitNumbers) -> tuple[Int64Array, Int64Array]:
        """See `Rows.tokens_of`."""
        windows = self.sources.windows
        shards, starts, _ = self.pieces(source, units, np.zeros_like(units)).places.T
        begins = (windows.shard_token[shards] - windows.first_token[source]).astype(np.int64) + starts
        return begins, begins + windows.seq_len + 1

    def reach(self, source: int, num_rows: int) -> int:
        """See `Rows.reach`."""
        windows = self.sources.windows
        return num_rows * windows.stride + windows.seq_len

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`."""
        windows, found = self.sources.windows, []
        first, last = (windows.shard_window.searchsorted((start, stop - 1), side="right") - 1).tolist()
        bounds = [start, *windows.shard_window[first + 1 : last + 1].tolist(), stop]
        for shard, (low, high) in enumerate(pairwise(bounds), first):
            if low < high:  # a shard may have no window
                origin = int(windows.shard_window[shard])
                begin, last_begin = ((at - origin) * windows.stride for at in (low, high - 1))
                found.append((shard, begin, last_begin + windows.seq_len + 1))
        return found
