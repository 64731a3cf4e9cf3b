"""Order `random`: each row drawn anew, with replacement; every start in a shard is equally likely."""

from __future__ import annotations

from corpus_server.errors import InvalidParameter
from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.orders.order import Order, all_extents
from corpus_server.plan.permutation import uniform


class Random(Order):
    """Windows drawn with replacement, as nanoGPT's `get_batch` draws them."""

    name = "random"
    sentence = "each window drawn anew from all starts, with replacement"
    has_epochs = False
    stride = 1  # every start is a window's
    working_set = all_extents

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        return uniform(self.keys[source], offsets, self.num_rows[source])

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """Refuse: there is no inverse."""
        raise InvalidParameter(
            "a plan with order 'random' cannot be looked up: it draws each row anew, with replacement, "
            "so a token has no place in it",
            parameter="plan",
            accepted="plans of an order with epochs",
        )
