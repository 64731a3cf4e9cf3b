"""Tables, from which rows or an order follow that numbers alone do not decide.

The lengths of documents or shards decide a table. `read/tables.py` builds it and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from corpus_server.pieces import Int64Array
from corpus_server.plan.streams import Sequences

Table = tuple[NDArray[Any], ...]
"""Arrays that decide rows: a NamedTuple, whose fields name them."""


class Job(NamedTuple):
    """A table to be built, or to be found where it was kept.

    Attributes:
        table: the NamedTuple of its arrays.
        decides: what the table follows from, as JSON.
        size: returns how many documents and rows building goes through, by which its time is bounded; raises
            InvalidPlan if there can be no such table. May read all lengths.
        build: builds it; can be pickled. Takes as `run` a `map` whose calls may run in other processes.
        ends: corpora whose documents must end with end-of-text, by which rows are masked.
        is_apart: whether a large one is built in another process, because it takes memory, or lets no other
            thread run.
    """

    table: type[Any]
    decides: Mapping[str, Any]
    size: Callable[[], int]
    build: Callable[..., Table]
    ends: tuple[str, ...] = ()
    is_apart: bool = True


class Lengths(Protocol):
    """The documents of an open corpus.

    Attributes:
        content: digest of the corpus's tokens and its end-of-text id.
        eot_first: whether documents begin with end-of-text, and not end with it.
        shard_ends: tokens of the corpus up to the end of each shard.
        num_tokens: of the corpus.
    """

    content: str
    eot_first: bool
    shard_ends: Sequence[int]
    num_tokens: int

    @property
    def digest(self) -> str:
        """Return the digest of their places and lengths."""

    @property
    def digest_with_ends(self) -> str:
        """Return the digest of these, and of where they have end-of-text, unless all end with it."""

    @property
    def open_documents(self) -> Int64Array:
        """Return the numbers of those that lack end-of-text, at the edges of shards; ascending."""

    @property
    def num_documents(self) -> int:
        """Return how many there are."""

    def sequences(self) -> Sequences:
        """Read first token, corpus-wide, and length of each document."""
