"""Rows `windows`: each is `seq_len + 1` consecutive tokens of a shard."""

from __future__ import annotations

from functools import cached_property
from typing import Self

import numpy as np

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, Pieces, UInt64Array
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
        return self.sources.windows.pieces(rows if exclusion is None else exclusion.substitute(rows, epochs))

    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """See `Rows.within`."""
        windows = self.sources.windows
        first = windows.first_token[source]
        return windows.holding(first + ranges.starts, first + ranges.stops)

    def tokens_of(self, source: int, units: UnitNumbers) -> tuple[Int64Array, Int64Array]:
        """See `Rows.tokens_of`."""
        windows = self.sources.windows
        shards, starts = windows.locate(units).T
        begins = (windows.shard_token[shards] - windows.first_token[source]).astype(np.int64) + starts
        return begins, begins + windows.seq_len + 1

    def reach(self, source: int, num_rows: int) -> int:
        """See `Rows.reach`."""
        windows = self.sources.windows
        return num_rows * windows.stride + windows.seq_len

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`."""
        return self.sources.windows.extents(start, stop)
