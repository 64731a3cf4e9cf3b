"""The table of a source: which pieces its rows have room for, made of the lengths of its documents.

    documents          A 10 tokens   B 5          C 8                     seq_len = 8, rows of 9 tokens
    pieces             A0  0 to 8    B0 0 to 4    C0 0 to 7               both included
                       A1  8 to 9
    classes            0: A1 (2)     1: B0 (5)    2: C0 (8)   3: A0 (9)   (tokens)
    patterns           1 row [1, 0]               1 row [2]   1 row [3]

A block is a number of neighbouring documents of a shard. Each block has classes and patterns of its own.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.packing.lists import Lists, NarrowArray, narrow
from corpus_server.plan.packing.spread import Class, Pattern, merge, spread

Int64Array = NDArray[np.int64]

GROUP: Final = 32
"""Documents between two counts of full pieces: the others are counted when they are needed."""


class Table(NamedTuple):
    """The packing of one source: B blocks, C classes, P patterns; all numbered through the source. Arrays
    whose type is not given are uint32, or int64 where a number is 2^32 or more.

    A pattern's entries are the classes of its pieces, the longest piece first. Slots and pieces have the same
    numbers: those of class c are [class_first[c], class_first[c + 1]).

    Attributes:
        block_document: `(B + 1,) int64`, first document of each block; then all documents.
        block_token: `(B + 1,) int64`, first token of each block; then the end of the last document.
        block_class, block_pattern: `(B + 1,) int64`, first class and first pattern of each block; then all.
        block_group: `(B + 1,) int64`, first of the block's groups of documents; then all.
        document_token: `(documents + B,)`, of the documents of a block where each begins,
            relative to the block's first token, and then where the last one ends.
        full_before: `(groups + 1,)`, pieces of `seq_len` predictions in the groups before each; then all.
        class_longest: `(C,) int32`, predictions of the longest piece that a slot has room for.
        class_first: `(C + 1,) uint64`.
        tail_low, tail_first, tail_splits: `Lists` by class of the documents, relative to their block, whose
            last piece has fewer than `seq_len` predictions.
        pattern_row: `(P + 1,) uint64`, first row of each pattern; then all rows.
        pattern_entry: `(P + 1,)`, first entry of each pattern; then all.
        entry_slot: `(entries,)`, the slot of an entry in the first row of its pattern, relative to
            the block's first. The following rows have the following slots.
        class_low, class_entry, class_splits: `Lists` by class of the entries, relative to the block's first.
    """

    block_document: Int64Array
    block_token: Int64Array
    block_class: Int64Array
    block_pattern: Int64Array
    block_group: Int64Array
    document_token: NarrowArray
    full_before: NarrowArray
    class_longest: NDArray[np.int32]
    class_first: NDArray[np.uint64]
    tail_low: NDArray[np.uint16 | np.uint32]
    tail_first: NarrowArray
    tail_splits: NDArray[np.uint32]
    pattern_row: NDArray[np.uint64]
    pattern_entry: NarrowArray
    entry_slot: NarrowArray
    class_low: NDArray[np.uint16 | np.uint32]
    class_entry: NarrowArray
    class_splits: NDArray[np.uint32]


class _Block(NamedTuple):
    """What a block adds to the table; numbers count from its own start."""

    document_token: Int64Array
    full_pieces: Int64Array  # of each group
    class_longest: Int64Array
    class_pieces: Int64Array
    tails: Int64Array
    class_tails: Int64Array
    pattern_rows: Int64Array
    pattern_entries: Int64Array
    entry_slot: Int64Array
    entries: Int64Array
    class_entries: Int64Array


def build(
    starts: Int64Array,
    lengths: Int64Array,
    shard_ends: Int64Array,
    *,
    seq_len: int,
    block_documents: int,
) -> Table:
    """Pack the documents of a source.

    Args:
        starts: `(d,)`, first token of each document, ascending. A document of a shard begins where the one
            before it ends.
        lengths: `(d,)`, tokens of each.
        shard_ends: `(shards,)`, tokens of the source up to the end of each shard.
        seq_len: predictions of a row.
        block_documents: documents of a block; the last one of a shard may have fewer.
    """
    first = block_starts(starts, shard_ends, block_documents)
    blocks = [
        _block(starts[begin:end], lengths[begin:end], seq_len) for begin, end in pairwise(first.tolist())
    ]
    largest = int(np.diff(first).max(initial=0))
    tails = Lists.of([each.tails for each in blocks], [each.class_tails for each in blocks], largest)
    entries = Lists.of(
        [each.entries for each in blocks], [each.class_entries for each in blocks], largest + 1
    )
    ends = starts[-1:] + lengths[-1:]
    return Table(
        block_document=first,
        block_token=np.append(starts[first[:-1]], ends if ends.size else 0),
        block_class=_firsts([each.class_longest.size for each in blocks]),
        block_pattern=_firsts([each.pattern_rows.size for each in blocks]),
        block_group=_firsts([each.full_pieces.size for each in blocks]),
        document_token=narrow(_joined([each.document_token for each in blocks])),
        full_before=narrow(_cumulated([each.full_pieces for each in blocks])),
        class_longest=_joined([each.class_longest for each in blocks]).astype(np.int32),
        class_first=_cumulated([each.class_pieces for each in blocks]).astype(np.uint64),
        tail_low=tails.low,
        tail_first=tails.first,
        tail_splits=tails.splits,
        pattern_row=_cumulated([each.pattern_rows for each in blocks]).astype(np.uint64),
        pattern_entry=narrow(_cumulated([each.pattern_entries for each in blocks])),
        entry_slot=narrow(_joined([each.entry_slot for each in blocks])),
        class_low=entries.low,
        class_entry=entries.first,
        class_splits=entries.splits,
    )


def block_starts(starts: Int64Array, shard_ends: Int64Array, block_documents: int) -> Int64Array:
    """Return the first document of each block; then the number of documents: `(blocks + 1,) int64`.

    An empty document lies in the shard whose token comes next, or in the last one.
    """
    borders = np.unique([0, *starts.searchsorted(shard_ends[:-1]).tolist(), starts.size])
    firsts = [range(begin, end, block_documents) for begin, end in pairwise(borders.tolist())]
    return np.array([*chain.from_iterable(firsts), starts.size], dtype=np.int64)


def _block(starts: Int64Array, lengths: Int64Array, seq_len: int) -> _Block:
    ends = starts + lengths
    if (starts[1:] != ends[:-1]).any():
        number = int(np.flatnonzero(starts[1:] != ends[:-1])[0])
        raise ValueError(
            f"a document must begin where the one before it ends, at {ends[number]}, got {starts[number + 1]}"
        )
    predictions = np.maximum(lengths - 1, 0)
    full = predictions // seq_len
    short = predictions - full * seq_len  # of the last piece, if that is not a full one
    counts = np.bincount(short)
    counts[0] = 0
    present = np.flatnonzero(counts)
    classes = merge(list(zip((present + 1).tolist(), counts[present].tolist(), strict=True)))
    patterns = spread(classes, seq_len + 1)
    class_of = np.array([each.tokens - 1 for each in classes]).searchsorted(np.arange(counts.size))
    with_tail = np.flatnonzero(short)
    # NumPy sorts 16 bits by counting, in a fifth of the time.
    tail_class = class_of.astype(np.uint16 if len(classes) < 1 << 16 else np.int64)[short[with_tail]]
    tails = with_tail[tail_class.argsort(kind="stable")]
    if num_full := int(full.sum()):
        patterns.append(Pattern((len(classes),), num_full))
        classes.append(Class(seq_len + 1, num_full))
    rows = np.array([each.rows for each in patterns], dtype=np.int64)
    sizes = np.array([len(each.classes) for each in patterns], dtype=np.int64)
    numbers = np.fromiter(chain.from_iterable(each.classes for each in patterns), np.int64, int(sizes.sum()))
    by_class = numbers.argsort(kind="stable")
    entry_rows = np.repeat(rows, sizes)[by_class]
    slots = np.empty_like(numbers)
    slots[by_class] = entry_rows.cumsum() - entry_rows  # those of a class are as many as its pieces
    return _Block(
        document_token=np.append(starts, ends[-1]) - starts[0],
        full_pieces=np.add.reduceat(full, np.arange(0, full.size, GROUP)),
        class_longest=np.array([each.tokens - 1 for each in classes], dtype=np.int64),
        class_pieces=np.array([each.pieces for each in classes], dtype=np.int64),
        tails=tails,
        class_tails=np.bincount(tail_class, minlength=len(classes)),
        pattern_rows=rows,
        pattern_entries=sizes,
        entry_slot=slots,
        entries=by_class,
        class_entries=np.bincount(numbers, minlength=len(classes)),
    )


def _joined(arrays: list[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _cumulated(arrays: list[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(1, np.int64), *arrays]).cumsum()


def _firsts(sizes: list[int]) -> Int64Array:
    return np.array([0, *sizes], dtype=np.int64).cumsum()
