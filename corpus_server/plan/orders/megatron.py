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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Pieces, expanded
from corpus_server.plan.blend import Blend, BlendTable, choose
from corpus_server.plan.declared import choice, declared, integer, names, shares, texts
from corpus_server.plan.exclusion import Exclusion
from corpus_server.plan.mixture import quantise
from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers, UInt64Array
from corpus_server.plan.orders.order import Order, all_shards
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows import Rows
from corpus_server.plan.stage import Stage
from corpus_server.plan.streams import Drawn, Sequences, draw, extent, join, part_of
from corpus_server.plan.tables import Job, Lengths
from corpus_server.work import Budget

MAX_NUM_SAMPLES: Final = 2**31
MAX_BLENDED: Final = 1024
PARTS: Final = ("train", "valid", "test")

MAX_BYTES: Final = 4 * 2**30
"""Bytes of a plan's arrays; while they are built they are in memory."""

_SURPLUS: Final = 0.005
"""Megatron draws so many more samples of each source of a blend than it expects to use."""

_SLICE: Final = 1 << 20  # documents that a look-up goes through in some ms
_WEIGHTS: Final = shares(MAX_BLENDED, "numbers above 0, one for each corpus of blend", zeros=False)


class Table(NamedTuple):
    """What decides the rows of a plan in Megatron's order: see `Streams` and `BlendTable`; read-only."""

    begins: NDArray[np.int64]
    bounds: NDArray[np.int64]
    samples: NDArray[np.uint32]
    places: NDArray[np.uint32]
    firsts: NDArray[np.int64]
    sources: NDArray[np.int16]
    positions: NDArray[np.uint32]
    counts: NDArray[np.int64]


