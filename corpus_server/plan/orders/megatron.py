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
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.plan.blend import Blend, BlendTable, choose
from corpus_server.plan.declared import choice, declared, integer, names, shares, texts
from corpus_server.plan.mixture import quantise
from corpus_server.plan.orders.order import (
    Arrangement,
    Keys,
    Layout,
    Order,
    ShardSizes,
    Source,
    WorkingSet,
    all_shards,
    refuse_stride,
)
from corpus_server.plan.rows import Pieces, Rows, UInt64Array, check_number
from corpus_server.plan.stage import Stage
from corpus_server.plan.streams import Sequences, Streams, draw, extent, part_of
from corpus_server.plan.windows import Windows

MAX_NUM_SAMPLES: Final = 2**31
MAX_BLENDED: Final = 1024
PARTS: Final = ("train", "valid", "test")

MAX_BYTES: Final = 4 * 2**30
"""Bytes of a plan's arrays; while they are built they are in memory."""

_SURPLUS: Final = 0.005
"""Megatron draws so many more samples of each source of a blend than it expects to use."""

_STREAMS: Final = ("begins", "bounds", "samples", "places", "firsts")
_WEIGHTS: Final = shares(
    range(1, MAX_BLENDED + 1), "numbers above 0, one for each corpus of blend", zeros=False
)


