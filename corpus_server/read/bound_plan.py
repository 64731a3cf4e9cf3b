"""A plan together with the open corpora that hold its tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.shards import Shard
from corpus_server.errors import InvalidPlan
from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.document import MAX_STAGES
from corpus_server.plan.exclusion import Exclusion
from corpus_server.plan.origins import Origins
from corpus_server.plan.stage_log import StageLog
from corpus_server.plan.tables import Table
from corpus_server.plan.windows import Windows
from corpus_server.read.gather import Gatherer
from corpus_server.read.masks import MaskGatherer
from corpus_server.stores import Blocks, Extents

_PLAN_BYTES, _STAGE_BYTES, _SHARD_BYTES = 9_000, 1_500, 128
"""Memory of the Python objects of a plan, of each of its stages that is kept as one, and of a shard in a
`ShardList`, as tracemalloc counts them."""


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """Whose tokens a response holds: `shares` of corpora, by the exact weights of the plan's stage.

    plan_id: "" for tokens that no plan chose.
    names, shares: of the corpora; counting a response of a thousand corpora must not hold up the event loop.
    """

    plan_id: str
    names: tuple[str, ...]
    shares: NDArray[np.float64]

    @classmethod
    def of(cls, plan_id: str, shares: Mapping[str, float]) -> Source:
        """Return a source of shares by corpus."""
        return cls(plan_id, tuple(shares), np.array(list(shares.values())))


class InUse(Protocol):
    """A table, see `tables.py`; `num_bytes` of memory, 0 if it is mapped."""

    table: Table
    num_bytes: int

    def __hash__(self) -> int: ...

    def is_changed(self) -> bool: ...  # noqa: D102


class ShardList:
    """The shards of a plan's corpora, one corpus after another; plans over the same corpora share it.

    Attributes:
        corpora: by their names in plans.
        shards: (corpus name, shard).
        staged: the extents of the shards that lie in object stores, then those of their loss masks.
        is_staged: whether there is one.
        gatherer: over these shards.
        dtype: the widest of the corpora.
        mask_dtype: of loss masks, the widest of the corpora: bool or float16.
        source_of_shard: `(shards,) uint16`, each shard's corpus by number; a plan has at most 2^15 sources.
        origins: of the sources, if some are views.
        contents: of each source, the fingerprint of the corpus that holds its tokens.
        num_bytes: memory that the list takes, approximately.
    """

    def __init__(self, corpora: Mapping[str, Corpus], *, reads_ahead: bool = True) -> None:
        self.corpora = dict(corpora)
        self.shards: list[tuple[str, Shard]] = [
            (name, shard) for name, corpus in self.corpora.items() for shard in corpus.shards
        ]
        numbers = np.arange(len(self.corpora), dtype=np.uint16)
        self.source_of_shard = numbers.repeat([len(corpus.shards) for corpus in self.corpora.values()])
        self.gatherer = Gatherer([shard for _, shard in self.shards], reads_ahead=reads_ahead)
        masks = Extents([shard.mask for _, shard in self.shards])
        self.staged = (self.gatherer.extents, masks)
        self.is_staged = any(self.staged)
        self.dtype: np.dtype[np.integer] = np.result_type(*(c.dtype for c in self.corpora.values()))
        self.mask_dtype: np.dtype[Any] = np.result_type(*(c.mask_dtype for c in self.corpora.values()))
        self.origins = Origins.of(self.corpora)
        self.contents = tuple(each.base.fingerprints["sampled"] for each in self.corpora.values())
        self.num_bytes = _SHARD_BYTES * len(self.shards)
        self._reads_ahead = reads_ahead
        self._windows: WeakValueDictionary[tuple[int, int], Windows] = WeakValueDictionary()

    @cached_property
    def eots(self) -> NDArray[np.int64]:
        """`(shards,)`, the end-of-text token of each shard's corpus; of plans that `check_eots` accepts."""
        return np.array([self.corpora[name].eot for name, _ in self.shards], dtype=np.int64)

    @cached_property
    def masks(self) -> MaskGatherer:
        """Rows to their loss masks."""
        return MaskGatherer([shard for _, shard in self.shards], reads_ahead=self._reads_ahead)

    def windows(self, seq_len: int, stride: int) -> Windows:
        """Return the windows of these shards: one object for all plans of these lengths."""
        found = self._windows.get((seq_len, stride))
        if found is None:
            tokens = [np.diff(corpus.starts).tolist() for corpus in self.corpora.values()]
            found = self._windows[seq_len, stride] = Windows(tokens, seq_len=seq_len, stride=stride)
        return found


