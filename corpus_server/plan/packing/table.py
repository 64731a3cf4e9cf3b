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
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.numbers import Int64Array
from corpus_server.plan.packing.lists import Lists, NarrowArray, firsts, narrow
from corpus_server.plan.packing.spread import Class, Pattern, merge, spread

GROUP: Final = 32
"""Documents between two counts of full pieces: the others are counted when they are needed."""


class Table(NamedTuple):
    """The packing of one source: B blocks, C classes, P patterns, all numbered through the source.

    Arrays whose type is not given are uint32, or int64 where a number is 2^32 or more. A pattern has an entry
    for each of its pieces, the shortest first. Slots have the numbers of pieces: those of class c are
    [class_first[c], class_first[c + 1]).

    Attributes:
        block_document: `(B + 1,) int64`, first document of each block; then all documents.
        block_token: `(B + 1,) int64`, first token of each block; then the end of the last document.
        block_class, block_pattern: `(B + 1,) int64`, first class and first pattern of each block; then all.
        block_group: `(B + 1,) int64`, first of the block's groups of documents; then all.
        document_token: `(documents + B,)`, where each document of a block begins, relative to the block's
            first token, and then where the last one ends.
        full_before: `(groups + 1,)`, pieces of `seq_len` predictions in the groups before each; then all.
        class_longest: `(C,) int32`, predictions of the longest piece that a slot has room for.
        class_first: `(C + 1,) uint64`.
        tail_low, tail_first, tail_splits: `Lists` by class of the documents, relative to their block, whose
            last piece has fewer than `seq_len` predictions.
        pattern_row: `(P + 1,) uint64`, first row of each pattern; then all rows.
        slot_low, pattern_entry, slot_splits: `Lists` by pattern of its entries: the slots of the first row,
            relative to the block's first slot. The following rows have the following slots.
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
    tail_splits: NDArray[np.uint16 | np.uint32]
    pattern_row: NDArray[np.uint64]
    slot_low: NDArray[np.uint16 | np.uint32]
    pattern_entry: NarrowArray
    slot_splits: NDArray[np.uint16 | np.uint32]


class _Block(NamedTuple):
    """What a block adds to the table; numbers count from its own start."""

    document_token: NarrowArray
    full_pieces: NarrowArray  # of each group
    class_tokens: Int64Array  # of the longest piece
    class_pieces: Int64Array
    tails: Lists
    pattern_rows: Int64Array
    slots: Lists


def build(
    starts: Int64Array,
    lengths: Int64Array,
    shard_ends: Int64Array,
    *,
    seq_len: int,
    block_documents: int,
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
        run: packs the blocks: `map`, or what calls in other processes.
    """
    first = block_starts(starts, shard_ends, block_documents)
    parts = [slice(*pair) for pair in pairwise(first.tolist())]
    pack = partial(_pack, seq_len=seq_len, bound=int(np.diff(first).max(initial=0)))
    none = np.zeros(0, dtype=np.int64)
    packed = run(pack, [starts[part] for part in parts], [lengths[part] for part in parts])
    blocks = [pack(none, none), *packed]
    tails = Lists.join([each.tails for each in blocks])
    slots = Lists.join([each.slots for each in blocks])
    longest = np.concatenate([each.class_tokens for each in blocks]) - 1
    end = starts[-1:] + lengths[-1:]
    return Table(
        block_document=first,
        block_token=np.append(starts[first[:-1]], end if end.size else 0),
        block_class=_numbered([each.class_tokens.size for each in blocks]),
        block_pattern=_numbered([each.pattern_rows.size for each in blocks]),
        block_group=_numbered([each.full_pieces.size for each in blocks]),
        document_token=np.concatenate([each.document_token for each in blocks]),
        full_before=firsts(*(each.full_pieces for each in blocks)),
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


def _pack(starts: Int64Array, lengths: Int64Array, *, seq_len: int, bound: int) -> _Block:
    """Pack the documents of a block, at most `bound`."""
    tokens = np.append(starts, starts[-1:] + lengths[-1:])
    tokens -= tokens[:1]
    tokens = narrow(tokens)
    found = np.diff(tokens)  # as `lengths`, but in 32 bits, which take half the time
    if (wrong := np.flatnonzero(found != lengths)).size:
        start, length, after = starts[wrong[0]], lengths[wrong[0]], starts[wrong[0] + 1]
        raise ValueError(
            f"a document must begin where the one before it ends, at {start + length}, got {after}"
        )
    # In place where it can be: fresh pages cost a fifth of the time of a block.
    predictions = np.maximum(found, 1, out=found)
    predictions -= 1
    full = predictions // seq_len
    rest = (predictions % seq_len).astype(np.int64)  # as NumPy counts and indexes by
    num_pieces = np.bincount(rest)
    num_pieces[:1] = 0  # nothing is left of a document that is cut into full pieces
    sizes = np.flatnonzero(num_pieces)
    classes = merge(list(zip((sizes + 1).tolist(), num_pieces[sizes].tolist(), strict=True)))
    patterns = spread(classes, seq_len + 1)

    class_of = _numbers(each.tokens for each in classes).searchsorted(np.arange(num_pieces.size) + 1)
    if num_full := int(full.sum()):
        patterns.append(Pattern((len(classes),), num_full))
        classes.append(Class(seq_len + 1, num_full))
    class_of[:1] = len(classes)  # a document without a tail is in none
    tails = Lists.of(
        np.arange(rest.size, dtype=np.uint32), class_of.astype(np.uint32)[rest], len(classes), bound
    )

    sizes = _numbers(len(each.classes) for each in patterns)
    rows = _numbers(each.rows for each in patterns)
    numbers = _numbers(chain.from_iterable(reversed(each.classes) for each in patterns))
    slots, by_class = np.empty_like(numbers), numbers.argsort(kind="stable")
    slots[by_class] = firsts(rows.repeat(sizes)[by_class])[:-1]  # a class has as many slots as pieces
    return _Block(
        document_token=tokens,
        full_pieces=np.add.reduceat(full, np.arange(0, full.size, GROUP)) if full.size else full,
        class_tokens=_numbers(each.tokens for each in classes),
        class_pieces=_numbers(each.pieces for each in classes),
        tails=tails,
        pattern_rows=rows,
        slots=Lists.of(slots, np.arange(rows.size).repeat(sizes), rows.size, bound + 1),
    )


def _numbers(values: Iterable[int]) -> Int64Array:
    return np.fromiter(values, dtype=np.int64)


def _numbered(counts: list[int]) -> Int64Array:
    """Return the sums before each count but the first, which is 0, and of all."""
    return np.array(counts, dtype=np.int64).cumsum()
