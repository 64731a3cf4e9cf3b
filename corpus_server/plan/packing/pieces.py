"""The pieces that documents are cut into, and back again: which document a piece is of, and its tokens.

piece  ->  class, place in it  ->  document, cut  ->  tokens
       <-  (search)            <-
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array, UInt64Array, at_or_below, expanded
from corpus_server.plan.numbers import UnitNumbers
from corpus_server.plan.packing.lists import Lists, NarrowArray, bisect
from corpus_server.plan.packing.table import GROUP, Cuts, Table, cuts_of, num_predictions

_GROUP = np.arange(GROUP + 1)[:, None]

_LONG_RANGE = 4
"""Documents for each class of a block, above which looking at classes takes less time than at documents."""

_AT_ONCE = 1 << 15
"""Documents whose neighbours are counted at once, in 8 MiB."""


class CutDocuments:
    """The documents of one source, cut into pieces.

    Pieces are numbered block after block, class after class, and within a class by (document, cut). Without
    `begin`, cut k of a document holds its tokens [k * seq_len, (k + 1) * seq_len], both included, as far as
    it has them; see `cuts_of`.

    Args:
        table: from `build`.

    Attributes:
        num_pieces, num_classes: of the source.
        begin, eot_first: see `build`.
        is_plain: whether rows are the tokens of their pieces, one after another.
        class_first: `(num_classes + 1,) uint64`, first piece of each class.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.seq_len, begin, eot_first = table.shape.tolist()
        self.begin, self.eot_first = bool(begin), bool(eot_first)
        self.is_plain = not (begin or eot_first or table.open_document.size)
        self.class_first, self.num_pieces = table.class_first, int(table.class_first[-1])
        self.num_classes = table.class_longest.size
        self._tails = Lists(table.tail_low, table.tail_first, table.tail_splits)

    def classes(self, slots: UInt64Array) -> Int64Array:
        """Return the classes of slots or pieces: `(p,) int64`. A slot holds pieces of its own class."""
        return at_or_below(self.class_first, slots)

    def tokens(self, pieces: UnitNumbers, classes: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Return the first token of each piece in the source, and its tokens: `(p,) int64` each.

        Args:
            classes: of the pieces, if they are known.
        """
        documents, cuts, blocks = self._cuts(pieces, classes)
        starts, lengths = self._extents(documents, blocks)
        if self.is_plain:
            before = np.where(cuts < 0, (lengths - 1) // self.seq_len, cuts) * self.seq_len
            return starts + before, np.minimum(lengths - before, self.seq_len + 1)
        its = self._cuts_of(documents, lengths)
        cuts = np.where(cuts < 0, its.counts - 1, cuts)
        before, after = its.starts(cuts), its.starts(cuts + 1)
        return starts + before, np.minimum(lengths, after + 1) - before

    def lack_end(self, pieces: UnitNumbers, classes: Int64Array) -> NDArray[np.bool_]:
        """Return which pieces are the ends of documents that lack the end-of-text they should end with."""
        if self.eot_first or not self.table.open_document.size:
            return np.zeros(pieces.shape, dtype=bool)
        documents, cuts, blocks = self._cuts(pieces, classes)
        its = self._cuts_of(documents, self._extents(documents, blocks)[1])
        lack: NDArray[np.bool_] = self._is_open(documents) & ((cuts < 0) | (cuts == its.counts - 1))
        return lack

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
        its = self._cuts_of(documents, lengths)
        cuts = its.at(np.maximum(first - 1, 0))  # neighbours share a token, which both hold
        counts = np.maximum(np.minimum(its.at(np.maximum(last, 0)) + 1, its.counts) - cuts, 0)
        counts[last < 0] = 0  # a range may end before the document begins
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

    def _cuts(
        self, pieces: UnitNumbers, classes: Int64Array | None = None
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return of each piece its document, its number in the document or -1 for the last, and the block."""
        table = self.table
        if classes is None:
            classes = self.classes(pieces)
        blocks = at_or_below(table.block_class, classes)
        places = (pieces - self.class_first[classes]).astype(np.int64)
        documents, cuts = np.empty_like(places), np.full_like(places, -1)
        is_full = table.class_longest[classes] == self.seq_len
        full, tails = np.flatnonzero(is_full), np.flatnonzero(~is_full)
        its = blocks[tails]
        own = self._tails.at(classes[tails], places[tails])
        documents[tails] = own + table.block_document[its]
        if self.begin:
            inner = np.flatnonzero(classes[tails] < table.block_tail[its])
            at = tails[inner]
            cuts[at] = (
                places[at] - self._tails.places(classes[at], own[inner]) + self._first_body(documents[at])
            )
        documents[full], cuts[full] = self._nth_full(places[full], blocks[full])
        return documents, cuts, blocks

    def _pieces(self, documents: Int64Array, cuts: Int64Array, blocks: Int64Array) -> UnitNumbers:
        """Return the pieces that are these cuts of documents: the inverse of `_cuts`; not those in no row."""
        table = self.table
        lengths = self._extents(documents, blocks)[1]
        all_cuts = self._cuts_of(documents, lengths)
        predictions = np.minimum(all_cuts.starts(cuts + 1), all_cuts.predictions) - all_cuts.starts(cuts)
        classes = table.block_class[blocks + 1] - 1  # that of full pieces is the last one
        places = np.empty_like(cuts)
        is_full = predictions >= self.seq_len
        full, tails = np.flatnonzero(is_full), np.flatnonzero(~is_full)
        its, wanted = blocks[tails], predictions[tails]
        is_tail = np.zeros(tails.shape, dtype=bool)
        is_body = np.zeros(tails.shape, dtype=bool)
        if not self.is_plain:
            first_body = self._first_body(documents[tails])
            is_body = (cuts[tails] >= first_body) & (cuts[tails] < all_cuts.counts[tails] - 1) & self.begin
            is_tail = (cuts[tails] >= first_body) & ~is_body & (self.begin or self.eot_first)
        bounds = (table.block_class[its], table.block_tail[its], table.block_whole[its])
        low = np.where(is_body, bounds[0], np.where(is_tail, bounds[1], bounds[2]))
        high = np.where(is_body, bounds[1], np.where(is_tail, bounds[2], table.block_class[its + 1]))
        classes[tails] = bisect(lambda at, k: table.class_longest[at] < wanted[k], low, high)
        own = documents[tails] - table.block_document[its]
        is_held = np.ones(cuts.shape, dtype=bool)
        if self.begin:  # a class may be in no row
            is_held[tails] = classes[tails] < high
            classes[tails] = np.minimum(classes[tails], np.maximum(high - 1, 0))
        places[tails] = self._tails.places(classes[tails], own)
        if self.begin:
            places[tails] += np.where(is_body, cuts[tails] - first_body, 0)
            sizes = self._tails.sizes(classes[tails])
            inside = places[tails] < sizes
            held = self._tails.at(classes[tails][inside], places[tails][inside]) == own[inside]
            inside[inside] = held
            is_held[tails] &= inside
        places[full] = self._full_before(documents[full], blocks[full]) + cuts[full]
        found: UnitNumbers = self.class_first[classes] + places.astype(np.uint64)
        return found[is_held]

    def _is_open(self, documents: Int64Array) -> NDArray[np.bool_]:
        opened = self.table.open_document
        if not opened.size:
            return np.zeros(documents.shape, dtype=bool)
        at = np.minimum(opened.searchsorted(documents), opened.size - 1)
        found: NDArray[np.bool_] = opened[at] == documents
        return found

    def _first_body(self, documents: Int64Array) -> Int64Array:
        """Return the first cut of documents that continues one that began before it."""
        return np.where(self._is_open(documents) & self.eot_first, 0, 1)

    def _cuts_of(self, documents: Int64Array, lengths: Int64Array) -> Cuts:
        is_open = self._is_open(documents)
        predictions = num_predictions(lengths, is_open, eot_first=self.eot_first)
        return cuts_of(predictions, is_open, self.table.shape)

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
            before = counts
            for document in range(1, GROUP):  # a fifth of the time of `cumsum`, which goes down each column
                before[document] += before[document - 1]
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
        if not self.is_plain:
            is_open = self._is_open(at[:-1] - blocks)
            predictions = num_predictions(counts, is_open, eot_first=self.eot_first)
            if self.begin:
                is_headed = (predictions >= self.seq_len) & ~(is_open & self.eot_first)
                headed: Int64Array = is_headed.astype(np.int64)
                return headed
            predictions //= self.seq_len
            return predictions
        np.maximum(counts, 1, out=counts)
        counts -= 1
        counts //= self.seq_len
        return counts


def _slices(number: int) -> list[slice]:
    return [slice(start, start + _AT_ONCE) for start in range(0, number, _AT_ONCE)]
