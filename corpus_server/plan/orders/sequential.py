"""Order `sequential`: windows in file order, epoch after epoch."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.plan.orders.order import Arrangement, Order, neighbouring_shards
from corpus_server.plan.rows import Epochs, Offsets, RowNumbers, Source


class _InFileOrder(Arrangement):
    def rows_at(self, source: Source, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        return offsets

    def offsets_of(self, source: Source, epochs: Epochs, rows: RowNumbers) -> Offsets:
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential(Order):
    """Windows in file order."""

    name = "sequential"
    sentence = "windows in file order, epoch after epoch"
    arrangement = _InFileOrder
    working_set = neighbouring_shards
