"""Orders of samples: rows that join documents as the GPT datasets of Megatron and its forks join them.

    step, row       row of the run, from the stages before and their batch sizes
    source          by the blend, see `blend.py`; with the position in the source
    sample          by the order of the source's samples, see `streams.py`
    pieces          the parts of documents that the sample joins: (shard, start token, tokens)

Other orders are computed. These are tables, which follow from the documents' lengths and are built once
for a plan. A row has no one place in the corpus. `megatron.py` and `neox.py` say in what the two differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Pieces, UInt64Array, at_or_below, expanded
from corpus_server.plan.blend import Blend, BlendTable, choose
from corpus_server.plan.declared import choice, declared, integer, names, shares, texts
from corpus_server.plan.exclusion import Replacing
from corpus_server.plan.mixture import quantise
from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.orders.order import refuse_changed_rows
from corpus_server.plan.orders.tabled import TabledOrder, TabledRows
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.stage import Stage
from corpus_server.plan.streams import Drawn, Sequences, draw, extent, join
from corpus_server.plan.tables import Job, Lengths
from corpus_server.work import Budget

MAX_NUM_SAMPLES: Final = 2**31
MAX_BLENDED: Final = 1024
PARTS: Final = ("train", "valid", "test")

MAX_BYTES: Final = 16 * 2**30
"""Bytes of a plan's arrays, which are in memory while they are built."""

_SLICE: Final = 1 << 20  # documents that a look-up goes through in some ms
_WEIGHTS: Final = shares(MAX_BLENDED, "numbers above 0, one for each corpus of blend", zeros=False)


class Table(NamedTuple):
    """What decides the rows of a plan in an order of samples: see `Streams` and `BlendTable`; read-only."""

    begins: NDArray[np.int64]
    bounds: NDArray[np.int64]
    samples: NDArray[np.uint32]
    places: NDArray[np.uint32]
    firsts: NDArray[np.int64]
    sources: NDArray[np.int16]
    positions: NDArray[np.uint32]
    counts: NDArray[np.int64]


class Samples(TabledRows[Table]):
    """Samples as rows, each of which joins pieces of documents; no plan's document names them."""

    name = "of samples"
    unit = "sample"

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
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None = None
    ) -> Pieces:
        """See `Rows.pieces`."""
        windows, table = self.sources.windows, self.table
        first_sample, first_token, _ = table.firsts
        starts = first_token[sources] + (rows.astype(np.int64) - first_sample[sources]) * windows.seq_len
        stops = starts + (windows.seq_len + 1)
        low = at_or_below(table.bounds, starts)
        num_pieces = at_or_below(table.bounds, stops - 1) + 1 - low
        row, documents = expanded(low, num_pieces)
        origins = table.bounds[documents]
        begins = np.maximum(origins, starts[row])
        ends = np.minimum(table.bounds[documents + 1], stops[row])
        shards, within = windows.in_shards((table.begins[documents] + begins - origins).astype(np.uint64))
        borders = np.concatenate(([0], num_pieces.cumsum()))
        return Pieces(np.stack((shards, within, ends - begins)).T, borders)

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


