"""Plans over corpora with documents, with any kind of rows: small ones that shrink.

Of rows that join whole documents, pieces are cut here once more, one document at a time, from the contract
and not from the code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, Pieces
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.streams import Sequences
from tests.plans import EPOCH_ORDERS, PLAIN_ORDERS, SEEDS, bounded
from tests.second import SecondPlan, ends_digest, lengths_digest, numbers_by, values_digest

Piece = tuple[int, int, int]
"""Shard over the plan's shard list, start token in it, tokens."""


@dataclass(frozen=True)
class Lengths:
    """The documents of a corpus that lies nowhere."""

    shards: tuple[tuple[int, ...], ...]
    digest: str = "lengths"
    content: str = "content"
    eot_first: bool = False
    opened: tuple[int, ...] = ()

    @property
    def digest_with_ends(self) -> str:
        return self.digest

    @property
    def open_documents(self) -> NDArray[np.int64]:
        return np.array(self.opened, dtype=np.int64)

    @property
    def shard_ends(self) -> list[int]:
        return list(accumulate(map(sum, self.shards)))

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.shards))

    @property
    def num_documents(self) -> int:
        return sum(map(len, self.shards))

    @property
    def documents(self) -> list[tuple[int, int]]:
        starts, lengths = self.sequences()
        return list(zip(starts.tolist(), lengths.tolist(), strict=True))

    def sequences(self) -> Sequences:
        lengths = np.array([each for shard in self.shards for each in shard], dtype=np.int64)
        return Sequences(lengths.cumsum() - lengths, lengths)