class BoundPlan:
    """A plan together with the open corpora that hold its tokens.

    Args:
        opened: the shards of the plan's sources, in their order.
        tables: of a plan whose rows follow from some.
        values: of each source, the table of what its documents have in the column of a family.
        parent: of a plan that this one continues.

    Raises:
        InvalidPlan: the plan does not fit the corpora, see `Sampler`.

    Attributes:
        plan: with its fingerprints.
        root_id: of the plan that it continues, over any number of plans between, or its own: what is counted.
        key: of what is kept about this object elsewhere and must not keep it alive.
        sampler: (step, rank) to rows.
        gatherer: rows to tokens; its shard numbers are the sampler's.
        has_masks: whether a shard of a source has a loss mask.
        token_bytes: read for each token, with its mask.
        corpora, shards, staged, is_staged, dtype, mask_dtype, source_of_shard: see `ShardList`.
        num_bytes: memory that the plan takes, approximately, without what it shares.
        shared: what other plans may share, each with its `num_bytes`.
    """

    def __init__(
        self,
        plan: Plan,
        opened: ShardList,
        tables: Sequence[InUse] = (),
        values: Sequence[InUse] = (),
        parent: BoundPlan | None = None,
    ) -> None:
        assert plan.stride is not None  # set by Plan itself
        self.plan, self.root_id = plan, plan.root.id
        self.key = object()
        self.corpora, self.shards, self.staged = opened.corpora, opened.shards, opened.staged
        self.is_staged, self.gatherer, self.dtype = opened.is_staged, opened.gatherer, opened.dtype
        self.source_of_shard, self.mask_dtype = opened.source_of_shard, opened.mask_dtype
        self.has_masks = any(corpus.num_masks for corpus in opened.corpora.values())
        self.token_bytes = self.dtype.itemsize + (self.mask_dtype.itemsize if self.has_masks else 0)
        self._opened, self._tables = opened, (*tables, *values)
        self._looked_at, self._is_changed = -math.inf, False
        windows = opened.windows(plan.seq_len, plan.stride)
        self.sampler: Sampler = Sampler(
            plan,
            tables=[each.table for each in tables],
            windows=windows,
            origins=opened.origins,
            contents=opened.contents,
            parent=None if parent is None or parent._opened is not opened else parent.sampler,
            corpora=list(opened.corpora.values()),
            values=[hashes for each in values for hashes in each.table],
        )
        self._sources: dict[int, Source] = {}
        if self.is_staged and self.sampler.rows.shard_row is None:
            raise InvalidPlan(
                f"order {plan.order.name} reads pieces of shards anywhere for each row, and corpora in an "
                "object store are fetched by large extents; serve a local copy, or use a bounded shuffle",
                parameter="order",
            )
        if self.is_staged and self.sampler.is_window and (num_windows := plan.order.block_rows):
            blocks = self._blocks(num_windows)
            tokens, masks = opened.staged
            self.staged = tokens.cut(blocks), masks.cut(blocks)
        # Kept, because a cache of plans asks for it at each insertion and removal.
        num_stages = len(plan.stages) if plan.root is plan else 0
        self.num_bytes = _PLAN_BYTES + _STAGE_BYTES * num_stages + self.sampler.num_bytes
        exclusions = (exclusion for laid in self.sampler.laid for _, exclusion in laid.exclusions)
        self.shared: tuple[ShardList | Windows | StageLog | Exclusion | InUse, ...] = (
            opened,
            windows,
            plan.log,
            *exclusions,
            *self._tables,
        )

    def _blocks(self, num_windows: int) -> Blocks:
        """Return where the blocks of its order lie, of so many windows."""
        rows = self.sampler.rows
        assert rows.shard_row is not None  # of windows
        shard_row = rows.shard_row.astype(np.int64)
        first = shard_row[:-1] - rows.first_row.astype(np.int64)[self.source_of_shard]
        assert self.plan.stride is not None
        return Blocks(num_windows, self.plan.stride, self.plan.seq_len + 1, first, np.diff(shard_row))

    def has_changed_tables(self, *, since_seconds: float = 0.0) -> bool:
        """Tell whether a table that its rows follow from was written since it was mapped.

        A look takes up to 0.1 ms a table. A response looks after its rows were located; who looks before that
        may rely on a look of some time ago, and whatever was found stays.
        """
        if self._tables and not self._is_changed and time.monotonic() - self._looked_at >= since_seconds:
            self._is_changed = any(table.is_changed() for table in self._tables)
            self._looked_at = time.monotonic()
        return self._is_changed

    def source_of(self, step: int) -> Source:
        """Return whose tokens a training step holds."""
        number = self.sampler.timeline.stage_of(step).number
        if (found := self._sources.get(number)) is None:
            if len(self._sources) >= MAX_STAGES:
                self._sources.clear()
            shares = self.plan.stages[number].mixture
            found = self._sources[number] = Source.of(self.root_id, shares)
        return found

    def in_corpus(self, shard: int, start: int) -> tuple[Corpus, int]:
        """Return the corpus that a shard belongs to, and the corpus-wide number of a token of it."""
        first = int(self.source_of_shard.searchsorted(self.source_of_shard[shard]))
        corpus = self.corpora[self.shards[shard][0]].base
        return corpus, corpus.starts[shard - first] + start

    @property
    def masks(self) -> MaskGatherer:
        """Rows to their loss masks, as `gatherer` gives their tokens."""
        return self._opened.masks

    def read_ahead(self, locations: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> None:
        """Start to read windows of so many tokens from disk, with their loss masks; see `Gatherer`."""
        self.gatherer.read_ahead(locations, lengths)
        if self.has_masks:
            self.masks.read_ahead(locations, lengths)

    def pieces(self, step: int, places: range, *, count: int = 1, world_size: int = 1) -> Pieces:
        """Return what rows of the global batch are made of, see `Sampler.pieces`, as long as they are.

        The unused end of a row is the end-of-text token of its corpus.
        """
        found = self.sampler.pieces(step, places, count=count, world_size=world_size)
        if not self.plan.rows.fills_ends:
            return found
        eots = self._opened.eots[found.places[found.borders[:-1], 0]]
        fillers = np.flatnonzero(found.places[:, 0] == NO_SHARD)
        found.places[fillers, 1] = eots[found.borders.searchsorted(fillers, side="right") - 1]
        return found.without_empty().ended(self.sampler.seq_len(step) + 1, eots)
