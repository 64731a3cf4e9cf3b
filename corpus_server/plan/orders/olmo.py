"""Order `olmo`: the instances of OLMo-core's numpy FSL dataset, in the order of its data loader.

Checked against `olmo_core/data` of OLMo-core 3.0 and `olmo/data` of OLMo 0.6. An *instance* is `seq_len + 1`
tokens of a file, next to the one before it; what is left at a file's end belongs to none. Instances are
numbered through the files of the run. An epoch shuffles their numbers by NumPy's
`Generator(PCG64(seed + epoch))` and gives them batch by batch; a last batch that is not full is left out.
With files of 10 and 7 tokens, instances of 3, batches of 2 and seed 0:

    instances        0 1 2 | 3 4          of the files 0 and 1
    epoch 1          4 0 | 1 2 | 3        the last one is left out
    epoch 2          2 4 | 3 0 | 1

No place of such a shuffle can be computed alone, so the order is a table, which is built once for a plan. Its
rows are the instances of all epochs: of n instances, number i of the k-th epoch, from 0, is row k * n + i.
The rows that the run gives come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import Int64Array, Pieces, UInt64Array
from corpus_server.plan.declared import declared, integer, integers
from corpus_server.plan.exclusion import Replacing
from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.orders.order import refuse_changed_rows
from corpus_server.plan.orders.tabled import TabledOrder, TabledRows
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.stage import MAX_GLOBAL_BATCH_SIZE, MAX_SEQ_LEN, Stage
from corpus_server.plan.tables import Job, Lengths
from corpus_server.work import Budget

MAX_EPOCHS: Final = 1024
MAX_FILES: Final = 2**20

MAX_BYTES: Final = 16 * 2**30
"""Bytes of a plan's arrays, which are in memory while they are built."""

_PAIRS_AT_ONCE: Final = 1 << 20  # ranges times files that a look-up compares in some 10 ms


class Table(NamedTuple):
    """What decides the rows of a plan in OLMo's order; read-only.

    Attributes:
        rows: `(epochs * instances,) uint32`, the row at each position; those behind the last batch of each
            epoch come last.
        places: the inverse of `rows`.
        shards: `(files,) int64`, number of each file's shard.
        firsts: `(files + 1,) int64`, each file's first instance; then the number of all instances.
        epoch_rows: `(1,) int64`, rows that an epoch gives.
    """

    rows: NDArray[np.uint32]
    places: NDArray[np.uint32]
    shards: Int64Array
    firsts: Int64Array
    epoch_rows: Int64Array


