"""The rows of one source whose documents are packed: which pieces a row holds, and back again.

Rows, slots and pieces are numbered through the source. A row has the same slots in every epoch. The pieces of
a class are dealt to the slots of that class by a keyed permutation, another one in each epoch:

    row  ->  pattern, number in it  ->  slots  ->  class, place  ->  pieces  ->  document, cut  ->  tokens
         <-  (sort, search)         <-         <-  (inverse)     <-
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from corpus_server.pieces import expanded
from corpus_server.plan.mixture import grouped
from corpus_server.plan.numbers import Epochs, Int64Array, RowNumbers, UInt64Array, UnitNumbers
from corpus_server.plan.packing.lists import Lists, NarrowArray, at_or_below, bisect
from corpus_server.plan.packing.table import GROUP, Table
from corpus_server.plan.permutation import Grid, invert, mix64, permute, round_keys, uniform

_GROUP = np.arange(GROUP + 1)[:, None]

_LONG_RANGE = 4
"""Documents for each class of a block, above which looking at classes takes less time than at documents."""

_AT_ONCE = 1 << 15
"""Documents whose neighbours are counted at once, in 8 MiB."""


class Packing:
    """The packed rows of one source.

    Pieces are numbered block after block, class after class, and within a class by (document, cut). Cut k of
    a document holds its tokens [k * seq_len, (k + 1) * seq_len], both included, as far as it has them.

    Args:
        table: from `build`.
        seq_len: that the table was built for.
        key: from `stream_key("documents", seed, source)`.

    Attributes:
        num_rows, num_pieces, num_classes: of the source; there are as many slots as pieces.
        num_bytes: memory of the table.
        class_first: `(num_classes + 1,) uint64`, first piece of each class, which is also its first slot.
    """

    def __init__(self, table: Table, *, seq_len: int, key: int) -> None:
        self.table, self.seq_len, self.key = table, seq_len, key
        self.class_first = table.class_first
        self.num_rows, self.num_pieces = int(table.pattern_row[-1]), int(table.class_first[-1])
        self.num_classes = table.class_longest.size
        self.num_bytes = sum(array.nbytes for array in table)
        self._tails = Lists(table.tail_low, table.tail_first, table.tail_splits)
        self._slots = Lists(table.slot_low, table.pattern_entry, table.slot_splits)
        self._turn_key = int(mix64(np.array([key], dtype=np.uint64))[0])

    def slots(self, rows: RowNumbers, epochs: Epochs) -> tuple[UInt64Array, Int64Array]:
        """Return the slots of rows, each row's in the order of its tokens.

        A row's longest piece comes first but for a rotation, another one in each epoch.

        Args:
            rows: `(k,)`.
            epochs: `(k,)` or `(1,)`; of this source.

        Returns:
            `(p,) uint64` slots, and `(k + 1,) int64`: the first one of each row; then p.
        """
        table = self.table
        patterns = at_or_below(table.pattern_row, rows)
        counts = self._slots.sizes(patterns)
        borders = np.append(0, counts.cumsum())
        turns = uniform(self._turn_key, epochs * np.uint64(self.num_rows) + rows, counts.astype(np.uint64))
        row = np.repeat(np.arange(rows.size), counts)
        places = np.arange(borders[-1]) - (borders[:-1] - turns.astype(np.int64))[row]
        sizes = counts[row]
        places -= np.where(places >= sizes, sizes, 0)
        blocks = table.block_pattern.searchsorted(patterns, side="right") - 1
        first = table.class_first[table.block_class[blocks]] + (rows - table.pattern_row[patterns])
        slots = self._slots.at(patterns[row], sizes - 1 - places)  # a longer piece has a higher slot
        return first[row] + slots.astype(np.uint64), borders

    def costs(self, rows: RowNumbers) -> Int64Array:
        """Return what attention within documents costs for rows: the sum of squares of their slots' room.

        Args:
            rows: `(k,)`.

        Returns:
            `(k,) int64`, of tokens squared; the same in every epoch.
        """
        patterns = at_or_below(self.table.pattern_row, rows)
        new = np.unique(patterns[self._pattern_costs[patterns] == 0])
        if new.size:
            slots, borders = self.slots(self.table.pattern_row[new], np.zeros(1, np.uint64))
            tokens = self.table.class_longest[self.classes(slots)].astype(np.int64) + 1
            self._pattern_costs[new] = np.add.reduceat(tokens * tokens, borders[:-1])
        return self._pattern_costs[patterns]

    @cached_property
    def _pattern_costs(self) -> Int64Array:
        """The cost of a row of each pattern, 0 until it is needed; threads may find the same ones at once."""
        return np.zeros(self.table.pattern_row.size - 1, dtype=np.int64)

    def classes(self, slots: UInt64Array) -> Int64Array:
        """Return the classes of slots or pieces: `(p,) int64`. A slot holds pieces of its own class."""
        return at_or_below(self.class_first, slots)

    def pieces_at(self, slots: UInt64Array, epochs: Epochs, classes: Int64Array | None = None) -> UnitNumbers:
        """Return the pieces that slots hold: `(p,) uint64`; epochs are `(p,)` or `(1,)`.

        Args:
            classes: of the slots, if they are known; to find them takes a fifth of the time of all.
        """
        first, sizes, keys = self._domains(slots, epochs, classes)
        return first + permute(slots - first, sizes, keys)

    def slots_of(self, pieces: UnitNumbers, epochs: Epochs) -> UInt64Array:
        """Return the slots that hold pieces: the inverse of `pieces_at`."""
        first, sizes, keys = self._domains(pieces, epochs)
        return first + invert(pieces - first, sizes, keys)

    def rows_of(self, slots: UInt64Array) -> RowNumbers:
        """Return the row that each slot belongs to: `(p,) uint64`.

        Sorts the entries of each block that a slot lies in: 0.4 ms at a `seq_len` of 2k, 14 ms at 128k. To
        keep them sorted would take 1.6 bytes a document at 128k.
        """
        table = self.table
        rows = np.empty_like(slots)
        blocks = table.block_class.searchsorted(self.classes(slots), side="right") - 1
        for block, here in grouped(blocks):
            patterns = np.arange(*table.block_pattern[block : block + 2])
            which, at = expanded(np.zeros_like(patterns), self._slots.sizes(patterns))
            first = self._slots.at(patterns[which], at)
            order = first.argsort()
            places = (slots[here] - table.class_first[table.block_class[block]]).astype(np.int64)
            entries = order[first[order].searchsorted(places, side="right") - 1]
            numbers = (places - first[entries]).astype(np.uint64)
            rows[here] = table.pattern_row[patterns[which[entries]]] + numbers
        return rows

    def tokens(self, pieces: UnitNumbers, classes: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Return the first token of each piece in the source, and its tokens: `(p,) int64` each.

        Args:
            classes: of the pieces, if they are known.
        """
        documents, cuts, blocks = self._cuts(pieces, classes)
        starts, lengths = self._extents(documents, blocks)
        before = np.where(cuts < 0, (lengths - 1) // self.seq_len, cuts) * self.seq_len
        return starts + before, np.minimum(lengths - before, self.seq_len + 1)

    def documents(self, pieces: UnitNumbers) -> Int64Array:
        """Return the number of each piece's document in the source: `(p,) int64`."""
        return self._cuts(pieces)[0]

    def touching(self, start: Int64Array | int, stop: Int64Array | int) -> UnitNumbers:
        """Return the pieces that hold a token of [start, stop): `(m,) uint64`, ascending, each once.

        Args:
            start, stop: of the source, or `(k,)` of several ranges, of which each piece may touch any.
        """
        starts, stops = np.atleast_1d(np.asarray(start, np.int64)), np.atleast_1d(np.asarray(stop, np.int64))
        inside = np.flatnonzero(starts < stops)
        starts, stops = starts[inside], stops[inside]
        low, high = self._document_at(starts), self._document_at(stops - 1) + 1
        high = np.minimum(high, self.table.block_document[-1])
        which, documents = expanded(low, np.maximum(high - low, 0))
        blocks = self._block_of(documents)
        begin, lengths = self._extents(documents, blocks)
        first = np.maximum(starts[which] - begin, 0)
        last = np.minimum(stops[which] - begin, lengths) - 1
        cuts = np.maximum((first - 1) // self.seq_len, 0)  # neighbours share a token, which both hold
        most = (np.maximum(lengths - 1, 0) - 1) // self.seq_len
        counts = np.maximum(np.minimum(last // self.seq_len, most) - cuts + 1, 0)
        which, cuts = expanded(cuts, counts)
        return np.unique(self._pieces(documents[which], cuts, blocks[which]))

    def held(self, starts: Int64Array, stops: Int64Array) -> UInt64Array:
        """Return the pieces that hold a token of some ranges: `(m, 2) uint64`, half-open ranges of pieces.

        Takes time and memory for each class of a block that a range begins or ends in, or for each document
        of the range if those are fewer.

        Args:
            starts, stops: `(k,)`, ascending, none empty.
        """
        table = self.table
        if not self.num_pieces:
            return np.empty((0, 2), dtype=np.uint64)
        # Documents that lie in a range as a whole; the others are at its ends.
        low = self._document_at(starts)
        inside = low + (self._document_starts(low) < starts)
        beyond = self._document_at(stops - 1)
        blocks = self._block_of(np.minimum(inside, table.block_document[-1] - 1))
        num_classes = table.block_class[blocks + 1] - table.block_class[blocks]
        long = np.flatnonzero(beyond - inside > _LONG_RANGE * num_classes)
        short = np.ones(starts.size, dtype=bool)
        short[long] = False
        ends = [(starts[short], stops[short])]
        ends.append((starts[long], self._document_starts(inside[long])))
        ends.append((self._document_starts(beyond[long]), stops[long]))
        single = self.touching(*(np.concatenate(each) for each in zip(*ends, strict=True)))
        found = [np.stack((single, single + np.uint64(1)), axis=1)]
        for first, stop in zip(inside[long].tolist(), beyond[long].tolist(), strict=True):
            found += self._held_by(first, stop)
        return np.concatenate(found)

    def _held_by(self, first: int, stop: int) -> list[UInt64Array]:
        """Return the pieces of documents [first, stop), at least one, as ranges of pieces."""
        table, found = self.table, []
        low, high = self._block_of(np.array([first, stop - 1])).tolist()
        if high - low > 1:  # all pieces of the blocks between
            found.append(table.class_first[table.block_class[[low + 1, high]]][None])
        for block in sorted({low, high}):
            document = int(table.block_document[block])
            bounds = np.clip([first, stop], document, table.block_document[block + 1])
            classes = np.arange(*table.block_class[block : block + 2])
            is_full = table.class_longest[classes] == self.seq_len
            places = np.empty((classes.size, 2), dtype=np.int64)
            of_block = np.full(2, block)
            places[is_full] = self._full_before(bounds, of_block)
            tails = classes[~is_full]
            for column, bound in enumerate((bounds - document).tolist()):
                places[~is_full, column] = self._tails.places(tails, np.full_like(tails, bound))
            found.append(self.class_first[classes][:, None] + places.astype(np.uint64))
        return found

    def _document_starts(self, documents: Int64Array) -> Int64Array:
        """Return the first token of documents; of their number the end of the last one."""
        blocks = self._block_of(np.minimum(documents, self.table.block_document[-1] - 1))
        starts: Int64Array = self.table.block_token[blocks] + self.table.document_token[documents + blocks]
        return starts

    def extent(self, row_start: int, row_stop: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens of the blocks that hold rows [row_start, row_stop), at least one."""
        table = self.table
        patterns = table.pattern_row.searchsorted(
            np.array([row_start, row_stop - 1], np.uint64), side="right"
        )
        low, high = (table.block_pattern.searchsorted(patterns - 1, side="right") - 1).tolist()
        found = []
        for block in range(low, high + 1):
            end = int(table.block_document[block + 1]) + block
            start = int(table.block_token[block])
            found.append((start, start + int(table.document_token[end])))
        return found

    def _domains(
        self, pieces: UnitNumbers, epochs: Epochs, classes: Int64Array | None = None
    ) -> tuple[UInt64Array, Grid, UInt64Array]:
        """Return each piece's class: its first piece, its grid, and the round keys of the epoch."""
        if classes is None:
            classes = self.classes(pieces)
        first = self.class_first[classes]
        numbers = epochs * np.uint64(self.num_classes) + classes.astype(np.uint64)
        return first, Grid.over(self.class_first[classes + 1] - first), round_keys(self.key, numbers)

    def _cuts(
        self, pieces: UnitNumbers, classes: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return of each piece its document, its number in the document or -1 for the last, and the block."""
        table = self.table
        if classes is None:
            classes = self.classes(pieces)
        blocks = table.block_class.searchsorted(classes, side="right") - 1
        places = (pieces - self.class_first[classes]).astype(np.int64)
        documents, cuts = np.empty_like(places), np.full_like(places, -1)
        is_full = table.class_longest[classes] == self.seq_len
        full, tails = np.flatnonzero(is_full), np.flatnonzero(~is_full)
        its = blocks[tails]
        documents[tails] = self._tails.at(classes[tails], places[tails]) + table.block_document[its]
        documents[full], cuts[full] = self._nth_full(places[full], blocks[full])
        return documents, cuts, blocks

    def _pieces(self, documents: Int64Array, cuts: Int64Array, blocks: Int64Array) -> UnitNumbers:
        """Return the pieces that are these cuts of documents: the inverse of `_cuts`."""
        table = self.table
        predictions = self._extents(documents, blocks)[1] - 1 - cuts * self.seq_len
        classes = table.block_class[blocks + 1] - 1  # that of full pieces is the last one
        places = np.empty_like(cuts)
        is_full = predictions >= self.seq_len
        full, tails = np.flatnonzero(is_full), np.flatnonzero(~is_full)
        low, high = table.block_class[blocks[tails]], table.block_class[blocks[tails] + 1]
        wanted = predictions[tails]
        classes[tails] = bisect(lambda at, k: table.class_longest[at] < wanted[k], low, high)
        its = documents[tails] - table.block_document[blocks[tails]]
        places[tails] = self._tails.places(classes[tails], its)
        places[full] = self._full_before(documents[full], blocks[full]) + cuts[full]
        return self.class_first[classes] + places.astype(np.uint64)

    def _extents(self, documents: Int64Array, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return first token and tokens of documents."""
        at = documents + blocks  # each block has one entry more than documents
        begin = self.table.document_token[at].astype(np.int64)
        return self.table.block_token[blocks] + begin, self.table.document_token[at + 1] - begin

    def _block_of(self, documents: Int64Array) -> Int64Array:
        return self.table.block_document.searchsorted(documents, side="right") - 1

    def _document_at(self, tokens: Int64Array) -> Int64Array:
        """Return the first document that ends after each token; the number of documents if none does."""
        table = self.table
        blocks = np.maximum(table.block_token[:-1].searchsorted(tokens, side="right") - 1, 0)
        if not table.document_token.size:
            return np.zeros_like(tokens)
        places = tokens - table.block_token[blocks]
        low, high = table.block_document[blocks], table.block_document[blocks + 1]
        shifted = blocks + 1
        return bisect(lambda at, k: table.document_token[at + shifted[k]] <= places[k], low, high)

    def _nth_full(self, places: Int64Array, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return document and cut of the full pieces that have these places among those of their block."""
        table = self.table
        documents, cuts = np.empty_like(places), np.empty_like(places)
        for some in _slices(places.size):
            its = blocks[some]
            numbers = table.full_before[table.block_group[its]] + places[some]
            groups = at_or_below(table.full_before, numbers)
            left = numbers - table.full_before[groups]
            counts = self._full_of(groups, its)
            before = counts.cumsum(axis=0, dtype=counts.dtype)
            within = (before <= left.astype(counts.dtype)).sum(axis=0)
            documents[some] = table.block_document[its] + (groups - table.block_group[its]) * GROUP + within
            cuts[some] = left - np.where(within, before[within - 1, np.arange(within.size)], 0)
        return documents, cuts

    def _full_before(self, documents: Int64Array, blocks: Int64Array) -> Int64Array:
        """Return how many full pieces the documents of its block before each document have."""
        table = self.table
        found = np.empty_like(documents)
        for some in _slices(documents.size):
            its = blocks[some]
            groups, within = np.divmod(documents[some] - table.block_document[its], GROUP)
            groups += table.block_group[its]
            counted = _GROUP[:-1] < within
            found[some] = self._full_of(groups, its).sum(axis=0, where=counted)
            found[some] += (
                table.full_before[groups].astype(np.int64) - table.full_before[table.block_group[its]]
            )
        return found

    def _full_of(self, groups: Int64Array, blocks: Int64Array) -> NarrowArray:
        """Return the full pieces of each document of groups: `(GROUP, k)`."""
        table = self.table
        first = table.block_document[blocks] + (groups - table.block_group[blocks]) * GROUP + blocks
        at = first + _GROUP
        np.minimum(at, table.block_document[blocks + 1] + blocks, out=at)
        counts: NarrowArray = np.diff(table.document_token.take(at), axis=0)
        np.maximum(counts, 1, out=counts)
        counts -= 1
        counts //= self.seq_len
        return counts


def _slices(number: int) -> list[slice]:
    return [slice(start, start + _AT_ONCE) for start in range(0, number, _AT_ONCE)]
