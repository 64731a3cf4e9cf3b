"""What an order is: how the rows of a source are permuted, anew in each epoch.

The document names an order, with its fields: an `Order`. Laid over the sources of a plan it becomes an
`Arrangement`, which computes. An order without fields is spelled by its name, `"sequential"`; one with
fields as an object, `{"shuffle": {"block_windows": 8, "group_blocks": 4}}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.blend import Blend
from corpus_server.plan.declared import Declared, Schema, json_object
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows import Rows, Source, UInt64Array, Windows
from corpus_server.plan.stage import Stage
from corpus_server.plan.streams import Sequences

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
    def windows(self, source: Source, epochs: UInt64Array, offsets: UInt64Array) -> UInt64Array:
        """Return which rows come at offsets of epochs; without epochs, offsets count through the run."""

    @abstractmethod
    def offsets(self, source: Source, epochs: UInt64Array, windows: UInt64Array) -> UInt64Array:
        """Return at which offsets of epochs, `(k,)` or `(1,)`, rows come: the inverse of `windows`."""

    @property
    def groups(self) -> Grouped | None:
        """Its groups, if it is random only within groups of neighbouring blocks."""
        return None


class Grouped(Protocol):
    """The groups of a bounded shuffle, see `orders/bounded.py`."""

    def number_at(self, source: int, position: int) -> int:
        """Return the number, through all epochs, of the group that a position of a source lies in."""

    def ranges(self, source: int, number: int) -> UInt64Array:
        """Return the windows of a group: `(blocks, 2) uint64`, start and stop of each block."""

    def largest(self, source: int) -> int:
        """Return the most windows that a group of a source has."""

    def beside(self, source: Source, epochs: UInt64Array, windows: UInt64Array, distance: int) -> UInt64Array:
        """Return windows of the same groups, another one for each distance."""


class ShardSizes(NamedTuple):
    """The shards of one source in an object store.

    Attributes:
        num_bytes: `(k,) int64`.
        ends: `(k,) int64`, windows of the source up to the end of each shard.
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


Table = tuple[NDArray[Any], ...]
"""Arrays that decide the rows of a plan."""


class Tabled(Protocol):
    """An order whose rows follow from a table, which `read/tables.py` builds and keeps.

    Sequences are those of the plan's sources, in its order.
    """

    table: ClassVar[type[Any]]  # the NamedTuple of its arrays

    @property
    def documents(self) -> Mapping[str, str]:
        """Digests of the documents' lengths by corpus; empty before the table was built."""

    def with_documents(self, digests: Mapping[str, str]) -> Order:
        """Return the order with digests."""

    def check_size(self, sequences: Mapping[str, Sequences], *, seq_len: int) -> int:
        """Return how many elements are shuffled to build the table; refuse one that would be too large."""

    def build(self, sequences: Mapping[str, Sequences], *, seq_len: int, seed: int) -> Table:
        """Build the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Declared, ABC):
    """An order as a plan's document has it."""

    name: ClassVar[str]
    sentence: ClassVar[str]  # for help: what it does
    arrangement: ClassVar[type[Arrangement]]
    has_epochs: ClassVar[bool] = True  # whether each row comes once in an epoch, so that it can be looked up
    is_inline: ClassVar[bool] = True  # whether query parameters can spell it

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
        return self, seq_len if stride is None else stride

    def lay_out(
        self, windows: Windows, sources: tuple[str, ...], keys: Keys, table: Any
    ) -> tuple[Rows, Arrangement, Blend | None]:
        """Return the rows of a plan, its windows or those of a table, and their order.

        Also what chooses the sources of the whole run, where mixtures do not.
        """
        return windows, self.arrangement(self, windows.num_rows, keys), None

    @property
    def tabled(self) -> Tabled | None:
        """Return itself, if its rows follow from a table."""
        return None

    def __str__(self) -> str:
        return self.name

    def to_json(self, spell: Callable[[Ranges], Any] = Ranges.to_json) -> Any:
        """Return the order's canonical JSON."""
        return {self.name: Declared.to_json(self, spell)} if fields(self) else self.name

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema of the order."""
        inner = super(Order, cls).schema()
        return json_object([cls.name], {cls.name: inner}) if fields(cls) else {"const": cls.name}


def check_order(kind: type[Order]) -> type[Order]:
    """Refuse to register an order that lacks something.

    Raises:
        TypeError: naming what it lacks.
    """
    missing = sorted(kind.__abstractmethods__)
    missing += [each for each in ("name", "sentence", "arrangement") if not hasattr(kind, each)]
    arrangement = getattr(kind, "arrangement", Arrangement)
    missing += [f"arrangement.{each}" for each in sorted(arrangement.__abstractmethods__)]
    if missing:
        raise TypeError(f"order {kind.__name__} lacks {', '.join(missing)}")
    return kind
