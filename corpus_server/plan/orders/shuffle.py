"""Order `shuffle`: each window of a source once in an epoch, by a keyed permutation, anew each epoch."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.plan.orders.order import Arrangement, Keys, Order, all_shards
from corpus_server.plan.permutation import Grid, invert, permute, round_keys
from corpus_server.plan.rows import Epochs, Offsets, RowNumbers, Source, UInt64Array


class _Permuted(Arrangement):
    def __init__(self, order: Order, num_rows: UInt64Array, keys: Keys) -> None:
        self._num_rows, self._keys = num_rows, keys(order.name)
        self._grids = Grid.over(num_rows.tolist())

    def rows_at(self, source: Source, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        return permute(offsets, self._domain(source), round_keys(self._keys[source], epochs))

    def offsets_of(self, source: Source, epochs: Epochs, rows: RowNumbers) -> Offsets:
        return invert(rows, self._domain(source), round_keys(self._keys[source], epochs))

    def _domain(self, source: Source) -> Grid | int:
        return int(self._num_rows[source]) if isinstance(source, int) else self._grids.take(source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shuffle(Order):
    """All windows of a source permuted."""

    name = "shuffle"
    sentence = "every window once in an epoch, in an order of its own"
    arrangement = _Permuted
    working_set = all_shards
