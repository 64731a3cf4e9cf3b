"""Rows `documents`: each joins whole documents, as far as they fit, packed anew in each epoch.

A document of L tokens has L - 1 predictions. It is cut every `seq_len` of them; a piece of p predictions has
p + 1 tokens, so neighbouring pieces share one, as windows do. All pieces but a document's last fill a row
each. The lengths alone decide how the last pieces are packed into rows (`packing/`); which piece of its
length comes to which place is a keyed permutation of the epoch. The unused end of a row is end-of-text.

    lengths, seq_len 8     A 12 tokens, B 4, C 3, D 7
    pieces                 A 0-8, A 8-11, B, C, D
    rows of 9              A 0-8  |  D . .  |  A 8-11, B .  |  C . . . . . .
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import NO_SHARD, Int64Array, Pieces, UInt64Array, expanded
from corpus_server.plan.dealing import MAX_DEALT_ROWS
from corpus_server.plan.declared import Schema, declared, integer, texts, true_or_false
from corpus_server.plan.exclusion import Beside, Exclusion, Replacing
from corpus_server.plan.mixture import grouped
from corpus_server.plan.numbers import Epochs, RowNumbers, SourceNumbers, UnitNumbers
from corpus_server.plan.packing import Kind, Packing, Table, build
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows.rows import Rows, Sources
from corpus_server.plan.stage import Stage
from corpus_server.plan.tables import Job, Lengths
from corpus_server.work import Budget

MAX_BLOCK_DOCUMENTS: Final = 2**24
DEFAULT_BLOCK_DOCUMENTS: Final = 2**18
"""Rows of 32k tokens are full to 99.9 %; a block is built in 0.1 s."""

_LEAST_BEGUN: Final = 2

_RULE: Final = 1
"""Version of the rule that packs; another one would make other tables, and other rows."""


class DocumentRows(Rows):
    """Rows that join whole documents, packed by a table for each source; their units are pieces."""

    name = "documents"
    sentence = "each row joins whole documents as far as they fit, packed anew in each epoch"
    has_table = True
    digests_field = "lengths"
    unit = "piece"
    holds_several = True
    fills_ends = True
    own_lengths = True
    is_permuted = True
    most_places = 256

    block_documents: int = declared(
        integer(1, MAX_BLOCK_DOCUMENTS),
        f"Consecutive documents that are packed together; default {DEFAULT_BLOCK_DOCUMENTS}.",
        default=DEFAULT_BLOCK_DOCUMENTS,
    )
    balance_ranks: bool = declared(
        true_or_false(),
        "Whether the rows of a step are dealt to ranks so that attention within documents costs each about "
        "the same; default false.",
        omit=True,
        default=False,
    )
    begin: bool = declared(
        true_or_false(), "Whether each row begins with a document; default false.", omit=True, default=False
    )
    lengths: Mapping[str, str] = declared(
        texts("an object of strings"),
        "Digests of the documents' lengths by corpus; the server fills them in.",
        omit=True,
        default_factory=dict,
    )

    def __str__(self) -> str:
        return f"{self.name} {self.block_documents}"

    @classmethod
    def inline_fields(cls) -> dict[str, Schema]:
        """Return the schemas of the query parameters that spell its fields."""
        return {"block_documents": cls.properties()["block_documents"]}

    def check(self, *, seq_len: int, stride: int | None, stages: Sequence[Stage]) -> None:
        """See `Rows.check`."""
        if stride not in (None, seq_len):
            accepted = f"left out or seq_len ({seq_len}) with rows documents, which have no windows"
            raise InvalidPlan.expected("stride", accepted, stride)
        lengths = [("seq_len", seq_len)]
        lengths += [(f"stages[{k}].seq_len", each.seq_len or seq_len) for k, each in enumerate(stages)]
        for what, length in lengths if self.begin else ():
            if length < _LEAST_BEGUN:
                accepted = f"at least {_LEAST_BEGUN} where each row begins with a document"
                raise InvalidPlan.expected(what, accepted, length)
        for number, stage in enumerate(stages):
            if self.balance_ranks and stage.global_batch_size > MAX_DEALT_ROWS:
                what = f"stages[{number}].global_batch_size"
                accepted = f"at most {MAX_DEALT_ROWS} with balance_ranks, which deals the rows of each step"
                raise InvalidPlan.expected(what, accepted, stage.global_batch_size)

    def over(self, sources: Sources) -> Self:
        """See `Rows.over`."""
        rows = super().over(sources)
        for name, packing in zip(sources.names, rows._packings, strict=True):
            if not packing.num_rows:
                raise InvalidPlan(
                    f"corpus {name!r} has no document of two tokens, and rows documents need one",
                    parameter="rows",
                )
        firsts = [name for name, each in zip(sources.names, rows._packings, strict=True) if each.eot_first]
        if 0 < len(firsts) < len(sources.names):
            raise InvalidPlan(
                f"rows documents: the documents of {', '.join(firsts)} begin with end-of-text, those of the "
                "other corpora end with it, and a batch has one rule that tells documents apart",
                parameter="rows",
                remedy="write the corpora anew by one of the two, with corpus-server build",
            )
        return rows

    @cached_property
    def _packings(self) -> list[Packing]:
        tables: Sequence[Any] = self.sources.tables
        keys = self.sources.keys(self.name)
        return [Packing(table, key=int(key)) for table, key in zip(tables, keys, strict=True)]

    @cached_property
    def num_rows(self) -> UInt64Array:
        """See `Rows.num_rows`."""
        return np.array([packing.num_rows for packing in self._packings], dtype=np.uint64)

    @cached_property
    def first_row(self) -> UInt64Array:
        """See `Rows.first_row`."""
        return _bounds(self.num_rows)

    @cached_property
    def first_unit(self) -> UInt64Array:
        """See `Rows.first_unit`."""
        return _bounds(np.array([packing.num_pieces for packing in self._packings], dtype=np.uint64))

    @cached_property
    def pools(self) -> UInt64Array:
        """See `Rows.pools`: the classes of the tables."""
        if len(self._packings) == 1:
            return self._packings[0].class_first  # which all plans of this source share
        firsts = zip(self._packings, self.first_unit, strict=False)
        classes = [packing.class_first[:-1] + first for packing, first in firsts]
        return np.concatenate([*classes, self.first_unit[-1:]])

    @cached_property
    def shard_row(self) -> UInt64Array:
        """See `Rows.shard_row`; blocks, and so rows, end with their shards."""
        windows, parts = self.sources.windows, []
        for source, (packing, first_row) in enumerate(zip(self._packings, self.first_row, strict=False)):
            shards = slice(*windows.first_shard[source : source + 2])
            begins = (windows.shard_token[shards] - windows.first_token[source]).astype(np.int64)
            table = packing.table
            blocks = table.block_token[:-1].searchsorted(begins)
            parts.append(first_row + table.pattern_row[table.block_pattern[blocks]])
        return np.concatenate([*parts, self.first_row[-1:]])

    def pieces(
        self, sources: SourceNumbers, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None = None
    ) -> Pieces:
        """See `Rows.pieces`."""
        if isinstance(sources, int):
            return self._of_source(sources, rows, epochs, exclusion)
        which = list(grouped(sources))
        if len(which) == 1:
            return self._of_source(which[0][0], rows, epochs, exclusion)
        parts = [self._of_source(source, rows[here], epochs[here], exclusion) for source, here in which]
        counts = np.empty(rows.size, dtype=np.int64)
        for (_, here), (_, borders) in zip(which, parts, strict=True):
            counts[here] = np.diff(borders)
        every = np.concatenate(([0], counts.cumsum()))
        pieces = np.empty((int(every[-1]), 3), dtype=np.int64)
        for (_, here), (its, borders) in zip(which, parts, strict=True):
            pieces[expanded(every[here], np.diff(borders))[1]] = its
        return Pieces(pieces, every)

    def _of_source(
        self, source: int, rows: RowNumbers, epochs: Epochs, exclusion: Replacing | None
    ) -> Pieces:
        packing, first = self._packings[source], self.first_unit[source]
        slots, borders = packing.slots(rows - self.first_row[source], epochs)
        epochs, classes = np.repeat(epochs, np.diff(borders)), packing.classes(slots)
        numbers = packing.pieces_at(slots, epochs, classes)
        empty = None
        if exclusion is not None:
            numbers = exclusion.substitute(numbers + first, epochs)
            empty = exclusion.contains(numbers)
            numbers -= first
        starts, counts = packing.tokens(numbers, classes)
        windows = self.sources.windows
        shards, within = windows.in_shards(starts.astype(np.uint64) + windows.first_token[source])
        if empty is not None:
            counts = np.where(empty, 0, counts)
        places = np.stack((shards, within, counts)).T
        if packing.is_plain:
            return Pieces(places, borders)
        before, after = self._set_apart(packing, numbers, classes, counts, borders)
        return _with_fillers(Pieces(places, borders), before, after)

    def _set_apart(
        self,
        packing: Packing,
        pieces: UnitNumbers,
        classes: Int64Array,
        counts: Int64Array,
        borders: Int64Array,
    ) -> tuple[Int64Array, Int64Array]:
        """Return how many end-of-text tokens come before and after each piece, `(p,)` each.

        A document that lacks end-of-text at its end is followed by it. Where documents begin with it, two
        of them come before a piece that continues one, unless it is the first of its row. A piece that
        neither begins nor ends a document is at the end of its row.
        """
        kinds, is_there = packing.kinds(classes), counts > 0
        row, earlier = np.repeat(np.arange(borders.size - 1), np.diff(borders)), is_there.cumsum() - is_there
        is_later = is_there & (earlier > earlier[borders[:-1]][row])
        is_inner = is_there & (kinds == Kind.BODY) & packing.begin
        before = 2 * (is_later & (kinds == Kind.TAIL) & packing.eot_first)
        after = (is_there & packing.lack_end(pieces, classes)).astype(np.int64)
        used = np.bincount(row, weights=counts + before + after, minlength=borders.size - 1).astype(np.int64)
        before = np.where(is_inner, packing.seq_len + 1 - used[row], before)
        return before, after

    def costs(self, sources: SourceNumbers, rows: RowNumbers) -> NDArray[np.int64]:
        """See `Rows.costs`."""
        if isinstance(sources, int):
            return self._packings[sources].costs(rows - self.first_row[sources])
        found = np.empty(rows.size, dtype=np.int64)
        for source, here in grouped(sources):
            found[here] = self._packings[source].costs(rows[here] - self.first_row[source])
        return found

    def holders(self, source: int, units: UnitNumbers, epochs: Epochs) -> RowNumbers:
        """See `Rows.holders`."""
        packing = self._packings[source]
        slots = packing.slots_of(units - self.first_unit[source], epochs)
        rows: UInt64Array = packing.rows_of(slots) + self.first_row[source]
        return rows

    def within(self, source: int, ranges: Ranges, budget: Budget) -> UInt64Array:
        """See `Rows.within`."""
        starts, stops = ranges.bounds.astype(np.int64).T
        units: UInt64Array = self._packings[source].held(starts, stops) + self.first_unit[source]
        return units

    def tokens_of(self, source: int, units: UnitNumbers) -> tuple[Int64Array, Int64Array]:
        """See `Rows.tokens_of`."""
        starts, counts = self._packings[source].tokens(units - self.first_unit[source])
        return starts, starts + counts

    def exclusion(self, units: Ranges, beside: Beside | None) -> Exclusion:
        """See `Rows.exclusion`: a class lies within a block, so a substitute is near without groups."""
        return super().exclusion(units, None)

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`: of their blocks."""
        source = int(self.first_row.searchsorted(np.uint64(start), side="right")) - 1
        first = int(self.first_row[source])
        bounds = np.array(self._packings[source].extent(start - first, stop - first), dtype=np.int64)
        windows = self.sources.windows
        shards, begins = windows.in_shards(bounds[:, 0].astype(np.uint64) + windows.first_token[source])
        ends = begins + np.diff(bounds)[:, 0]
        return list(zip(shards.tolist(), begins.tolist(), ends.tolist(), strict=True))

    def reach(self, source: int, num_rows: int) -> int:
        """See `Rows.reach`: of their blocks, which are read as a whole."""
        packing = self._packings[source]
        total = self.sources.windows.num_tokens(source)
        every = len(packing.table.block_document) - 1
        num_blocks = min(every, -(-num_rows * every // packing.num_rows) + 1)
        return -(-total * num_blocks // every)

    @property
    def num_bytes(self) -> int:
        """See `Rows.num_bytes`."""
        return self.pools.nbytes if len(self._packings) > 1 else 0

    @property
    def row_pieces(self) -> int:
        """See `Rows.row_pieces`."""
        return max(-(-each.num_pieces // each.num_rows) for each in self._packings)

    def describe(self, source: int) -> dict[str, Any]:
        """See `Rows.describe`."""
        packing = self._packings[source]
        total, used = packing.table.num_predictions.tolist()
        described = {"num_pieces": packing.num_pieces}
        if self.begin:
            described["left_out"] = 1 - used / total
        if packing.eot_first:  # where the first token of the next document ends one
            described["fill"] = used / (packing.num_rows * packing.seq_len)
        else:
            described["fill"] = (used + packing.num_pieces) / (packing.num_rows * (packing.seq_len + 1))
        return described

    def digest_of(self, lengths: Lengths) -> str:
        """See `Named.digest_of`."""
        return lengths.digest_with_ends

    def jobs(
        self, lengths: Mapping[str, Lengths], *, seq_len: int, seed: int, decides: Mapping[str, Any]
    ) -> list[Job]:
        """See `Named.jobs`: a table for each source, which all plans of these lengths share."""
        shape: dict[str, Any] = {"seq_len": seq_len, "block_documents": self.block_documents}
        if self.begin:
            shape["begin"] = True
        return [
            Job(
                Table,
                {"rule": _RULE, "lengths": its.digest_with_ends, "content": its.content, **shape},
                partial(getattr, its, "num_documents"),
                partial(_build, its, shape),
                ends=(name,),
            )
            for name, its in lengths.items()
        ]


def _build(lengths: Lengths, shape: Mapping[str, Any], run: Callable[..., Iterable[Any]] = map) -> Table:
    starts, counts = lengths.sequences()
    return build(
        starts,
        counts,
        np.array(lengths.shard_ends, dtype=np.int64),
        eot_first=lengths.eot_first,
        open_documents=lengths.open_documents,
        run=run,
        **shape,
    )


def _with_fillers(rows: Pieces, before: Int64Array, after: Int64Array) -> Pieces:
    """Return rows with pieces of `NO_SHARD` of so many tokens before and after each piece."""
    triples = np.zeros((len(rows.places), 3, 3), dtype=np.int64)
    triples[:, ::2, 0] = NO_SHARD
    triples[:, 0, 2], triples[:, 1], triples[:, 2, 2] = before, rows.places, after
    kept = np.stack((before > 0, np.ones_like(before, dtype=bool), after > 0), axis=1).reshape(-1)
    places = triples.reshape(-1, 3).compress(kept, axis=0)
    return Pieces(places, np.concatenate(([0], kept.cumsum()))[3 * rows.borders])


def _bounds(counts: NDArray[Any]) -> UInt64Array:
    return np.concatenate(([0], counts.cumsum())).astype(np.uint64)
