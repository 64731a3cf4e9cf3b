"""Plans whose rows join whole documents: small ones that shrink, and what their documents fall into.

Pieces are cut here once more, one document at a time, from the contract and not from the code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from corpus_server.plan import Plan, Sampler
from corpus_server.plan.streams import Sequences
from tests.plans import EPOCH_ORDERS, SEEDS, bounded

Piece = tuple[int, int, int]
"""Shard over the plan's shard list, start token in it, tokens."""


@dataclass(frozen=True)
class Lengths:
    """The documents of a corpus that lies nowhere."""

    shards: tuple[tuple[int, ...], ...]
    digest: str = "lengths"
    content: str = "content"

    @property
    def shard_ends(self) -> list[int]:
        return list(accumulate(map(sum, self.shards)))

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.shards))

    @property
    def num_documents(self) -> int:
        return sum(map(len, self.shards))

    def sequences(self) -> Sequences:
        lengths = np.array([each for shard in self.shards for each in shard], dtype=np.int64)
        return Sequences(lengths.cumsum() - lengths, lengths)


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

    def with_fields(self, **fields: Any) -> PackedCase:
        return PackedCase({**self.document, **fields}, self.lengths)

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
        lengths = {name: Lengths(self.lengths[name]) for name in plan.sources}
        assert plan.tabled is not None
        jobs = plan.tabled.jobs(lengths, seq_len=plan.seq_len, seed=plan.seed, decides={})
        tokens = {name: [sum(shard) for shard in self.lengths[name]] for name in plan.sources}
        return Sampler(plan, tokens, tables=[job.build() for job in jobs])

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
        pieces, borders = self.sampler.pieces(step, range(size))
        parts = np.split(pieces, borders[1:-1])
        return [[(shard, start, count) for shard, start, count in part.tolist()] for part in parts]

    def run(self, num_steps: int) -> list[Held]:
        """The rows of the first plan steps; the rows of a source are counted into epochs."""
        given = dict.fromkeys(self.sampler.plan.sources, 0)
        num_rows = dict(zip(given, self.sampler.num_windows.tolist(), strict=True))
        found = []
        for step in range(num_steps):
            for row, pieces in enumerate(self.rows_of(step)):
                source = self.shards[pieces[0][0]][0]
                found.append(Held(step, row, source, given[source] // num_rows[source], pieces))
                given[source] += 1
        return found

    def tokens(self, piece: Piece) -> range:
        """The corpus-wide tokens of a piece."""
        first = self.shards[piece[0]][1] + piece[1]
        return range(first, first + piece[2])


@st.composite
def ranges_of(draw: st.DrawFn, num_tokens: int) -> list[int]:
    """A half-open range of up to twenty tokens, which may touch several documents."""
    start = draw(st.integers(0, num_tokens - 1))
    return [start, draw(st.integers(start + 1, min(num_tokens, start + 20)))]


@st.composite
def packed_plans(draw: st.DrawFn, *, exclude: bool = True, skip: bool = True) -> PackedCase:
    """One or two sources of some dozen documents in up to three shards, stages of a few steps."""
    names = ["b", "a"][: draw(st.integers(1, 2))]
    longest = draw(st.sampled_from([4, 8, 8, 19]))  # most rows join several
    shard = st.lists(st.integers(0, longest), min_size=4, max_size=16).map(tuple)
    lengths = {name: tuple(draw(st.lists(shard, min_size=1, max_size=3))) for name in names}
    for name in names:
        lengths[name] = (*lengths[name], (draw(st.integers(2, 9)),))
    order: Any = draw(st.sampled_from([*EPOCH_ORDERS, "bounded"]))
    if order == "bounded":
        order = bounded(draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    stages: list[dict[str, Any]] = []
    from_step = 0
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) if stages else names
        mixture = {name: draw(st.sampled_from([1, 2, 0.5])) for name in used}
        stage = {"from_step": from_step, "global_batch_size": draw(st.integers(1, 6)), "mixture": mixture}
        if exclude and draw(st.booleans()):
            ranges = {
                name: draw(st.lists(ranges_of(Lengths(lengths[name]).num_tokens), min_size=1, max_size=3))
                for name in names
            }
            stage["exclude"] = ranges
        stages.append(stage)
        from_step += draw(st.integers(1, 8))
    document: dict[str, Any] = {
        "seq_len": draw(st.sampled_from([1, 3, 7, 12, 16])),
        "seed": draw(st.sampled_from(SEEDS[:2])),
        "order": order,
        "rows": {"documents": {"block_documents": draw(st.sampled_from([1, 3, 8, 99]))}},
        "stages": stages,
    }
    if skip and draw(st.booleans()):
        document["skip_steps"] = [[2, 4], [7, 8]]
    return PackedCase(document, lengths)
