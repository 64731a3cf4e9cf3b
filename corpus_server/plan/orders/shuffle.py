"""Order `shuffle`: each window of a source once in an epoch, by a keyed permutation, anew each epoch."""

from __future__ import annotations

from functools import cached_property

from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.orders.order import Order, all_extents
from corpus_server.plan.permutation import Grid, invert, permute, round_keys


class Shuffle(Order):
    """All windows of a source permuted."""

    name = "shuffle"
    sentence = "every window once in an epoch, in an order of its own"
    working_set = all_extents

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        return permute(offsets, self._grids.take(source), round_keys(self.keys[source], epochs))

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """See `Order.offsets_of`."""
        return invert(rows, self._grids.take(source), round_keys(self.keys[source], epochs))

    @cached_property
    def _grids(self) -> Grid:
        return Grid.over(self.num_rows.tolist())