class SampleOrder(TabledOrder[Table]):
    """An order of samples; a kind of it says what its maker does in its own way.

    Attributes:
        maker: the program whose datasets have this order.
        is_last_apart: whether the last of several epochs may be shuffled by itself.
        too_few: what it does where a blend takes more samples of a source than were drawn.
    """

    maker: ClassVar[str]
    too_few: ClassVar[str]
    is_last_apart: ClassVar[bool]
    digests_field = "documents"

    num_samples: int = declared(
        integer(1, MAX_NUM_SAMPLES), "Rows of the whole run, as the trainer was asked for."
    )
    blend: tuple[str, ...] = declared(
        names(MAX_BLENDED), "Corpora in the trainer's order; may be left out for a single one.", default=()
    )
    weights: tuple[float, ...] | None = declared(
        _WEIGHTS, "As the trainer was given them; left out only for a single path.", omit=True, default=None
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

    @staticmethod
    @abstractmethod
    def shares(weights: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the shares of a blend, as samples are drawn and as sources are chosen by them.

        Their last bits count.
        """

    @staticmethod
    @abstractmethod
    def num_drawn(num_samples: int, share: float) -> int:
        """Return how many samples a source of a blend is asked for."""

    @staticmethod
    @abstractmethod
    def split_bounds(split: Sequence[float], num_documents: int) -> list[int]:
        """Return where the three parts of a split begin, in documents, and where the last one ends."""

    def num_given(self, drawn: Sequence[int]) -> int:
        """Return how many rows the run has, of so many samples drawn from each source."""
        return self.num_samples

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
    ) -> tuple[Self, int]:
        """Refuse what samples cannot carry, and mixtures that do not say what the blend says."""
        integer(0, 2**32 - 1).take("seed", seed)  # NumPy's RandomState takes no other
        if stride not in (None, seq_len):
            accepted = f"left out or seq_len ({seq_len}) with order {self.name}"
            raise InvalidPlan.expected("stride", accepted, stride)
        sources = tuple(dict.fromkeys(name for stage in stages for name in stage.mixture))
        if not self.blend and len(sources) > 1:
            accepted = f"the corpora in the order of {self.maker}'s blend, which decides the rows"
            raise InvalidPlan.expected(f"{self.prefix}blend", accepted, [])
        order = replace(self, blend=self.blend or sources)
        units = quantise(dict(zip(order.blend, order.weights or (1.0,), strict=True)))
        for number, stage in enumerate(stages):
            if stage.units != units:
                accepted = f"the weights of order.{self.name}, which hold for the whole run: {units} of 65536"
                raise InvalidPlan.expected(f"stages[{number}].mixture", accepted, stage.units)
            refuse_changed_rows(self, number, stage, f"{self.maker}'s samples")
        return order, seq_len

    def over(self, rows: Rows) -> tuple[Rows, Self]:
        """See `Order.over`.

        Raises:
            InvalidPlan: the blend takes more samples of a source than there are.
        """
        samples, order = super().over(Samples(sources=rows.sources))
        used = order.chooser.num_used.astype(np.int64)
        drawn = samples.num_rows.astype(np.int64)
        for source in np.flatnonzero(used > drawn).tolist():
            raise InvalidPlan(
                f"the blend takes {used[source]} samples of {rows.sources.names[source]!r}, and {self.maker} "
                f"draws {drawn[source]}; {self.too_few}",
                parameter=f"{self.prefix}weights",
            )
        return samples, order

    @cached_property
    def chooser(self) -> Blend:
        """See `Order.chooser`."""
        table = self.table
        return Blend(self.sources.names, BlendTable(table.sources, table.positions, table.counts))

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        return self._look_up(self.table.samples, source, offsets)

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """See `Order.offsets_of`."""
        return self._look_up(self.table.places, source, rows)

    def _look_up(self, table: NDArray[np.uint32], source: SourceNumbers, numbers: UInt64Array) -> UInt64Array:
        first = self.table.firsts[0][source]
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
        shuffle = partial(draw, seq_len=seq_len, seed=seed, is_last_apart=self.is_last_apart)
        drawn = [*run(shuffle, map(parts.get, sequences), map(wanted.get, sequences))]
        # The maker chooses the first of two equal sources by its own order, not by the plan's.
        own = np.array([list(sequences).index(name) for name in self.blend], dtype=np.int16)
        shares = [1.0] if self.weights is None else self.shares(self.weights)[1]
        chosen = choose(shares, self.num_given([drawn[source].samples.size for source in own.tolist()]))
        counts = np.empty_like(chosen.counts)
        counts[:, own] = chosen.counts
        return Table(*join(drawn), own[chosen.sources], chosen.positions, counts)

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
                    parameter=f"{self.prefix}split",
                    received=list(self.split),
                )
            needed = extent(num_tokens, wanted[name], seq_len, is_last_apart=self.is_last_apart)
            num_documents += needed.epochs * part.lengths.size
            num_samples += needed.samples
        num_bytes = 6 * self.num_samples + 16 * num_documents + 8 * num_samples
        if num_bytes > MAX_BYTES:
            raise InvalidPlan(
                f"the tables of {self.num_samples} samples have {num_bytes} bytes, and a plan may "
                f"have at most {MAX_BYTES}; order shuffle needs none",
                parameter=f"{self.prefix}num_samples",
                received=self.num_samples,
            )
        return num_documents + num_samples

    def _wanted(self) -> dict[str, int]:
        """Return how many samples each source is asked for."""
        if self.weights is None:
            return {self.blend[0]: self.num_samples}
        parts = zip(self.blend, self.shares(self.weights)[0], strict=True)
        return {name: self.num_drawn(self.num_samples, share) for name, share in parts}

    def _parts(self, sequences: Mapping[str, Sequences]) -> dict[str, Sequences]:
        number, found = PARTS.index(self.part), {}
        for name in self.blend:
            starts, lengths = sequences[name]
            begin, end = self.split_bounds(self.split, lengths.size)[number : number + 2]
            found[name] = Sequences(starts[begin:end], lengths[begin:end])
        return found


def _sequences(lengths: Mapping[str, Lengths]) -> dict[str, Sequences]:
    """Return the documents of corpora; their first tokens are counted over all corpora."""
    firsts = accumulate((its.num_tokens for its in lengths.values()), initial=0)
    found = {}
    for first, (name, its) in zip(firsts, lengths.items(), strict=False):
        starts, counts = its.sequences()
        found[name] = Sequences(first + starts, counts)
    return found
