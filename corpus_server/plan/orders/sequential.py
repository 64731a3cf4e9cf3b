"""Order `sequential`: windows in file order, epoch after epoch."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.plan.orders.order import (
    Arrangement,
    Keys,
    Order,
    neighbouring_shards,
)
from corpus_server.plan.rows import Source, UInt64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential(Order):
    """Windows in file order."""

    name = "sequential"
    sentence = "windows in file order, epoch after epoch"
    working_set = neighbouring_shards

    def over(self, num_rows: UInt64Array, keys: Keys) -> Arrangement:
        """See `Order.over`."""
        return _InFileOrder()


class _InFileOrder(Arrangement):
    def windows(self, source: Source, epochs: UInt64Array, offsets: UInt64Array) -> UInt64Array:
        return offsets

    def offsets(self, source: Source, epochs: UInt64Array, windows: UInt64Array) -> UInt64Array:
        return windows
