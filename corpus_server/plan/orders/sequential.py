"""Order `sequential`: windows in file order, epoch after epoch."""

from __future__ import annotations

from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.orders.order import Order, neighbouring_extents


class Sequential(Order):
    """Windows in file order."""

    name = "sequential"
    sentence = "windows in file order, epoch after epoch"
    repeats = True
    working_set = neighbouring_extents

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        return offsets

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """See `Order.offsets_of`."""
        return rows
