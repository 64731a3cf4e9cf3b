"""Orders that follow from a table, with rows of their own, as those of other trainers do."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from corpus_server.plan.orders.order import Order, all_extents
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.tables import Table

T = TypeVar("T", bound=Table)


class TabledRows(Rows, Generic[T]):
    """Rows that an order brings along: no plan's document names them, and they lie in no groups."""

    @property
    def table(self) -> T:
        """The table of the plan."""
        return cast("T", self.sources.tables[0])

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`."""
        raise NotImplementedError(f"rows {self.name} lie in no groups")

    def reach(self, source: int, num_rows: int) -> int:
        """See `Rows.reach`."""
        raise NotImplementedError(f"rows {self.name} lie in no groups")


class TabledOrder(Order, Generic[T]):
    """An order of such rows, which reads windows of shards anywhere."""

    is_inline = False
    working_set = all_extents
    has_table = True

    @property
    def table(self) -> T:
        """The table of the plan."""
        return cast("T", self.sources.tables[0])