class Table(NamedTuple):
    """What decides the rows of a plan in Megatron's order."""

    streams: Streams
    blend: BlendTable

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, as `MegatronOrder.from_arrays` takes them."""
        streams = {name: getattr(self.streams, name) for name in _STREAMS}
        return {**streams, **self.blend._asdict()}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronOrder(Order):
    """The order of Megatron-Core's GPTDataset and BlendedDataset."""

    name = "megatron"
    sentence = "the rows of Megatron-Core's datasets, element for element, for a fixed number of samples"
    is_inline = False
    what = "order.megatron"
    prefix = "order.megatron."

    num_samples: int = declared(
        integer(1, MAX_NUM_SAMPLES), "Rows of the whole run, as Megatron was asked for."
    )
    blend: tuple[str, ...] = declared(
        names(MAX_BLENDED), "Corpora in Megatron's order; may be left out for a single one.", default=()
    )
    weights: tuple[float, ...] | None = declared(
        _WEIGHTS, "As Megatron was given them; left out only for a single path.", omit=True, default=None
    )
    split: tuple[float, ...] = declared(
        shares(range(1, len(PARTS) + 1), "1 to 3 numbers, not all 0", zeros=True),
        "Shares of the documents for training, validation and test.",
        default=(1.0,),
    )
    part: str = declared(choice(*PARTS), default="train")
    documents: Mapping[str, str] = declared(
        texts("an object of strings"),
        "Digests of the documents' lengths; the server fills them in.",
        omit=True,
        default_factory=dict,
    )

    def __post_init__(self) -> None:
        self._check()
        size = len(self.blend)
        if (size > 1) if self.weights is None else (size not in (0, len(self.weights))):
            accepted = "a list of numbers above 0, one for each corpus of blend"
            raise InvalidPlan.expected(f"{self.prefix}weights", accepted, self.weights and list(self.weights))

    def __str__(self) -> str:
        return f"{self.name} {self.num_samples}"

    def settle(
        self, *, seq_len: int, stride: int | None, seed: int, stages: Sequence[Stage]
    ) -> tuple[Order, int]:
        """Refuse what Megatron's samples cannot carry, and mixtures that do not say what the blend says."""
        integer(0, 2**32 - 1).take("seed", seed)  # NumPy's RandomState takes no other
        if stride not in (None, seq_len):
            raise refuse_stride(self.name, stride, f"left out or seq_len ({seq_len})")
        sources = tuple(dict.fromkeys(name for stage in stages for name in stage.mixture))
        if not self.blend and len(sources) > 1:
            accepted = "the corpora in the order of Megatron's blend, which decides the rows"
            raise InvalidPlan.expected("order.megatron.blend", accepted, [])
        order = replace(self, blend=self.blend or sources)
        units = quantise(dict(zip(order.blend, order.weights or (1.0,), strict=True)))
        for number, stage in enumerate(stages):
            if stage.units != units:
                accepted = f"the weights of order.megatron, which hold for the whole run: {units} of 65536"
                raise InvalidPlan.expected(f"stages[{number}].mixture", accepted, stage.units)
            for name, value in (("seq_len", stage.seq_len), ("exclude", stage.exclude)):
                if value:
                    raise InvalidPlan(
                        f"stages[{number}].{name} cannot be carried by order megatron: Megatron's samples "
                        "have one length, and none has a substitute; leave it out, or use order shuffle",
                        parameter=f"stages[{number}].{name}",
                    )
        return order, seq_len

    def over(self, num_rows: UInt64Array, keys: Keys) -> Arrangement:
        """Refuse: the order follows from its table, see `lay_out`."""
        raise TypeError("order megatron is laid out with its table")

    def lay_out(self, windows: Windows, sources: tuple[str, ...], keys: Keys, table: Any = None) -> Layout:
        """See `Order.lay_out`; the table is one of this order."""
        streams = table.streams
        return Layout(Samples(streams, windows), _Shuffled(streams), Blend(sources, table.blend))

    def working_set(self, shards: ShardSizes) -> WorkingSet:
        """Return all shards."""
        return all_shards(shards)

    @property
    def tabled(self) -> MegatronOrder:
        """See `Order.tabled`."""
        return self

    def with_documents(self, digests: Mapping[str, str]) -> MegatronOrder:
        """Return the order with digests of its documents."""
        return replace(self, documents=digests)

    def arrays(self) -> tuple[str, ...]:
        """Return the names of a table's arrays."""
        return (*_STREAMS, *BlendTable._fields)

    def from_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> Table:
        """Make a table of its arrays."""
        return Table(
            Streams(*(arrays[name] for name in _STREAMS)),
            BlendTable(*(arrays[name] for name in BlendTable._fields)),
        )

    def build(self, sequences: Mapping[str, Sequences], *, seq_len: int, seed: int) -> Table:
        """Build the table of a plan.

        Args:
            sequences: of each source, which `check_size` has allowed, in the plan's order; their first tokens
                are counted over all sources of the plan.
        """
        parts, wanted = self._parts(sequences), self._wanted()
        streams = Streams.join([draw(parts[name], wanted[name], seq_len, seed) for name in sequences])
        proportions = _normalised(self.weights or [1.0])
        if self.weights is not None:
            proportions = _normalised(proportions)  # twice, as Megatron does: a last bit may differ
        # Megatron chooses the first of two equal sources by its own order, not by the plan's.
        own = np.array([list(sequences).index(name) for name in self.blend], dtype=np.int16)
        chosen = choose(proportions, self.num_samples)
        counts = np.empty_like(chosen.counts)
        counts[:, own] = chosen.counts
        return Table(streams, BlendTable(own[chosen.sources], chosen.positions, counts))

    def num_shuffled(self, sequences: Mapping[str, Sequences], *, seq_len: int) -> int:
        """Return how many documents and samples are shuffled to build a table."""
        return sum(documents + samples for documents, samples in self._sizes(sequences, seq_len))

    def check_size(self, sequences: Mapping[str, Sequences], *, seq_len: int) -> None:
        """Refuse a plan whose table would be too large, or one of whose sources has no documents.

        Raises:
            InvalidPlan: naming the source, or the bytes.
        """
        num_bytes = 6 * self.num_samples
        for documents, samples in self._sizes(sequences, seq_len):
            num_bytes += 16 * documents + 8 * samples
        if num_bytes > MAX_BYTES:
            raise InvalidPlan(
                f"Megatron's tables of {self.num_samples} samples have {num_bytes} bytes, and a plan may "
                f"have at most {MAX_BYTES}; order shuffle needs none",
                parameter="order.megatron.num_samples",
                received=self.num_samples,
            )

    def check_used(self, sources: Sequence[str], table: Table) -> None:
        """Refuse a plan whose blend takes more samples of a source than there are, as Megatron does."""
        used = Blend(tuple(sources), table.blend).num_used.astype(np.int64)
        drawn = np.diff(table.streams.first_sample)
        for source in np.flatnonzero(used > drawn).tolist():
            raise InvalidPlan(
                f"the blend takes {used[source]} samples of {sources[source]!r}, and Megatron draws "
                f"{drawn[source]}; Megatron refuses this blend, too",
                parameter="order.megatron.weights",
            )

    def _wanted(self) -> dict[str, int]:
        """Return how many samples Megatron asks each source of the blend for."""
        if self.weights is None:
            return {self.blend[0]: self.num_samples}
        parts = zip(self.blend, _normalised(self.weights), strict=True)
        return {
            name: math.ceil(math.ceil(self.num_samples * share) * (1 + _SURPLUS)) for name, share in parts
        }

    def _parts(self, sequences: Mapping[str, Sequences]) -> dict[str, Sequences]:
        number = PARTS.index(self.part)
        return {name: part_of(sequences[name], self.split, number) for name in self.blend}

    def _sizes(self, sequences: Mapping[str, Sequences], seq_len: int) -> Iterator[tuple[int, int]]:
        """Yield the documents and the samples of each source's stream."""
        wanted = self._wanted()
        for name, part in self._parts(sequences).items():
            num_tokens = int(part.lengths.sum())
            if num_tokens < 2:
                raise InvalidPlan(
                    f"corpus {name!r} has no documents in its part {self.part} of split {list(self.split)}",
                    parameter="order.megatron.split",
                    received=list(self.split),
                )
            needed = extent(num_tokens, wanted[name], seq_len)
            yield needed.epochs * part.lengths.size, needed.samples


