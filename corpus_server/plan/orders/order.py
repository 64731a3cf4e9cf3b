"""What an order is: how the rows of a source are permuted, anew in each epoch.

The document names an order, with its fields: an `Order`. Laid over the sources of a plan it becomes an
`Arrangement`, which computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.plan.blend import Blend
from corpus_server.plan.exclusion import Grouped
from corpus_server.plan.named import Named
from corpus_server.plan.rows import Epochs, Offsets, RowNumbers, Rows, Source, UInt64Array, Windows
from corpus_server.plan.stage import Stage
from corpus_server.plan.tabled import Tabled

Keys = Callable[[str], UInt64Array]
"""From a purpose, like the order's name, to the key of each source, `(sources,) uint64`."""


class Arrangement(ABC):
    """An order over the sources of a plan. Rows are numbered from 0 in each source.

    Methods take the source of each row, `(k,)` or one for all, and `(k,) uint64` arrays.
    """

    def __init__(self, order: Order, num_rows: UInt64Array, keys: Keys) -> None:
        """Lay an order over sources of so many rows, `(sources,) uint64`."""
        self._num_rows = num_rows

    @abstractmethod
    def rows_at(self, source: Source, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """Return which rows come at offsets of epochs; without epochs, offsets count through the run."""

    @abstractmethod
    def offsets_of(self, source: Source, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """Return at which offsets of epochs, `(k,)` or `(1,)`, rows come: the inverse of `rows_at`."""

    @property
    def groups(self) -> Grouped | None:
        """Its groups, if it is random only within groups of neighbouring blocks."""
        return None


class ShardSizes(NamedTuple):
    """The shards of one source in an object store.

    Attributes:
        num_bytes: `(k,) int64`.
        ends: `(k,) int64`, rows of the source up to the end of each shard.
    """

    num_bytes: NDArray[np.int64]
    ends: NDArray[np.int64]


class WorkingSet(NamedTuple):
    """The shards that a cache must hold at a time.

    Attributes:
        reads: what needs so much, as the start of a sentence that the number of bytes ends; "" where every
            step reads windows of shards anywhere.
        remedy: besides the one that fits all orders.
    """

    num_bytes: int
    reads: str = ""
    remedy: str = ""


def all_shards(order: Order, shards: ShardSizes) -> WorkingSet:
    """Return what a cache must hold for an order that reads windows anywhere; an order's `working_set`."""
    return WorkingSet(int(shards.num_bytes.sum()))


def neighbouring_shards(order: Order, shards: ShardSizes) -> WorkingSet:
    """Return it for an order that reads one shard after its neighbour, either way."""
    sizes = shards.num_bytes
    most = int((sizes[:-1] + sizes[1:]).max(initial=0)) or int(sizes.sum())
    return WorkingSet(most, "two shards after one another have up to", "smaller shards")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Named, ABC):
    """An order as a plan's document has it."""

    arrangement: ClassVar[type[Arrangement]]
    has_epochs: ClassVar[bool] = True  # whether each row comes once in an epoch, so that it can be looked up
    stride: ClassVar[int | None] = None  # the only one that it can have; None: any, by default seq_len

    @abstractmethod
    def working_set(self, shards: ShardSizes) -> WorkingSet:
        """Return what a cache must hold of one source."""

    def settle(
        self, *, seq_len: int, stride: int | None, seed: int, stages: Sequence[Stage]
    ) -> tuple[Order, int]:
        """Return the order with what it takes from the rest of its plan, and the plan's stride.

        Raises:
            InvalidPlan: the order cannot carry something that the plan says.
        """
        if self.stride is not None and stride not in (None, self.stride):
            accepted = f"{self.stride} or left out with order {self.name!r}"
            raise InvalidPlan.expected("stride", accepted, stride)
        return self, self.stride or stride or seq_len

    def lay_out(
        self, rows: Rows, windows: Windows, sources: tuple[str, ...], keys: Keys, tables: Sequence[Any]
    ) -> tuple[Rows, Arrangement, Blend | None]:
        """Return the rows of a plan, those given or those of a table of the order, and their order.

        Also what chooses the sources of the whole run, where mixtures do not.
        """
        return rows, self.arrangement(self, rows.num_rows, keys), None

    @property
    def tabled(self) -> Tabled | None:
        """Return itself, if it makes the rows, from a table."""
        return None

    @classmethod
    def missing(cls) -> list[str]:
        """Return what it lacks to be registered."""
        arrangement = getattr(cls, "arrangement", None)
        lacks = ["arrangement"] if arrangement is None else sorted(arrangement.__abstractmethods__)
        of = "" if arrangement is None else "arrangement."
        return super(Order, cls).missing() + [of + each for each in lacks]
