"""The table of a source: which pieces its rows have room for, made of the lengths of its documents.

    documents          A 10 tokens   B 5          C 8                     seq_len = 8, rows of 9 tokens
    pieces             A0  0 to 8    B0 0 to 4    C0 0 to 7               both included
                       A1  8 to 9
    classes            0: A1 (2)     1: B0 (5)    2: C0 (8)   3: A0 (9)   (tokens)
    patterns           1 row [1, 0]               1 row [2]   1 row [3]

A block is a number of neighbouring documents of a shard. Each block has classes and patterns of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array, expanded
from corpus_server.plan.packing.lists import Lists, NarrowArray, firsts, narrow
from corpus_server.plan.packing.spread import Class, merge, spread, spread_begun

GROUP: Final = 32
"""Documents between two counts of full pieces: the others are counted when they are needed."""

_BEGUN_PART: Final = 16

_NONE: Final = np.zeros(0, dtype=np.int64)


class Table(NamedTuple):
    """The packing of one source: B blocks, C classes, P patterns, all numbered through the source.

    Arrays whose type is not given are uint32, or int64 where a number is 2^32 or more. A pattern has an entry
    for each of its pieces, the shortest first. Slots have the numbers of pieces: those of class c are
    [class_first[c], class_first[c + 1]).

    Attributes:
        block_document: `(B + 1,) int64`, first document of each block; then all documents.
        block_token: `(B + 1,) int64`, first token of each block; then the end of the last document.
        block_class, block_pattern: `(B + 1,) int64`, first class and first pattern of each block; then all.
        block_tail, block_whole: `(B,) int64`, the first class of each block that holds ends of documents, and
            the first one that holds documents from their beginning; see `_Kind`.
        block_group: `(B + 1,) int64`, first of the block's groups of documents; then all.
        document_token: `(documents + B,)`, where each document of a block begins, relative to the block's
            first token, and then where the last one ends.
        full_before: `(groups + 1,)`, pieces of `seq_len` predictions in the groups before each; then all.
        open_document: ascending, the documents that lack end-of-text; see `Lengths`.
        shape: `(3,) int64`: `seq_len`, and 0 or 1 for `begin` and `eot_first`.
        num_predictions: `(2,) int64`: of all documents, and of those pieces that are in rows.
        class_longest: `(C,) int32`, predictions of the longest piece that a slot has room for.
        class_first: `(C + 1,) uint64`.
        tail_low, tail_first, tail_splits: `Lists` by class of the documents, relative to their block, that
            the pieces of fewer than `seq_len` predictions belong to: once for each piece.
        pattern_row: `(P + 1,) uint64`, first row of each pattern; then all rows.
        slot_low, pattern_entry, slot_splits: `Lists` by pattern of its entries: the slots of the first row,
            relative to the block's first slot. The following rows have the following slots.
    """

    block_document: Int64Array
    block_token: Int64Array
    block_class: Int64Array
    block_pattern: Int64Array
    block_tail: Int64Array
    block_whole: Int64Array
    block_group: Int64Array
    document_token: NarrowArray
    full_before: NarrowArray
    open_document: Int64Array
    shape: Int64Array
    num_predictions: Int64Array
    class_longest: NDArray[np.int32]
    class_first: NDArray[np.uint64]
    tail_low: NDArray[np.uint16 | np.uint32]
    tail_first: NarrowArray
    tail_splits: NDArray[np.uint16 | np.uint32]
    pattern_row: NDArray[np.uint64]
    slot_low: NDArray[np.uint16 | np.uint32]
    pattern_entry: NarrowArray
    slot_splits: NDArray[np.uint16 | np.uint32]


class Kind:
    """What pieces of a class are, where rows must tell: each kind has other neighbours in a row.

    Where documents end with end-of-text and rows may begin anywhere, all count as whole.
    """

    BODY: Final = 0  # of a document that began before and goes on: the last piece of its row
    TAIL: Final = 1  # the end of a document that began before
    WHOLE: Final = 2  # a document from its beginning


def room_of(longest: NDArray[Any] | int, kind: NDArray[Any] | int, shape: Int64Array) -> Int64Array:
    """Return the tokens that a row keeps free for pieces of up to so many predictions.

    Where documents end with end-of-text, the tokens of the piece. Where they begin with it, the first token
    of the next piece ends this one; what continues a document is set apart by two end-of-text tokens, unless
    it is alone in its row.
    """
    seq_len, _, eot_first = shape.tolist()
    if not eot_first:
        return np.asarray(longest, dtype=np.int64) + 1
    set_apart = 2 * (np.asarray(kind) != Kind.WHOLE)
    rooms: Int64Array = np.minimum(np.asarray(longest, dtype=np.int64) + set_apart, seq_len)
    return rooms


class _Block(NamedTuple):
    """What a block adds to the table; numbers count from its own start."""

    document_token: NarrowArray
    full_pieces: NarrowArray  # of each group
    num_predictions: Int64Array  # of its documents, and of those in rows
    class_longest: Int64Array
    class_pieces: Int64Array
    first_tail: int  # class
    first_whole: int
    tails: Lists
    pattern_rows: Int64Array
    slots: Lists


class Cuts(NamedTuple):
    """How documents are cut into pieces, `(k,)` each of k documents.

    The first piece has `head` predictions, unless that is 0, and all others have `step`; the last one has
    those that are left.
    """

    predictions: Int64Array
    head: Int64Array
    step: Int64Array

    def starts(self, cuts: Int64Array) -> Int64Array:
        """Return the first token in its document of each cut."""
        is_headed = self.head > 0
        starts: Int64Array = np.where(is_headed & (cuts == 0), 0, self.head + (cuts - is_headed) * self.step)
        return starts

    def at(self, tokens: Int64Array) -> Int64Array:
        """Return the cut that predicts from each token, maybe one beyond the last."""
        return np.where(tokens < self.head, 0, (self.head > 0) + (tokens - self.head) // self.step)

    @property
    def counts(self) -> Int64Array:
        """The pieces of each document."""
        return np.where(self.predictions > 0, self.at(np.maximum(self.predictions - 1, 0)) + 1, 0)


def num_predictions(lengths: NDArray[Any], is_open: NDArray[np.bool_], *, eot_first: bool) -> Int64Array:
    """Return the predictions of documents.

    A document that lacks end-of-text at its end is followed by it: its last token predicts that. So does that
    of each document of more than one token, if documents begin with end-of-text.
    """
    counts: Int64Array = lengths.astype(np.int64)
    if eot_first:
        return np.where((counts == 1) & ~is_open, 0, counts)
    is_followed = is_open & (counts > 0)
    counts = np.maximum(counts - 1, 0)
    counts += is_followed
    return counts


def cuts_of(predictions: Int64Array, is_open: NDArray[np.bool_], shape: Int64Array) -> Cuts:
    """Return how documents of so many predictions are cut.

    Args:
        is_open: whether each lacks end-of-text.
        shape: see `Table`.
    """
    seq_len, begin, eot_first = shape.tolist()
    if not begin:
        return Cuts(predictions, np.zeros_like(predictions), np.full_like(predictions, seq_len))
    # A piece that continues a document leaves a 16th of its row to one that begins there.
    most = max(1, seq_len - max(1, seq_len // _BEGUN_PART))
    head = np.where(is_open & bool(eot_first), 0, seq_len)
    rest = predictions - head
    numbers = np.maximum(-(-rest // most), 1)
    return Cuts(predictions, head, np.maximum(-(-rest // numbers), 1))


def build(
    starts: Int64Array,
    lengths: Int64Array,
    shard_ends: Int64Array,
    *,
    seq_len: int,
    block_documents: int,
    begin: bool = False,
    eot_first: bool = False,
    open_documents: Int64Array = _NONE,
    run: Callable[..., Iterable[_Block]] = map,
) -> Table:
    """Pack the documents of a source.

    Args:
        starts: `(d,)`, first token of each document, ascending. A document of a block begins where the one
            before it ends.
        lengths: `(d,)`, tokens of each.
        shard_ends: `(shards,)`, tokens of the source up to the end of each shard.
        seq_len: predictions of a row.
        block_documents: documents of a block; the last one of a shard may have fewer.
        begin: whether each row begins with a document.
        eot_first, open_documents: see `Lengths`.
        run: packs the blocks: `map`, or what calls in other processes.
    """
    first = block_starts(starts, shard_ends, block_documents)
    parts = [slice(*pair) for pair in pairwise(first.tolist())]
    is_open = np.zeros(starts.size, dtype=bool)
    is_open[open_documents] = True
    shape = np.array([seq_len, begin, eot_first], dtype=np.int64)
    bound = most_pieces = int(np.diff(first).max(initial=0))
    if begin:
        for part in parts:
            predictions = num_predictions(lengths[part], is_open[part], eot_first=eot_first)
            pieces = cuts_of(predictions, is_open[part], shape).counts
            most_pieces = max(most_pieces, int(pieces.sum()))
    pack = partial(_pack, shape=shape, bound=bound, most_pieces=most_pieces)
    packed = run(pack, *([each[part] for part in parts] for each in (starts, lengths, is_open)))
    blocks = [pack(_NONE, _NONE, is_open[:0]), *packed]
    tails = Lists.join([each.tails for each in blocks])
    slots = Lists.join([each.slots for each in blocks])
    longest = np.concatenate([each.class_longest for each in blocks])
    end = starts[-1:] + lengths[-1:]
    block_class = _numbered([each.class_longest.size for each in blocks])
    return Table(
        block_document=first,
        block_token=np.append(starts[first[:-1]], end if end.size else 0),
        block_class=block_class,
        block_pattern=_numbered([each.pattern_rows.size for each in blocks]),
        block_tail=block_class[:-1] + _numbers(each.first_tail for each in blocks[1:]),
        block_whole=block_class[:-1] + _numbers(each.first_whole for each in blocks[1:]),
        block_group=_numbered([each.full_pieces.size for each in blocks]),
        document_token=np.concatenate([each.document_token for each in blocks]),
        full_before=firsts(*(each.full_pieces for each in blocks)),
        open_document=np.array(open_documents, dtype=np.int64),
        shape=shape,
        num_predictions=np.sum([each.num_predictions for each in blocks], axis=0),
        class_longest=longest.astype(np.int32),
        class_first=firsts(*(each.class_pieces for each in blocks)).astype(np.uint64),
        tail_low=tails.low,
        tail_first=tails.first,
        tail_splits=tails.splits,
        pattern_row=firsts(*(each.pattern_rows for each in blocks)).astype(np.uint64),
        slot_low=slots.low,
        pattern_entry=slots.first,
        slot_splits=slots.splits,
    )


def block_starts(starts: Int64Array, shard_ends: Int64Array, block_documents: int) -> Int64Array:
    """Return the first document of each block; then the number of documents: `(blocks + 1,) int64`.

    An empty document lies in the shard whose token comes next, or in the last one.
    """
    borders = np.unique([0, *starts.searchsorted(shard_ends[:-1]).tolist(), starts.size])
    blocks = [range(begin, end, block_documents) for begin, end in pairwise(borders.tolist())]
    return np.array([*chain.from_iterable(blocks), starts.size], dtype=np.int64)


def _pack(
    starts: Int64Array,
    lengths: Int64Array,
    is_open: NDArray[np.bool_],
    *,
    shape: Int64Array,
    bound: int,
    most_pieces: int,
) -> _Block:
    """Pack the documents of a block, at most `bound`; they have at most `most_pieces` that fill no row."""
    seq_len, begin, eot_first = shape.tolist()
    tokens, narrow_lengths = _laid(starts, lengths)
    full, documents, kinds, predictions = _cut(narrow_lengths, is_open, shape)
    # The pieces of each kind and length; nothing is left of a document that is cut into full pieces.
    of_length = kinds * seq_len + predictions
    num_pieces = np.bincount(of_length, minlength=3 * seq_len)
    num_pieces[::seq_len] = 0
    classes, longest, class_of, begins = _classes(num_pieces, shape)
    row_tokens = seq_len + (not eot_first)
    if begin:
        patterns, left_out = spread_begun(classes, begins[1], begins[2], row_tokens)
    else:
        patterns, left_out = spread(classes, row_tokens), [0] * len(classes)
    # Of a class of which not all pieces are in rows the last ones are in none.
    owners = class_of[of_length]
    owners[predictions == 0] = len(classes)
    for number, count in enumerate(left_out):
        if count:
            owners[np.flatnonzero(owners == number)[-count:]] = len(classes)
    pieces = _numbers(each.pieces - count for each, count in zip(classes, left_out, strict=True))
    kept = np.flatnonzero(pieces)
    num_full = int(full.sum())
    num_classes = kept.size + (num_full > 0)
    renumbered = np.full(len(classes) + 1, num_classes)
    renumbered[kept] = np.arange(kept.size)
    tails = Lists.of(documents, renumbered[owners].astype(np.uint32), num_classes, bound)

    rows = _numbers(each.rows for each in patterns)
    sizes = _numbers(len(each.classes) for each in patterns)
    numbers = renumbered[_numbers(chain.from_iterable(each.classes[::-1] for each in patterns))]
    pieces, class_longest = pieces[kept], longest[kept]
    if num_full:
        rows, sizes, numbers = np.append(rows, num_full), np.append(sizes, 1), np.append(numbers, kept.size)
        pieces, class_longest = np.append(pieces, num_full), np.append(class_longest, seq_len)
    slots, by_class = np.empty_like(numbers), numbers.argsort(kind="stable")
    slots[by_class] = firsts(rows.repeat(sizes)[by_class])[:-1]  # a class has as many slots as pieces
    total = int(predictions.sum()) + num_full * seq_len
    out = int(predictions[owners == len(classes)].sum())
    return _Block(
        document_token=tokens,
        num_predictions=np.array([total, total - out]),
        full_pieces=np.add.reduceat(full, np.arange(0, full.size, GROUP)) if full.size else full,
        class_longest=class_longest,
        class_pieces=pieces,
        first_tail=int(kept.searchsorted(begins[1])),
        first_whole=int(kept.searchsorted(begins[2])),
        tails=tails,
        pattern_rows=rows,
        slots=Lists.of(slots, np.arange(rows.size).repeat(sizes), rows.size, most_pieces + 1),
    )


def _laid(starts: Int64Array, lengths: Int64Array) -> tuple[NarrowArray, NarrowArray]:
    """Return where documents begin in their block and the last one ends, and their lengths; refuse gaps.

    In 32 bits where they fit, which take half the time.
    """
    tokens = np.append(starts, starts[-1:] + lengths[-1:])
    tokens -= tokens[:1]
    tokens = narrow(tokens)
    found = np.diff(tokens)
    if (wrong := np.flatnonzero(found != lengths)).size:
        start, length, after = starts[wrong[0]], lengths[wrong[0]], starts[wrong[0] + 1]
        raise ValueError(
            f"a document must begin where the one before it ends, at {start + length}, got {after}"
        )
    return tokens, found


def _classes(
    num_pieces: Int64Array, shape: Int64Array
) -> tuple[list[Class], Int64Array, Int64Array, list[int]]:
    """Return the classes of pieces by kind, and of each its longest piece.

    Also the class of each kind and length, as `num_pieces` counts them, and the first class of each kind.
    """
    seq_len = int(shape[0])
    classes, longest, begins = list[Class](), list[int](), list[int]()
    class_of = np.empty(3 * seq_len, dtype=np.int64)
    for kind in range(3):
        begins.append(len(classes))
        its = slice(kind * seq_len, (kind + 1) * seq_len)
        sizes = np.flatnonzero(num_pieces[its])
        merged = merge(list(zip((sizes + 1).tolist(), num_pieces[its][sizes].tolist(), strict=True)))
        tokens = _numbers(each.tokens for each in merged)
        class_of[its] = tokens.searchsorted(np.arange(seq_len) + 1) + begins[kind]
        longest += [each.tokens - 1 for each in merged]
        classes += [Class(int(room_of(each.tokens - 1, kind, shape)), each.pieces) for each in merged]
    return classes, np.array(longest, dtype=np.int64), class_of, begins


def _cut(
    lengths: NarrowArray, is_open: NDArray[np.bool_], shape: Int64Array
) -> tuple[NarrowArray, NarrowArray, Int64Array, Int64Array]:
    """Return the full pieces of each document, and of each other piece document, kind and predictions.

    By document, then cut. Unless rows begin with documents, those without another piece count with one of 0
    predictions.
    """
    seq_len, begin, eot_first = shape.tolist()
    numbers = np.arange(lengths.size, dtype=np.uint32)
    if not (begin or eot_first or is_open.any()):
        # In place where it can be: fresh pages cost a fifth of the time of a block.
        predictions = np.maximum(lengths, 1, out=lengths)
        predictions -= 1
        rest = (predictions % seq_len).astype(np.int64)  # as NumPy counts and indexes by
        return predictions // seq_len, numbers, np.full_like(rest, Kind.WHOLE), rest
    predictions = num_predictions(lengths, is_open, eot_first=eot_first)
    is_cut_before = is_open & bool(eot_first)
    if not begin:
        full, rest = predictions // seq_len, predictions % seq_len
        is_tail = ((full > 0) & bool(eot_first)) | is_cut_before
        return full, numbers, np.where(is_tail, Kind.TAIL, Kind.WHOLE), rest
    cuts = cuts_of(predictions, is_open, shape)
    which, number = expanded(np.zeros_like(predictions), cuts.counts)
    its = Cuts(*(each[which] for each in cuts))
    starts = its.starts(number)
    stops = np.minimum(its.starts(number + 1), its.predictions)
    is_last = stops == its.predictions
    is_first = (number == 0) & ~is_cut_before[which]
    kinds = np.where(is_first, Kind.WHOLE, np.where(is_last, Kind.TAIL, Kind.BODY))
    is_full = is_first & (stops == seq_len)
    full = np.bincount(which[is_full], minlength=lengths.size)
    sizes = (stops - starts)[~is_full]
    return full, numbers[which][~is_full], kinds[~is_full], sizes


def _numbers(values: Iterable[int]) -> Int64Array:
    return np.fromiter(values, dtype=np.int64)


def _numbered(counts: list[int]) -> Int64Array:
    """Return the sums before each count but the first, which is 0, and of all."""
    return np.array(counts, dtype=np.int64).cumsum()
