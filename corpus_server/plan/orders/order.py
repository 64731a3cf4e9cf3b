"""What an order is: how the rows of a source are permuted, anew in each epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, UInt64Array
from corpus_server.plan.blend import Blend
from corpus_server.plan.named import Named
from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.rows.rows import NO_SOURCES, Rows, Sources
from corpus_server.plan.stage import Stage


class ExtentSizes(NamedTuple):
    """The extents of one source in an object store, `(k,) int64` each.

    Attributes:
        num_bytes: of each.
        begins: the first row that reads of it.
        ends: the row after the last one that begins in it or before; larger than `begins` of the next one
            where a row lies in both.
    """

    num_bytes: Int64Array
    begins: Int64Array
    ends: Int64Array


class WorkingSet(NamedTuple):
    """The extents that a cache must hold at a time.

    Attributes:
        reads: what needs so much, as the start of a sentence that the number of bytes ends; "" where every
            step reads windows anywhere.
        remedy: besides the one that fits all orders.
    """

    num_bytes: int
    reads: str = ""
    remedy: str = ""


def all_extents(order: Order, extents: ExtentSizes) -> WorkingSet:
    """Return what a cache must hold for an order that reads windows anywhere; an order's `working_set`."""
    return WorkingSet(int(extents.num_bytes.sum()))


def neighbouring_extents(order: Order, extents: ExtentSizes) -> WorkingSet:
    """Return it for an order that reads one extent after its neighbour, either way."""
    sizes = extents.num_bytes
    most = int((sizes[:-1] + sizes[1:]).max(initial=0)) or int(sizes.sum())
    return WorkingSet(
        most, "two neighbouring extents of each source are needed at a time, up to", "fewer corpora"
    )


class Order(Named):
    """An order as a plan's document has it; `over` the rows of sources it computes.

    Then `rows_at` and `offsets_of` take the source of each row, `(k,)` or one for all, and `(k,) uint64`
    arrays. Rows are numbered from 0 in each source.

    Attributes:
        has_epochs: whether each row comes once in an epoch, so that it can be looked up.
        has_groups: whether it is random only within groups of neighbouring blocks, and has the methods below
            of such an order.
        repeats: whether every epoch has the same order, so that a run beyond one sees again what it saw.
        stride: the only one that it can have; None: any, by default seq_len.
        sources: over which it is laid; in a document none.
        num_rows: `(sources,) uint64`, rows of each.
    """

    plan_field = "order"
    has_epochs: ClassVar[bool] = True
    has_groups: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    stride: ClassVar[int | None] = None
    sources: Sources = field(default=NO_SOURCES, compare=False, repr=False)
    num_rows: UInt64Array = field(
        default_factory=lambda: NO_SOURCES.windows.num_windows, compare=False, repr=False
    )

    @abstractmethod
    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """Return which rows come at offsets of epochs; without epochs, offsets count through the run."""

    @abstractmethod
    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """Return at which offsets of epochs, `(k,)` or `(1,)`, rows come: the inverse of `rows_at`."""

    @abstractmethod
    def working_set(self, extents: ExtentSizes) -> WorkingSet:
        """Return what a cache must hold of one source."""

    def settle(
        self, *, seq_len: int, stride: int | None, seed: int, stages: Sequence[Stage]
    ) -> tuple[Self, int]:
        """Return the order with what it takes from the rest of its plan, and the plan's stride.

        Raises:
            InvalidPlan: the order cannot carry something that the plan says.
        """
        if self.stride is not None and stride not in (None, self.stride):
            accepted = f"{self.stride} or left out with order {self.name!r}"
            raise InvalidPlan.expected("stride", accepted, stride)
        return self, self.stride or stride or seq_len

    @property
    def block_rows(self) -> int | None:
        """Consecutive rows of a source that it reads together, from row 0 on; None: it has no such blocks."""
        return None

    def of_parts(self, num_parts: int) -> Self:
        """Return the order of rows of which so many stand for one of the plan's `seq_len`."""
        return self

    def over(self, rows: Rows) -> tuple[Rows, Self]:
        """Return the rows that it permutes, those given or its own, and the order over them."""
        return rows, replace(self, sources=rows.sources, num_rows=rows.num_rows)

    @property
    def chooser(self) -> Blend | None:
        """What chooses the sources of the whole run, where mixtures do not."""
        return None

    @property
    def num_used(self) -> UInt64Array | None:
        """Rows of each source in the whole run, `(sources,) uint64`, of an order that ends."""
        return None if self.chooser is None else self.chooser.num_used

    @cached_property
    def keys(self) -> UInt64Array:
        """`(sources,) uint64`, the key of each source."""
        return self.sources.keys(self.name)

    # -- of an order that has groups

    def beside(
        self,
        source: SourceNumbers,
        epochs: Epochs,
        rows: RowNumbers,
        distance: int | Int64Array,
        keys: UInt64Array | int | None = None,
    ) -> RowNumbers:
        """Return rows of the same groups, another one for each distance, which may be negative.

        Args:
            distance: of all, or `(k,)`.
            keys: that decide which ones, `(k,)` or one for all; None: those of the sources.
        """
        raise NotImplementedError(f"order {self.name} has no groups")

    def group_at(self, source: int, position: int) -> int:
        """Return the number, through all epochs, of the group that a position of a source lies in."""
        raise NotImplementedError(f"order {self.name} has no groups")

    def group_rows(self, source: int, number: int) -> UInt64Array:
        """Return the rows of a group: `(blocks, 2) uint64`, start and stop of each block."""
        raise NotImplementedError(f"order {self.name} has no groups")

    def largest_group(self, source: int) -> int:
        """Return the most rows that a group of a source has."""
        raise NotImplementedError(f"order {self.name} has no groups")


def refuse_changed_rows(order: Order, number: int, stage: Stage, rows: str) -> None:
    """Refuse what an order whose rows are another program's cannot carry.

    Args:
        number: of the stage.
        rows: what the error calls them.

    Raises:
        InvalidPlan: naming the field.
    """
    for name, value in (("seq_len", stage.seq_len), ("exclude", stage.exclude)):
        if value:
            raise InvalidPlan(
                f"stages[{number}].{name} cannot be carried by order {order.name}: {rows} "
                "have one length, and none has a substitute; leave it out, or use order shuffle",
                parameter=f"stages[{number}].{name}",
            )
