"""Order `shuffle`: each window of a source once in an epoch, by a keyed permutation, anew each epoch."""

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
    all_shards,
)
from corpus_server.plan.permutation import EpochTable, Grid, invert, permute, round_keys


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle(Order):
    """All windows of a source permuted."""

    name = "shuffle"
    sentence = "every window once in an epoch, in an order of its own"

    def over(self, num_rows: UInt64Array, keys: Keys) -> Arrangement:
        """See `Order.over`."""
        return _Permuted(num_rows, keys(self.name))

    def working_set(self, shards: ShardSizes) -> WorkingSet:
        """Return all shards."""
        return all_shards(shards)


class _Permuted(Arrangement):
    def __init__(self, num_rows: UInt64Array, keys: UInt64Array) -> None:
        self._num_rows, self._keys = num_rows, keys
        self._grids = Grid.over(num_rows.tolist())
        self._round_keys = EpochTable(len(keys), lambda sources, epochs: round_keys(keys[sources], epochs))

    def windows(self, source: Source, epochs: UInt64Array, offsets: UInt64Array) -> UInt64Array:
        size = int(self._num_rows[source]) if isinstance(source, int) else self._grids.take(source)
        return permute(offsets, size, self._round_keys.of(source, epochs))

    def offsets(self, source: Source, epochs: UInt64Array, windows: UInt64Array) -> UInt64Array:
        size = int(self._num_rows[source]) if isinstance(source, int) else self._grids.take(source)
        return invert(windows, size, round_keys(self._keys[source], epochs))
