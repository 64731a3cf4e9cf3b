"""What the rows of a plan consist of: windows, or pieces of several documents laid end to end.

Rows are numbered through all sources of a plan, so that a number says its source. An order permutes the rows
of each source by numbers alone, see `orders/order.py`; here are the tokens that a number stands for.

A row holds *units*, which are numbered through all sources, too, and are what a look-up finds and an
exclusion replaces: its window, or several pieces of documents. Units that may stand in for one another are a
*pool*.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array, Pieces, UInt64Array
from corpus_server.plan.exclusion import Beside, Exclusion, Replacing
from corpus_server.plan.named import Named
from corpus_server.plan.numbers import Epochs, RowNumbers, SourceNumbers, UnitNumbers
from corpus_server.plan.permutation import stream_key
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.stage import Stage
from corpus_server.plan.tables import Table
from corpus_server.plan.windows import Windows
from corpus_server.work import Budget


class Sources(NamedTuple):
    """The sources of a plan, over which its rows and its order are laid.

    Attributes:
        names: in the plan's order.
        windows: of them; they also say how tokens and shards are numbered.
        seed: of the plan.
        tables: of the rows or the order, if they follow from some.
    """

    names: tuple[str, ...]
    windows: Windows
    seed: int
    tables: Sequence[Table] = ()

    def keys(self, purpose: str) -> UInt64Array:
        """Return the key of each source for a series of decisions, `(sources,) uint64`."""
        return np.array([stream_key(purpose, self.seed, name) for name in self.names], dtype=np.uint64)


NO_SOURCES: Final = Sources((), Windows((), seq_len=1, stride=1), 0)


class Rows(Named):
    """Rows as a plan's document has them; `over` the sources of a plan they are numbered and can be computed.

    Attributes:
        unit: the word for what they hold.
        is_window: whether each row is one piece, so that a shard and a start token say where it lies.
        holds_several: whether a row may hold several units.
        fills_ends: whether rows may end with end-of-text tokens that belong to no document.
        own_lengths: whether a stage of another `seq_len` has rows that are made for it, from tables of its
            own; else it reads the plan's rows in parts.
        is_permuted: whether the order must permute rows by their numbers alone.
        balance_ranks: whether rows are dealt to ranks by their costs.
        most_places: of a circle of a member of a family, that are looked at for a substitute; None: all.
        sources: over which they are laid; in a document none.
    """

    plan_field = "rows"
    stated = (*Named.stated, "unit")
    unit: ClassVar[str]
    is_window: ClassVar[bool] = False
    holds_several: ClassVar[bool] = False
    fills_ends: ClassVar[bool] = False
    own_lengths: ClassVar[bool] = False
    is_permuted: ClassVar[bool] = False
    balance_ranks = False
    most_places: ClassVar[int | None] = None
    sources: Sources = field(default=NO_SOURCES, compare=False, repr=False)

    def check(self, *, seq_len: int, stride: int | None, stages: Sequence[Stage]) -> None:
        """Refuse stages that the rows cannot carry.

        Raises:
            InvalidPlan: naming the field.
        """

    def over(self, sources: Sources) -> Self:
        """Return the rows of these sources.

        Raises:
            InvalidPlan: a source has no row.
        """
        return replace(self, sources=sources)

    @property
    @abstractmethod
    def num_rows(self) -> UInt64Array:
        """`(sources,) uint64`, over which the order permutes."""

    @property
    def epoch_rows(self) -> UInt64Array:
        """`(sources,) uint64`, rows of one pass over a source, by which epochs are counted."""
        return self.num_rows

    @property
    @abstractmethod
    def first_row(self) -> UInt64Array:
        """`(sources + 1,) uint64`, number of each source's first row; then of all rows."""

    @property
    def shard_row(self) -> UInt64Array | None:
        """`(shards + 1,) uint64`, number of each shard's first row; then of all rows.

        None if a row may join pieces of several shards.
        """
        return None

    @property
    def first_unit(self) -> UInt64Array:
        """`(sources + 1,) uint64`, number of each source's first unit; then of all units."""
        return self.first_row

    @property
    def pools(self) -> UInt64Array:
        """`(pools + 1,) uint64`, each pool's first unit, none empty; then the number of all units."""
        return self.first_unit

    @abstractmethod
    def pieces(
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None = None
    ) -> Pieces:
        """Return what rows consist of, in these epochs of their sources: `(k,)` each.

        Each row has a piece at least. A piece of no token is a place that an exclusion left empty.
        """

    def shards(
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which shards rows read: `(m,)` each, a shard, and the row among those given; pairs once."""
        if self.shard_row is None:
            pieces = self.pieces(sources, rows, epochs, exclusion)
            pairs = np.unique(np.stack((pieces.each_once(), pieces.places[:, 0]), axis=1), axis=0)
            return pairs[:, 1], pairs[:, 0]
        if exclusion is not None and not self.holds_several:
            rows = exclusion.substitute(rows, epochs)  # a piece that stands in for one lies in its shard
        return self.shard_row.searchsorted(rows, side="right") - 1, np.arange(rows.size)

    def costs(self, sources: SourceNumbers, rows: RowNumbers) -> Int64Array:
        """Return what attention within the documents of rows costs, `(k,)`: tokens squared, of each piece.

        The same in every epoch, whatever is excluded. Needed of rows that can balance ranks.
        """
        raise NotImplementedError(f"rows {self.name} have no costs")

    def holders(self, source: int, units: UnitNumbers, epochs: Epochs) -> RowNumbers:
        """Return the rows that hold units of a source in epochs, `(k,)` or `(1,)`."""
        return units

    @abstractmethod
    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """Return the units that hold a token of a source in some ranges: `(k, 2)`, half-open ranges."""

    def tokens_of(self, source: int, units: UnitNumbers) -> tuple[Int64Array, Int64Array]:
        """Return the tokens of a source, start and stop, that units of it hold: `(k,)` each.

        Needed of rows whose plans may be members of a family.
        """
        raise NotImplementedError(f"rows {self.name} have no tokens of units")

    def exclusion(self, units: Ranges, beside: Beside | None) -> Exclusion:
        """Return what replaces excluded units.

        Args:
            beside: of an order that is random only within groups, see `Order.beside`.
        """
        return Exclusion(units, self.pools, self.first_unit, self._exclusion_keys, beside)

    @cached_property
    def _exclusion_keys(self) -> UInt64Array:
        return self.sources.keys("exclude")

    @abstractmethod
    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where rows [start, stop), at least one, lie: shard number, tokens [start, stop) in it."""

    @abstractmethod
    def reach(self, source: int, num_rows: int) -> int:
        """Return about how many tokens of a source so many neighbouring rows lie among, at most."""

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays that neither tables nor windows hold."""
        return 0

    @property
    def row_pieces(self) -> int:
        """Pieces of a row, in the mean."""
        return 1

    def describe(self, source: int) -> dict[str, Any]:
        """Return what a plan's description says of a source besides."""
        return {}