class Instances(TabledRows[Table]):
    """OLMo's instances as rows, those of each epoch by themselves; no plan's document names them."""

    name = "of order olmo"
    unit = "instance"
    is_window = True

    @cached_property
    def first_row(self) -> UInt64Array:
        """See `Rows.first_row`."""
        return np.array([0, self.table.rows.size], dtype=np.uint64)

    @cached_property
    def num_rows(self) -> UInt64Array:
        """See `Rows.num_rows`."""
        return self.first_row[1:]

    @cached_property
    def epoch_rows(self) -> UInt64Array:
        """See `Rows.epoch_rows`: an epoch leaves out what fills no batch."""
        return self.table.epoch_rows.astype(np.uint64)

    def pieces(
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None = None
    ) -> Pieces:
        """See `Rows.pieces`: one each."""
        table, length = self.table, self.sources.windows.seq_len + 1
        instances = rows.astype(np.int64) % table.firsts[-1]
        files = table.firsts.searchsorted(instances, side="right") - 1
        starts = (instances - table.firsts[files]) * length
        places = np.stack((table.shards[files], starts, np.full_like(starts, length)), axis=1)
        return Pieces(places, np.arange(rows.size + 1))

    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """See `Rows.within`."""
        table, length = self.table, self.sources.windows.seq_len + 1
        begins = self.sources.windows.shard_token[table.shards].astype(np.int64)
        counts = np.diff(table.firsts)
        bounds, found = ranges.bounds.astype(np.int64), [np.empty((0, 2), np.int64)]
        for at in range(0, len(bounds), at_once := max(1, _PAIRS_AT_ONCE // counts.size)):
            starts, stops = (each[:, None] - begins for each in bounds[at : at + at_once].T)
            first = np.clip(starts // length, 0, counts)
            last = np.clip(-(-stops // length), first, counts)
            touched = np.stack((first, last), axis=-1) + table.firsts[:-1, None]
            found.append(touched[last > first])
            budget.spend()
        each_epoch = np.arange(table.rows.size // int(table.firsts[-1])) * table.firsts[-1]
        in_epochs = np.concatenate(found)[None] + each_epoch[:, None, None]
        units: UInt64Array = in_epochs.reshape(-1, 2).astype(np.uint64)
        return units


class OlmoOrder(TabledOrder[Table]):
    """The order of OLMo-core's NumpyFSLDataset and NumpyFSLDataLoader, and of OLMo's IterableDataset."""

    name = "olmo"
    sentence = "the instances of OLMo-core's numpy dataset, element for element, epoch by epoch"

    num_epochs: int = declared(
        integer(1, MAX_EPOCHS), "Epochs of the run, after which the plan ends.", default=1
    )
    first_epoch: int = declared(
        integer(0, 2**32), "Number of the first epoch: 1 in OLMo-core, 0 in OLMo.", default=1
    )
    max_target_sequence_length: int | None = declared(
        integer(1, MAX_SEQ_LEN),
        "As OLMo-core was given it: instances of so many tokens stay together, and a file has whole ones.",
        omit=True,
        default=None,
    )
    shards: tuple[int, ...] | None = declared(
        integers(MAX_FILES, MAX_FILES),
        "Numbers of the corpus's shards in the order of the run's paths, each as often as it is there; left "
        "out where that is the corpus's own order.",
        omit=True,
        default=None,
    )
    global_batch_size: int | None = declared(
        integer(1, MAX_GLOBAL_BATCH_SIZE),
        "Rows of a step, of all stages, which decide where an epoch ends; filled in.",
        omit=True,
        default=None,
    )

    def settle(
        self, *, seq_len: int, stride: int | None, seed: int, stages: Sequence[Stage]
    ) -> tuple[Self, int]:
        """Refuse what instances cannot carry; fill in the rows of a step."""
        length = seq_len + 1
        if stride not in (None, length):
            accepted = f"left out or seq_len + 1 ({length}) with order {self.name}"
            raise InvalidPlan.expected("stride", accepted, stride)
        target = self.max_target_sequence_length
        if target is not None and target % length:
            accepted = f"a multiple of an instance's tokens, seq_len + 1 = {length}"
            raise InvalidPlan.expected(f"{self.prefix}max_target_sequence_length", accepted, target)
        sources = sorted({name for stage in stages for name in stage.mixture})
        if len(sources) > 1:
            accepted = "one corpus with order olmo, with the files of all paths"
            raise InvalidPlan.expected("stages[].mixture", accepted, sources)
        size = self.global_batch_size or stages[0].global_batch_size
        for number, stage in enumerate(stages):
            if stage.global_batch_size != size:
                accepted = f"{size} as in all of the plan, because an epoch of order olmo has whole batches"
                raise InvalidPlan.expected(
                    f"stages[{number}].global_batch_size", accepted, stage.global_batch_size
                )
            refuse_changed_rows(self, number, stage, "OLMo's instances")
        return replace(self, global_batch_size=size), length

    @property
    def _batch_size(self) -> int:
        assert self.global_batch_size is not None  # `settle` filled it in
        return self.global_batch_size

    def over(self, rows: Rows) -> tuple[Rows, Self]:
        """See `Order.over`."""
        return super().over(Instances(sources=rows.sources))

    @cached_property
    def num_used(self) -> UInt64Array:
        """See `Order.num_used`."""
        return self.table.epoch_rows.astype(np.uint64) * np.uint64(self.num_epochs)

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        return self.table.rows[offsets.astype(np.int64)].astype(np.uint64)

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """See `Order.offsets_of`."""
        return self.table.places[rows.astype(np.int64)].astype(np.uint64)

    def jobs(
        self, lengths: Mapping[str, Lengths], *, seq_len: int, seed: int, decides: Mapping[str, Any]
    ) -> list[Job]:
        """See `Named.jobs`: one table of all epochs."""
        ((name, its),) = lengths.items()
        length = seq_len + 1
        in_shards = np.diff(its.shard_ends, prepend=0)
        if self.shards and max(self.shards) >= in_shards.size:
            accepted = f"numbers of shards below {in_shards.size}, which corpus {name!r} has"
            raise InvalidPlan.expected(f"{self.prefix}shards", accepted, max(self.shards))
        shards = np.array(self.shards or range(in_shards.size), dtype=np.int64)
        together = (self.max_target_sequence_length or length) // length
        counts = in_shards[shards] // (length * together) * together
        num_instances, batch_size = int(counts.sum()), self._batch_size
        if num_instances < batch_size:
            raise InvalidPlan(
                f"corpus {name!r} has {num_instances} instances of {length} tokens, fewer than the "
                f"{batch_size} of a step",
                parameter="stages[].global_batch_size",
                received=batch_size,
                accepted=f"at most {num_instances}" if num_instances else "no value fits this corpus",
            )
        size = self.num_epochs * num_instances
        if (num_bytes := 8 * size) > MAX_BYTES:
            raise InvalidPlan(
                f"the tables of {self.num_epochs} epochs of {num_instances} instances have {num_bytes} "
                f"bytes, and a plan may have at most {MAX_BYTES}; ask for fewer epochs; order shuffle needs "
                "no table",
                parameter=f"{self.prefix}num_epochs",
                received=self.num_epochs,
            )
        return [Job(Table, decides, partial(int, size), partial(self._build, shards, counts, together, seed))]

    def _build(
        self,
        shards: Int64Array,
        counts: Int64Array,
        together: int,
        seed: int,
        *,
        run: Callable[..., Iterable[Any]] = map,
    ) -> Table:
        firsts = np.concatenate(([0], counts.cumsum()))
        size = int(firsts[-1])
        given = size // self._batch_size * self._batch_size
        rows = np.empty(self.num_epochs * size, dtype=np.uint32)
        left = rows[self.num_epochs * given :].reshape(self.num_epochs, size - given)
        for epoch in range(self.num_epochs):
            shuffled = np.arange(size // together, dtype=np.uint32)
            np.random.Generator(np.random.PCG64(seed + self.first_epoch + epoch)).shuffle(shuffled)
            if together > 1:
                within = np.arange(together, dtype=np.uint32)
                shuffled = (shuffled[:, None] * np.uint32(together) + within).reshape(-1)
            shuffled += np.uint32(epoch * size)
            rows[epoch * given : (epoch + 1) * given] = shuffled[:given]
            left[epoch] = shuffled[given:]
        places = np.empty_like(rows)
        places[rows] = np.arange(rows.size, dtype=np.uint32)
        return Table(rows, places, shards, firsts, np.array([given]))
