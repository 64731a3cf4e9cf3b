"""What a layout is: of what a plan's rows consist, as its document says it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corpus_server.plan.named import Named
from corpus_server.plan.orders.order import Order
from corpus_server.plan.rows import Rows, UInt64Array, Windows
from corpus_server.plan.stage import Stage
from corpus_server.plan.tabled import Tabled

Keys = Callable[[str], UInt64Array]
"""From a purpose, like the layout's name, to the key of each source, `(sources,) uint64`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Named, ABC):
    """A layout as a plan's document has it. Laid over the sources of a plan it becomes `Rows`."""

    fills_ends = False  # whether rows may end with end-of-text tokens that belong to no document
    balance_ranks = False  # whether rows are dealt to ranks by their costs

    def check(self, *, seq_len: int, stride: int | None, order: Order, stages: Sequence[Stage]) -> None:
        """Refuse what the layout cannot carry.

        Raises:
            InvalidPlan: naming the field.
        """

    @abstractmethod
    def lay_out(self, windows: Windows, sources: tuple[str, ...], keys: Keys, tables: Sequence[Any]) -> Rows:
        """Return the rows of a plan.

        Args:
            windows: of the plan's sources; they also say how tokens and shards are numbered.
            tables: those of `tabled`.

        Raises:
            InvalidPlan: a source has no row.
        """

    @property
    def tabled(self) -> Tabled | None:
        """Return itself, if its rows follow from tables."""
        return None
