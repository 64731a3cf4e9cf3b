"""Order `sequential`: windows in file order, epoch after epoch."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.plan.orders.order import (
    Arrangement,
    Keys,
    Order,
    ShardSizes,
    Source,
    UInt64Array,
    WorkingSet,
    neighbouring_shards,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequential(Order):
    """Windows in file order."""

    name = "sequential"
    sentence = "windows in file order, epoch after epoch"

    def over(self, num_rows: UInt64Array, keys: Keys) -> Arrangement:
        """See `Order.over`."""
        return _InFileOrder()

    def working_set(self, shards: ShardSizes) -> WorkingSet:
        """Return the shard that is read, and the next."""
        return neighbouring_shards(shards)


class _InFileOrder(Arrangement):
    def windows(self, source: Source, epochs: UInt64Array, offsets: UInt64Array) -> UInt64Array:
        return offsets

    def offsets(self, source: Source, epochs: UInt64Array, windows: UInt64Array) -> UInt64Array:
        return windows
