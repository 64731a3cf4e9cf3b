"""Order `sequential`: windows in file order, epoch after epoch."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.plan.orders.order import Arrangement, Order, neighbouring_shards
from corpus_server.plan.rows import Source, UInt64Array


class _InFileOrder(Arrangement):
    def windows(self, source: Source, epochs: UInt64Array, offsets: UInt64Array) -> UInt64Array:
        return offsets

    def offsets(self, source: Source, epochs: UInt64Array, windows: UInt64Array) -> UInt64Array:
        return windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential(Order):
    """Windows in file order."""

    name = "sequential"
    sentence = "windows in file order, epoch after epoch"
    arrangement = _InFileOrder
    working_set = neighbouring_shards