class Samples(Rows):
    """Megatron's samples as rows, each of which joins pieces of documents; no document names them."""

    name = "of order megatron"
    unit = "sample"

    @property
    def table(self) -> Table:
        """The table of the plan."""
        table: Table = self.sources.tables[0]  # type: ignore[assignment]
        return table

    @cached_property
    def first_row(self) -> UInt64Array:
        """See `Rows.first_row`."""
        firsts: UInt64Array = self.table.firsts[0].astype(np.uint64)
        return firsts

    @cached_property
    def num_rows(self) -> UInt64Array:
        """See `Rows.num_rows`."""
        return np.diff(self.first_row)

    @cached_property
    def epoch_rows(self) -> UInt64Array:
        """See `Rows.epoch_rows`: all epochs of a source are permuted together."""
        return np.maximum(1, self.table.firsts[2, :-1]).astype(np.uint64)

    def pieces(
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Exclusion | None = None
    ) -> Pieces:
        """See `Rows.pieces`."""
        windows, table = self.sources.windows, self.table
        first_sample, first_token, _ = table.firsts
        starts = first_token[sources] + (rows.astype(np.int64) - first_sample[sources]) * windows.seq_len
        stops = starts + (windows.seq_len + 1)
        low = table.bounds.searchsorted(starts, side="right") - 1
        num_pieces = table.bounds.searchsorted(stops, side="left") - low
        row, documents = expanded(low, num_pieces)
        origins = table.bounds[documents]
        begins = np.maximum(origins, starts[row])
        ends = np.minimum(table.bounds[documents + 1], stops[row])
        shards, within = windows.in_shards((table.begins[documents] + begins - origins).astype(np.uint64))
        borders = np.concatenate(([0], num_pieces.cumsum()))
        return Pieces(np.stack((shards, within, ends - begins), axis=1), borders)

    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """See `Rows.within`."""
        windows, table = self.sources.windows, self.table
        seq_len, before = windows.seq_len, int(windows.first_token[source])
        (first_sample, end_sample), (first_token, end_token) = table.firsts[:2, source : source + 2].tolist()
        low, high = table.bounds.searchsorted((first_token, end_token)).tolist()
        starts, stops = ranges.bounds.astype(np.int64).T
        found = [np.empty((0, 2), np.int64)]
        for at in range(low, high, _SLICE):
            begins = table.begins[at : min(at + _SLICE, high)] - before
            bounds = table.bounds[at : at + begins.size + 1]
            lengths = np.diff(bounds)
            # Of each document the first range that ends behind its begin, to the last that begins in it.
            touched = stops.searchsorted(begins, side="right")
            counts = np.maximum(0, starts.searchsorted(begins + lengths) - touched)
            document, which = expanded(touched, counts)
            origins = bounds[document] - first_token
            first = origins + np.maximum(0, starts[which] - begins[document])
            last = origins + np.minimum(lengths[document], stops[which] - begins[document]) - 1
            samples = np.maximum(0, -((seq_len - first) // seq_len)), last // seq_len + 1
            found.append(first_sample + np.stack(samples, axis=1))
            budget.spend()
        units: UInt64Array = np.minimum(np.concatenate(found), end_sample).astype(np.uint64)
        return units

    @property
    def row_pieces(self) -> int:
        """See `Rows.row_pieces`."""
        return -(-self.table.begins.size // self.table.samples.size) + 1

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`: of each piece."""
        rows = np.arange(start, stop, dtype=np.uint64)
        sources = self.first_row.searchsorted(rows, side="right") - 1
        pieces, _ = self.pieces(sources, rows, np.zeros_like(rows))
        return [(shard, begin, begin + count) for shard, begin, count in pieces.tolist()]

    def reach(self, source: int, num_rows: int) -> int:
        """See `Rows.reach`: all of it, because neighbouring samples are of documents anywhere."""
        return self.sources.windows.num_tokens(source)


class MegatronOrder(Order):
    """The order of Megatron-Core's GPTDataset and BlendedDataset."""

    name = "megatron"
    sentence = "the rows of Megatron-Core's datasets, element for element, for a fixed number of samples"
    is_inline = False
    working_set = all_shards
    prefix = "order.megatron."
    digests_field = "documents"

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
        shares(len(PARTS), "1 to 3 numbers, not all 0", zeros=True),
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

    def settled(self) -> dict[str, Any]:
        """See `Declared.settled`."""
        size = len(self.blend)
        if (size > 1) if self.weights is None else (size not in (0, len(self.weights))):
            accepted = "a list of numbers above 0, one for each corpus of blend"
            raise InvalidPlan.expected(f"{self.prefix}weights", accepted, self.weights and list(self.weights))
        return {}

    def __str__(self) -> str:
        return f"{self.name} {self.num_samples}"

    def settle(
        self, *, seq_len: int, stride: int | None, seed: int, stages: Sequence[Stage]
    ) -> tuple[MegatronOrder, int]:
        """Refuse what Megatron's samples cannot carry, and mixtures that do not say what the blend says."""
        integer(0, 2**32 - 1).take("seed", seed)  # NumPy's RandomState takes no other
        if stride not in (None, seq_len):
            accepted = f"left out or seq_len ({seq_len}) with order megatron"
            raise InvalidPlan.expected("stride", accepted, stride)
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

    def over(self, rows: Rows) -> tuple[Rows, MegatronOrder]:
        """See `Order.over`.

        Raises:
            InvalidPlan: the blend takes more samples of a source than there are; Megatron refuses it, too.
        """
        samples, order = super().over(Samples(sources=rows.sources))
        used = order.chooser.num_used.astype(np.int64)
        drawn = samples.num_rows.astype(np.int64)
        for source in np.flatnonzero(used > drawn).tolist():
            raise InvalidPlan(
                f"the blend takes {used[source]} samples of {rows.sources.names[source]!r}, and Megatron "
                f"draws {drawn[source]}; Megatron refuses this blend, too",
                parameter="order.megatron.weights",
            )
        return samples, order

    @cached_property
    def chooser(self) -> Blend:
        """See `Order.chooser`."""
        table = self._table
        return Blend(self.sources.names, BlendTable(table.sources, table.positions, table.counts))

    @property
    def _table(self) -> Table:
        table: Table = self.sources.tables[0]  # type: ignore[assignment]
        return table

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        return self._look_up(self._table.samples, source, offsets)

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """See `Order.offsets_of`."""
        return self._look_up(self._table.places, source, rows)

    def _look_up(self, table: NDArray[np.uint32], source: SourceNumbers, numbers: UInt64Array) -> UInt64Array:
        first = self._table.firsts[0][source]
        found: UInt64Array = (table[first + numbers.astype(np.int64)] - first).astype(np.uint64)
        return found

    def jobs(
        self, lengths: Mapping[str, Lengths], *, seq_len: int, seed: int, decides: Mapping[str, Any]
    ) -> list[Job]:
        """See `Named.jobs`: one table of all sources."""
        return [
            Job(
                Table,
                decides,
                partial(self._size, lengths, seq_len=seq_len),
                partial(self._build, lengths, seq_len=seq_len, seed=seed),
            )
        ]

    def _size(self, lengths: Mapping[str, Lengths], *, seq_len: int) -> int:
        return self.check_size(_sequences(lengths), seq_len=seq_len)

    def _build(
        self,
        lengths: Mapping[str, Lengths],
        *,
        seq_len: int,
        seed: int,
        run: Callable[..., Iterable[Drawn]] = map,
    ) -> Table:
        return self.build(_sequences(lengths), seq_len=seq_len, seed=seed, run=run)

    def build(
        self,
        sequences: Mapping[str, Sequences],
        *,
        seq_len: int,
        seed: int,
        run: Callable[..., Iterable[Drawn]] = map,
    ) -> Table:
        """Build the table of a plan.

        Args:
            sequences: of each source, which `check_size` has allowed, in the plan's order; their first tokens
                are counted over all sources of the plan.
            run: shuffles the sources: `map`, or what calls in other processes.
        """
        parts, wanted = self._parts(sequences), self._wanted()
        shuffle = partial(draw, seq_len=seq_len, seed=seed)
        streams = join([*run(shuffle, map(parts.get, sequences), map(wanted.get, sequences))])
        proportions = _normalised(self.weights or [1.0])
        if self.weights is not None:
            proportions = _normalised(proportions)  # twice, as Megatron does: a last bit may differ
        # Megatron chooses the first of two equal sources by its own order, not by the plan's.
        own = np.array([list(sequences).index(name) for name in self.blend], dtype=np.int16)
        chosen = choose(proportions, self.num_samples)
        counts = np.empty_like(chosen.counts)
        counts[:, own] = chosen.counts
        return Table(*streams, own[chosen.sources], chosen.positions, counts)

    def check_size(self, sequences: Mapping[str, Sequences], *, seq_len: int) -> int:
        """Return how many documents and samples are shuffled to build a table.

        Raises:
            InvalidPlan: the table would be too large, or a source has no documents.
        """
        num_documents = num_samples = 0
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
            num_documents += needed.epochs * part.lengths.size
            num_samples += needed.samples
        num_bytes = 6 * self.num_samples + 16 * num_documents + 8 * num_samples
        if num_bytes > MAX_BYTES:
            raise InvalidPlan(
                f"Megatron's tables of {self.num_samples} samples have {num_bytes} bytes, and a plan may "
                f"have at most {MAX_BYTES}; order shuffle needs none",
                parameter="order.megatron.num_samples",
                received=self.num_samples,
            )
        return num_documents + num_samples

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


def _normalised(weights: Sequence[float]) -> list[float]:
    found = np.array(weights, dtype=np.float64)
    proportions: list[float] = (found / np.sum(found)).tolist()
    return proportions


def _sequences(lengths: Mapping[str, Lengths]) -> dict[str, Sequences]:
    """Return the documents of corpora; their first tokens are counted over all corpora."""
    firsts = accumulate((its.num_tokens for its in lengths.values()), initial=0)
    found = {}
    for first, (name, its) in zip(firsts, lengths.items(), strict=False):
        starts, counts = its.sequences()
        found[name] = Sequences(first + starts, counts)
    return found