class Samples(Rows):
    """Megatron's samples as rows: each joins pieces of documents, and comes once in a run."""

    is_window = False

    def __init__(self, streams: Streams, windows: Windows) -> None:
        self._streams, self._windows = streams, windows
        self.first_row = streams.first_sample.astype(np.uint64)
        self.num_rows = np.diff(self.first_row)
        self.epoch_rows = np.maximum(1, streams.epoch_samples[:-1]).astype(np.uint64)

    def pieces(self, sources: NDArray[np.intp] | int, rows: UInt64Array, epochs: UInt64Array) -> Pieces:
        """See `Rows.pieces`."""
        index = self._windows.index
        each = np.broadcast_to(sources, rows.shape)
        pieces, borders = self._streams.cut(each, rows.astype(np.int64), index.seq_len)
        tokens = pieces[:, 0].astype(np.uint64)
        shards = index.first_token.searchsorted(tokens, side="right") - 1
        starts = (tokens - index.first_token[shards]).astype(np.int64)
        return np.stack((shards, starts, pieces[:, 1]), axis=1), borders

    def touching(
        self, source: int, start: int, stop: int, *, most: int
    ) -> Generator[None, None, UInt64Array]:
        """See `Rows.touching`."""
        first, seq_len = int(self._windows.first_token[source]), self._windows.index.seq_len
        lows, highs = yield from self._streams.touching(source, first + start, first + stop, seq_len)
        counts = np.maximum(0, highs - lows + 1)
        total = int(counts.sum())
        check_number(total, most, stop)
        samples = np.arange(total) + np.repeat(lows - (counts.cumsum() - counts), counts)
        return np.unique(samples).astype(np.uint64)

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`: of each piece."""
        rows = np.arange(start, stop, dtype=np.uint64)
        sources = self.first_row.searchsorted(rows, side="right") - 1
        pieces, _ = self.pieces(sources, rows, np.zeros_like(rows))
        return [(shard, begin, begin + count) for shard, begin, count in pieces.tolist()]


class _Shuffled(Arrangement):
    """The order of the samples of each source, those of all its epochs together."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def windows(self, source: Source, epochs: UInt64Array, offsets: UInt64Array) -> UInt64Array:
        first = self._streams.first_sample[source]
        found: UInt64Array = (self._streams.samples[first + offsets.astype(np.int64)] - first).astype(
            np.uint64
        )
        return found

    def offsets(self, source: Source, epochs: UInt64Array, windows: UInt64Array) -> UInt64Array:
        first = self._streams.first_sample[source]
        found: UInt64Array = (self._streams.places[first + windows.astype(np.int64)] - first).astype(
            np.uint64
        )
        return found


def _normalised(weights: Sequence[float]) -> list[float]:
    found = np.array(weights, dtype=np.float64)
    proportions: list[float] = (found / np.sum(found)).tolist()
    return proportions
