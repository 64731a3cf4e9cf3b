"""Order `megatron`: the rows of Megatron-Core's datasets, element for element, for a fixed number of samples.

    step, row       row of the run, from the stages before and their batch sizes
    source          by the blend, see `blend.py`; with the position in the source
    sample          by the order of the source's samples, see `streams.py`
    pieces          the parts of documents that the sample joins: (shard, start token, tokens)

Other orders are computed. This one is a table, which follows from the documents' lengths and is built once
for a plan. A row has no one place in the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan.blend import Blend, BlendTable, choose
from corpus_server.plan.document import Plan
from corpus_server.plan.orders import PARTS, MegatronOrder
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.streams import Sequences, Streams, draw, extent, part_of
from corpus_server.plan.timeline import Timeline

MAX_BYTES: Final = 4 * 2**30
"""Bytes of a plan's arrays; while they are built they are in memory."""

_SURPLUS: Final = 0.005
"""Megatron draws so many more samples of each source of a blend than it expects to use."""


class Table(NamedTuple):
    """What decides the rows of a plan in Megatron's order."""

    streams: Streams
    blend: BlendTable

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, as `from_arrays` takes them."""
        streams = {name: getattr(self.streams, name) for name in _STREAMS}
        return {**streams, **self.blend._asdict()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Table:
        """Make the table of its arrays."""
        return cls(
            Streams(*(arrays[name] for name in _STREAMS)),
            BlendTable(*(arrays[name] for name in BlendTable._fields)),
        )


_STREAMS: Final = ("begins", "bounds", "samples", "places", "firsts")
ARRAYS: Final = (*_STREAMS, *BlendTable._fields)


def build(plan: Plan, sequences: Mapping[str, Sequences]) -> Table:
    """Build the table of a plan.

    Args:
        sequences: of each source, which `check_size` has allowed; their first tokens are counted over all
            sources of the plan.
    """
    order = _order(plan)
    parts, wanted = _parts(order, sequences), _wanted(order)
    streams = Streams.join(
        [draw(parts[name], wanted[name], plan.seq_len, plan.seed) for name in plan.sources]
    )
    shares = _normalised(order.weights or [1.0])
    if order.weights is not None:
        shares = _normalised(shares)  # twice, as Megatron does: a last bit may differ, and so a row
    # Megatron chooses the first of two equal sources by its own order, not by the plan's.
    own = np.array([plan.sources.index(name) for name in order.blend], dtype=np.int16)
    chosen = choose(shares, order.num_samples)
    counts = np.empty_like(chosen.counts)
    counts[:, own] = chosen.counts
    return Table(streams, BlendTable(own[chosen.sources], chosen.positions, counts))


def num_shuffled(plan: Plan, sequences: Mapping[str, Sequences]) -> int:
    """Return how many documents and samples are shuffled to build a table."""
    return sum(documents + samples for documents, samples in _sizes(plan, sequences))


def check_size(plan: Plan, sequences: Mapping[str, Sequences]) -> None:
    """Refuse a plan whose table would be too large, or one of whose sources has no documents.

    Raises:
        InvalidPlan: naming the source, or the bytes.
    """
    order = _order(plan)
    num_bytes = 6 * order.num_samples
    for documents, samples in _sizes(plan, sequences):
        num_bytes += 16 * documents + 8 * samples
    if num_bytes > MAX_BYTES:
        raise InvalidPlan(
            f"Megatron's tables of {order.num_samples} samples have {num_bytes} bytes, and a plan may have "
            f"at most {MAX_BYTES}; order shuffle needs none",
            parameter="order.megatron.num_samples",
            received=order.num_samples,
        )


def check_used(plan: Plan, table: Table) -> None:
    """Refuse a plan whose blend takes more samples of a source than there are, as Megatron does."""
    used = Blend(plan.sources, table.blend).num_used.astype(np.int64)
    drawn = np.diff(table.streams.first_sample)
    for source in np.flatnonzero(used > drawn).tolist():
        raise InvalidPlan(
            f"the blend takes {used[source]} samples of {plan.sources[source]!r}, and Megatron draws "
            f"{drawn[source]}; Megatron refuses this blend, too",
            parameter="order.megatron.weights",
        )


class MegatronSampler(Sampler):
    """A plan in Megatron's order, bound to its table.

    Attributes, besides those of `Sampler`:
        num_steps: training steps that the samples make; a last step that is not full is none.
        num_windows: samples of an epoch of each source.
    """

    def __init__(self, plan: Plan, shard_tokens: Mapping[str, Sequence[int]], table: Table) -> None:
        super().__init__(plan, shard_tokens)
        self._streams = table.streams
        blend = Blend(plan.sources, table.blend)
        self.timeline = Timeline(plan, blend)
        self.num_windows = np.maximum(1, table.streams.epoch_samples[:-1]).astype(np.uint64)
        self._used = blend.num_used
        self.num_steps = self._num_steps(table.blend.sources.size)

    def check_part(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> int:
        """Check that a rank slice of consecutive steps exists, see `Sampler.check_part`."""
        if step + count > self.num_steps:
            most = self.num_steps - count
            raise InvalidParameter(
                f"the plan's samples make {self.num_steps} steps, and step {step} with count {count} ends "
                f"beyond; give the loader num_steps={self.num_steps}, or the plan a larger num_samples",
                parameter="step",
                received=step,
                accepted=f"at most {most}" if most >= 0 else "none with this count",
            )
        return super().check_part(step, count=count, rank=rank, world_size=world_size)

    def locate_rows(self, step: int, rows: range, *, count: int = 1) -> NDArray[np.int64]:
        """Refuse: a row joins pieces of several documents.

        Raises:
            InvalidParameter: always.
        """
        raise InvalidParameter(
            "a row of order megatron joins pieces of several documents, so no shard and start token say "
            "where it lies; ask for the tokens (in the client: without local_root)",
            parameter="plan",
            accepted="plans of another order",
        )

    def pieces(
        self, step: int, rows: range, *, count: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pieces of consecutive rows, see `Sampler.pieces`."""
        plan_steps = self.timeline.plan_steps(np.arange(step, step + count, dtype=np.uint64))
        within = np.arange(rows.start, rows.stop, dtype=np.uint64)
        found = []
        for placed, steps in self.timeline.by_stage(plan_steps):
            first = (steps - np.uint64(placed.stage.from_step)) * np.uint64(placed.step_windows)
            sources, given = placed.mixture.place((first[:, None] + within).reshape(-1))
            found.append((sources, given + placed.positions[sources]))
        sources, positions = (np.concatenate(column) for column in zip(*found, strict=True))
        return self._cut(sources, self.windows_at(sources, positions)[0])

    def windows_at(
        self, source: NDArray[np.intp] | int, positions: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the samples at positions, numbered through the sources, and their epochs."""
        at = self._streams.first_sample[source] + positions.astype(np.int64)
        return self._streams.samples[at].astype(np.uint64), positions // self.num_windows[source]

    def positions_touching(
        self, source: int, start: int, stop: int, *, epochs: int, most: int
    ) -> Generator[None, None, NDArray[np.uint64]]:
        """Return at which positions of the first epochs rows hold a token of [start, stop) of a source.

        Raises:
            InvalidParameter: they are more than `most`.
        """
        first = int(self._first_token[source])
        lows, highs = yield from self._streams.touching(
            source, first + start, first + stop, self.plan.seq_len
        )
        counts = np.maximum(0, highs - lows + 1)
        if (total := int(counts.sum())) > most:
            raise InvalidParameter(
                f"the range touches {total} samples, and a look-up goes through at most {most}; ask for "
                "fewer tokens",
                parameter="stop",
                received=stop,
            )
        samples = np.arange(total) + np.repeat(lows - (counts.cumsum() - counts), counts)
        places = self._streams.places[np.unique(samples)].astype(np.int64)
        positions = np.sort(places - self._streams.first_sample[source])
        end = min(int(self._used[source]), epochs * int(self.num_windows[source]))
        return positions[positions < end].astype(np.uint64)

    def locate_windows(self, windows: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return where the first pieces of samples lie: `(k, 2) int64`, shard number, start token in it."""
        sources = self._streams.first_sample.searchsorted(windows.astype(np.int64), side="right") - 1
        pieces, borders = self._cut(sources, windows)
        return pieces[borders[:-1], :2]

    def _cut(
        self, sources: NDArray[np.intp], windows: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        pieces, borders = self._streams.cut(sources, windows.astype(np.int64), self.plan.seq_len)
        tokens = pieces[:, 0].astype(np.uint64)
        shards = self.windows.first_token.searchsorted(tokens, side="right") - 1
        starts = (tokens - self.windows.first_token[shards]).astype(np.int64)
        return np.stack((shards, starts, pieces[:, 1]), axis=1), borders

    def _num_steps(self, left: int) -> int:
        """Return how many training steps so many rows of the run make."""
        stages, end = self.plan.stages, 0
        for number, stage in enumerate(stages):
            last = number + 1 == len(stages)
            fit = left // stage.global_batch_size
            if last or fit < stages[number + 1].from_step - stage.from_step:
                end = stage.from_step + fit
                break
            left -= (stages[number + 1].from_step - stage.from_step) * stage.global_batch_size
        return self.plan.skip_steps.outside_before(end)


def _normalised(weights: Sequence[float]) -> list[float]:
    found = np.array(weights, dtype=np.float64)
    shares: list[float] = (found / np.sum(found)).tolist()
    return shares


def _order(plan: Plan) -> MegatronOrder:
    assert isinstance(plan.order, MegatronOrder)
    return plan.order


def _wanted(order: MegatronOrder) -> dict[str, int]:
    """Return how many samples Megatron asks each source of the blend for."""
    if order.weights is None:
        return {order.blend[0]: order.num_samples}
    shares = zip(order.blend, _normalised(order.weights), strict=True)
    return {name: math.ceil(math.ceil(order.num_samples * share) * (1 + _SURPLUS)) for name, share in shares}


def _parts(order: MegatronOrder, sequences: Mapping[str, Sequences]) -> dict[str, Sequences]:
    return {name: part_of(sequences[name], order.split, PARTS.index(order.part)) for name in order.blend}


def _sizes(plan: Plan, sequences: Mapping[str, Sequences]) -> Iterator[tuple[int, int]]:
    """Yield the documents and the samples of each source's stream."""
    order = _order(plan)
    wanted = _wanted(order)
    for name, part in _parts(order, sequences).items():
        num_tokens = int(part.lengths.sum())
        if num_tokens < 2:
            raise InvalidPlan(
                f"corpus {name!r} has no documents in its part {order.part} of split {list(order.split)}",
                parameter="order.megatron.split",
                received=list(order.split),
            )
        needed = extent(num_tokens, wanted[name], plan.seq_len)
        yield needed.epochs * part.lengths.size, needed.samples
