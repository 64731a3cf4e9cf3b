"""Order `random`: each row drawn anew, with replacement; every start in a shard is equally likely."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.errors import InvalidParameter
from corpus_server.plan.orders.order import Arrangement, Keys, Order, all_shards
from corpus_server.plan.permutation import uniform
from corpus_server.plan.rows import Epochs, Offsets, RowNumbers, Source, UInt64Array


class _Drawn(Arrangement):
    def __init__(self, order: Order, num_rows: UInt64Array, keys: Keys) -> None:
        self._num_rows, self._keys = num_rows, keys(order.name)

    def rows_at(self, source: Source, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        return uniform(self._keys[source], offsets, self._num_rows[source])

    def offsets_of(self, source: Source, epochs: Epochs, rows: RowNumbers) -> Offsets:
        raise InvalidParameter(
            "a plan with order 'random' cannot be looked up: it draws each row anew, with replacement, "
            "so a token has no place in it",
            parameter="plan",
            accepted="plans of an order with epochs",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Random(Order):
    """Windows drawn with replacement, as nanoGPT's `get_batch` draws them."""

    name = "random"
    sentence = "each window drawn anew from all starts, with replacement"
    arrangement = _Drawn
    has_epochs = False
    stride = 1  # every start is a window's
    working_set = all_shards