class Shelf:
    """The documents of a corpus that lies nowhere, as a plan asks a corpus for them: one after another."""

    def __init__(self, lengths: Lengths) -> None:
        self.starts = (0, *lengths.shard_ends)
        self._starts, self._lengths = lengths.sequences()

    @property
    def base(self) -> Shelf:
        return self

    def documents(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        first = (self._starts + self._lengths).searchsorted(starts, side="right")
        stop = self._starts.searchsorted(stops)
        held = [np.arange(*bounds) for bounds in zip(first.tolist(), stop.tolist(), strict=True)]
        held = [each[self._lengths[each] > 0] for each in held]
        return np.concatenate([np.empty(0, np.int64), *held]), np.array(list(map(len, held)), np.int64)

    def pieces(self, starts: Int64Array, stops: Int64Array) -> Pieces:
        raise NotImplementedError

    def ranges_of(self, starts: Int64Array, stops: Int64Array) -> Int64Array:
        raise NotImplementedError

    def extents(self, starts: Int64Array, stops: Int64Array) -> Int64Array:
        raise NotImplementedError


def holds(first: int, tokens: int, start: int, stop: int) -> bool:
    """Whether a document has a token in a range."""
    return max(first, start) < min(first + tokens, stop)


class Held(NamedTuple):
    """A row of the global batch of a plan step, and the epoch of its source."""

    plan_step: int
    row: int
    source: str
    epoch: int
    pieces: list[Piece]


@dataclass(frozen=True)
class PackedCase:
    """A plan document, and the lengths of the documents of each shard of its corpora."""

    document: dict[str, Any]
    lengths: dict[str, tuple[tuple[int, ...], ...]]
    eot_first: bool = False
    opened: dict[str, tuple[int, ...]] = field(default_factory=dict)
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def with_fields(self, **fields: Any) -> PackedCase:
        return replace(self, document={**self.document, **fields})

    def without(self, field: str) -> PackedCase:
        """The same without a field of the stages."""
        stages = [{k: v for k, v in stage.items() if k != field} for stage in self.document["stages"]]
        return self.with_fields(stages=stages)

    def balanced(self) -> PackedCase:
        """The same with balanced ranks."""
        documents = {**self.document["rows"]["documents"], "balance_ranks": True}
        return self.with_fields(rows={"documents": documents})

    @cached_property
    def sampler(self) -> Sampler:
        plan = Plan.from_json(self.document)
        lengths = {
            name: Lengths(self.lengths[name], eot_first=self.eot_first, opened=self.opened.get(name, ()))
            for name in plan.sources
        }
        jobs = [
            job
            for seq_len in (plan.row_lengths if plan.tabled else ())
            for job in plan.tabled.jobs(lengths, seq_len=seq_len, seed=plan.seed, decides={})
        ]
        tokens = {name: [sum(shard) for shard in self.lengths[name]] for name in plan.sources}
        corpora = [Shelf(lengths[name]) for name in plan.sources]
        values = [np.array(numbers_by(each), np.uint64) for each in self.values.values()]
        return Sampler(plan, tokens, tables=[job.build() for job in jobs], corpora=corpora, values=values)

    @property
    def digests(self) -> dict[str, str]:
        """Of the documents of the plan's sources."""
        return {source.name: lengths_digest(source) for source in self.second.of.values()}

    @property
    def ends_digests(self) -> dict[str, str]:
        """Of where the documents of the plan's sources end."""
        return {source.name: ends_digest(source) for source in self.second.of.values()}

    @property
    def values_digests(self) -> dict[str, str]:
        """Of what the documents of the plan's sources have in the column of its family."""
        return {source.name: values_digest(source) for source in self.second.of.values()}

    def by(self, column: str, *, distinct: int) -> PackedCase:
        """The same by a column with so many values and some that are missing."""
        lengths = {name: sum(map(len, self.lengths[name])) for name in self.sources}
        values = {
            name: tuple(None if n % 5 == 4 else f"{n * n % distinct}.org" for n in range(count))
            for name, count in lengths.items()
        }
        return replace(self.with_fields(family={**self.document["family"], "by": column}), values=values)

    @property
    def sources(self) -> tuple[str, ...]:
        """Of the plan, in its order."""
        stages = self.document["stages"]
        return tuple(dict.fromkeys(name for stage in stages for name in sorted(stage["mixture"])))

    @cached_property
    def second(self) -> SecondPlan:
        """The yardstick."""
        tokens = {name: [sum(shard) for shard in shards] for name, shards in self.lengths.items()}
        documents = {name: Lengths(shards).documents for name, shards in self.lengths.items()}
        return SecondPlan(
            self.document,
            tokens,
            documents,
            opened=self.opened,
            eot_first=self.eot_first,
            values=self.values,
        )

    def accepted(self) -> PackedCase:
        """The case, if the plan is none that its rows or their exclusions refuse."""
        try:
            _ = self.sampler
        except InvalidPlan:
            reject()
        return self

    @cached_property
    def shards(self) -> list[tuple[str, int]]:
        """The plan's shard list: the corpus of each, and its first token there."""
        found = []
        for name in self.sampler.plan.sources:
            sizes = [sum(shard) for shard in self.lengths[name]]
            found += [(name, first) for first in accumulate(sizes, initial=0)][:-1]
        return found

    def cut(self) -> Iterator[tuple[Piece, str, int]]:
        """Every piece of every document, with its corpus and a number of its block."""
        seq_len, shard, block = self.document["seq_len"], 0, 0
        size = self.document["rows"]["documents"]["block_documents"]
        for name in self.sampler.plan.sources:
            left = 0  # empty documents at the end of a shard count with the next one
            for lengths in self.lengths[name]:
                start, every = 0, [0] * left + list(lengths)
                for number, length in enumerate(every):
                    block += number % size == 0
                    for first in range(0, length - 1, seq_len):
                        yield (shard, start + first, min(seq_len, length - 1 - first) + 1), name, block
                    start += length
                left = len(list(itertools.takewhile(lambda length: not length, reversed(every))))
                shard += 1

    def rows_of(self, step: int) -> list[list[Piece]]:
        """The rows of a training step, by the code under test."""
        size = self.sampler.check_part(step)
        return rows_of(self.sampler.pieces(step, range(size)))

    def run(self, num_steps: int) -> list[Held]:
        """The rows of the first plan steps; the inputs of a source are counted into rows and epochs."""
        given = dict.fromkeys(self.sampler.plan.sources, 0)
        num_rows = {
            laid.seq_len: dict(zip(given, laid.rows.num_rows.tolist(), strict=True))
            for laid in self.sampler.laid
        }
        found = []
        for step in range(num_steps):
            seq_len = self.sampler.seq_len(step)
            for row, pieces in enumerate(self.rows_of(step)):
                source = next(self.shards[shard][0] for shard, _, _ in pieces if shard >= 0)
                epoch = given[source] // seq_len // num_rows[seq_len][source]
                found.append(Held(step, row, source, epoch, pieces))
                given[source] += seq_len
        return found

    def tokens(self, piece: Piece) -> range:
        """The corpus-wide tokens of a piece; none of end-of-text that fills."""
        if piece[0] < 0:
            return range(0)
        first = self.shards[piece[0]][1] + piece[1]
        return range(first, first + piece[2])


def rows_of(pieces: Pieces) -> list[list[Piece]]:
    """The pieces of each row."""
    parts = np.split(pieces.places, pieces.borders[1:-1])
    return [[(shard, start, count) for shard, start, count in part.tolist()] for part in parts]


@st.composite
def fields_of(draw: st.DrawFn, kind: type[Rows]) -> dict[str, Any]:
    """Fields of rows, by their schemas: small numbers, and what is true or false not left at false."""
    found: dict[str, Any] = {}
    for name, schema in kind.properties().items():
        if schema.get("type") == "integer":
            numbers = [schema["minimum"] + above for above in (0, 2, 7, 98)]
            found[name] = draw(st.sampled_from([n for n in numbers if n <= schema["maximum"]]))
        elif schema.get("type") == "boolean" and draw(st.booleans()):
            found[name] = True
    return found


@st.composite
def plans_of(draw: st.DrawFn, kind: type[Rows], *, epochs: bool = False, skip: bool = True) -> PackedCase:
    """Plans with rows of a kind, of those that `packed_plans` makes and the server accepts."""
    fields = draw(fields_of(kind))
    orders = EPOCH_ORDERS if kind.is_permuted or epochs else PLAIN_ORDERS
    for _ in range(5):  # a kind may refuse half of the lengths
        case = draw(packed_plans(orders=orders, skip=skip, lengths=kind.own_lengths))
        case = case.with_fields(rows={kind.name: fields} if fields else kind.name)
        with suppress(InvalidPlan):
            _ = case.sampler
            break
    return case.accepted()


@st.composite
def ranges_of(draw: st.DrawFn, num_tokens: int) -> list[int]:
    """A half-open range of up to twenty tokens, which may touch several documents."""
    start = draw(st.integers(0, num_tokens - 1))
    return [start, draw(st.integers(start + 1, min(num_tokens, start + 20)))]


@st.composite
def packed_plans(
    draw: st.DrawFn,
    *,
    exclude: bool = True,
    skip: bool = True,
    orders: Sequence[str] = EPOCH_ORDERS,
    lengths: bool = False,
) -> PackedCase:
    """Rows of documents: one or two sources of some dozen documents in up to three shards, short stages.

    Args:
        lengths: whether stages may have a shorter `seq_len`.
    """
    has_lengths = lengths and draw(st.booleans())
    names = ["b", "a"][: draw(st.integers(1, 2))]
    longest = draw(st.sampled_from([4, 8, 8, 19]))  # most rows join several
    shard = st.lists(st.integers(0, longest), min_size=4, max_size=16).map(tuple)
    its = {name: tuple(draw(st.lists(shard, min_size=1, max_size=3))) for name in names}
    for name in names:
        its[name] = (*its[name], (draw(st.integers(2, 9)),))
    seq_len = draw(st.sampled_from([12, 16] if has_lengths else [1, 3, 7, 12, 16]))
    order: Any = draw(st.sampled_from([*orders, "bounded"]))
    if order == "bounded":
        order = bounded(draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    stages: list[dict[str, Any]] = []
    from_step = 0
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) if stages else names
        mixture = {name: draw(st.sampled_from([1, 2, 0.5])) for name in used}
        stage = {"from_step": from_step, "global_batch_size": draw(st.integers(1, 6)), "mixture": mixture}
        if has_lengths:
            parts = draw(st.sampled_from([1, 2, 4]))
            stage["seq_len"] = seq_len // parts
            stage["global_batch_size"] = parts * draw(st.integers(1, 3))
        if exclude and draw(st.booleans()):
            ranges = {
                name: draw(st.lists(ranges_of(Lengths(its[name]).num_tokens), min_size=1, max_size=3))
                for name in names
            }
            stage["exclude"] = ranges
        stages.append(stage)
        from_step += draw(st.integers(1, 8))
    document: dict[str, Any] = {
        "seq_len": seq_len,
        "seed": draw(st.sampled_from(SEEDS[:2])),
        "order": order,
        "rows": {"documents": {"block_documents": draw(st.sampled_from([1, 3, 8, 99]))}},
        "stages": stages,
    }
    if skip and draw(st.booleans()):
        document["skip_steps"] = [[2, 4], [7, 8]]
    return PackedCase(document, its)
