"""Rows of pieces of documents: each prediction once an epoch, there and back, by the rule of the page."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.plan.packing import Packing, build
from corpus_server.plan.packing.spread import LEAST_PIECES, Class, merge, spread
from corpus_server.plan.permutation import stream_key
from corpus_server.plan.ranges import Ranges

NUM_PIECES = int(os.environ.get("CORPUS_PACKED_PIECES", 800_000))
EPOCHS = (0, 1, 2, 2**40)


class Source(NamedTuple):
    """Lengths of the documents of each shard, and the tokens after the last of them."""

    shards: list[list[int]]
    after: int
    seq_len: int
    block_documents: int

    @property
    def lengths(self) -> list[int]:
        return [length for shard in self.shards for length in shard]

    @property
    def starts(self) -> list[int]:
        firsts = accumulate((sum(shard) + self.after for shard in self.shards), initial=0)
        return [
            start
            for first, shard in zip(firsts, self.shards, strict=False)
            for start in [*accumulate(shard, initial=first)][:-1]
        ]

    @property
    def shard_ends(self) -> list[int]:
        return [*accumulate(sum(shard) + self.after for shard in self.shards)]

    def packing(self, seed: int = 0) -> Packing:
        arrays = [np.array(each, dtype=np.int64) for each in (self.starts, self.lengths, self.shard_ends)]
        table = build(*arrays, seq_len=self.seq_len, block_documents=self.block_documents)
        return Packing(table, key=stream_key("documents", seed, "web"))

    def pieces(self) -> Counter[tuple[int, int, int]]:
        """Document, first token and tokens of each piece, cut by the book."""
        found = Counter[tuple[int, int, int]]()
        for document, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            for cut in range(0, length - 1, self.seq_len):
                found[document, start + cut, min(self.seq_len, length - 1 - cut) + 1] += 1
        return found


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def everything(packing: Packing) -> np.ndarray:
    return np.arange(packing.num_pieces, dtype=np.uint64)


def rows_in(packing: Packing, epoch: int) -> list[list[int]]:
    """The pieces of every row."""
    slots, borders = packing.slots(np.arange(packing.num_rows, dtype=np.uint64), u64(epoch))
    pieces = packing.pieces_at(slots, u64(epoch)).tolist()
    return [pieces[first:last] for first, last in pairwise(borders.tolist())]


lengths = st.one_of(st.integers(0, 5), st.integers(0, 40), st.sampled_from([2, 9, 17, 200]))
sources = st.builds(
    Source,
    shards=st.lists(st.lists(lengths, max_size=60), min_size=1, max_size=3),
    after=st.integers(0, 2),
    seq_len=st.sampled_from([1, 2, 3, 8, 16, 64]),
    block_documents=st.sampled_from([1, 2, 7, 40, 1000]),
)


@given(sources, st.sampled_from(EPOCHS))
def test_each_prediction_comes_once_an_epoch_and_is_found_again(source: Source, epoch: int) -> None:
    packing = source.packing()
    rows = rows_in(packing, epoch)
    pieces = [piece for row in rows for piece in row]
    assert sorted(pieces) == list(range(packing.num_pieces))
    starts, counts = packing.tokens(u64(*pieces))
    documents = packing.documents(u64(*pieces))
    found = zip(documents.tolist(), starts.tolist(), counts.tolist(), strict=True)
    assert Counter(found) == source.pieces()
    tokens = dict(zip(pieces, counts.tolist(), strict=True))
    assert all(0 < sum(tokens[piece] for piece in row) <= source.seq_len + 1 for row in rows)
    slots = packing.slots_of(u64(*pieces), u64(epoch))
    assert packing.pieces_at(slots, u64(epoch)).tolist() == pieces
    assert packing.rows_of(slots).tolist() == [number for number, row in enumerate(rows) for _ in row]


@given(sources)
def test_rows_do_not_mix_blocks(source: Source) -> None:
    packing = source.packing()
    blocks = [
        (number, place // source.block_documents)
        for number, shard in enumerate(source.shards)
        for place in range(len(shard))
    ]
    documents = packing.documents(everything(packing)).tolist()
    starts, counts = packing.tokens(everything(packing))
    for row, pieces in enumerate(rows_in(packing, 0)):
        if 0 not in source.lengths:  # empty documents at the end of a shard count to the next one
            assert len({blocks[documents[piece]] for piece in pieces}) == 1
        ((start, stop),) = packing.extent(row, row + 1)
        assert starts[pieces].min() >= start
        assert (starts + counts)[pieces].max() <= stop
    if packing.num_rows:
        extents = packing.extent(0, packing.num_rows)
        assert all(one[1] <= other[0] for one, other in pairwise(extents))


@given(sources, st.data())
def test_pieces_that_hold_a_token_are_found(source: Source, data: st.DataObject) -> None:
    packing = source.packing()
    starts, counts = packing.tokens(everything(packing))
    token = st.integers(0, source.shard_ends[-1] + 1)
    ranges = data.draw(st.lists(st.tuples(token, token), min_size=1, max_size=4))
    touched = [(starts < stop) & (starts + counts > start) & (start < stop) for start, stop in ranges]
    for (start, stop), expected in zip(ranges, touched, strict=True):
        assert packing.touching(start, stop).tolist() == np.flatnonzero(expected).tolist()
    bounds = np.array(ranges, dtype=np.int64).T
    assert packing.touching(*bounds).tolist() == np.flatnonzero(np.any(touched, axis=0)).tolist()
    inside = Ranges([pair for pair in ranges if pair[0] < min(pair[1], source.shard_ends[-1])])
    if inside.total:
        held = Ranges(packing.held(*inside.bounds.astype(np.int64).T))
        expected = np.flatnonzero(np.any(touched, axis=0))
        assert held == Ranges(np.stack((expected, expected + 1), axis=1))


def test_the_pieces_of_many_documents_are_a_range_for_each_class_of_a_block() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 20_000)
    for block_documents in (3000, 20_000):
        packing = Source([lengths.tolist()], 0, 64, block_documents).packing()
        starts, counts = packing.tokens(everything(packing))
        start, stop = 1000, int(lengths.sum()) - 1000
        ranges = packing.held(np.array([start]), np.array([stop]))
        expected = np.flatnonzero((starts < stop) & (starts + counts > start))
        assert Ranges(ranges) == Ranges(np.stack((expected, expected + 1), axis=1))
        assert len(ranges) < 500


def test_the_worked_example_of_the_page() -> None:
    packing = Source([[12, 4, 3, 7]], 0, 8, 4).packing()
    starts, counts = packing.tokens(everything(packing))
    assert list(zip(starts.tolist(), counts.tolist(), strict=True)) == [
        (16, 3),
        (8, 4),
        (12, 4),
        (19, 7),
        (0, 9),
    ]
    assert packing.class_first.tolist() == [0, 1, 3, 4, 5]
    every = [{frozenset(row) for row in rows_in(packing, epoch)} for epoch in range(20)]
    assert {frozenset(rows) for rows in every} == {frozenset(map(frozenset, [{0}, {1, 2}, {3}, {4}]))}


pieces_by_length = st.dictionaries(st.integers(2, 3000), st.integers(1, 300), max_size=40).map(
    lambda found: sorted(found.items())
)


@given(pieces_by_length)
def test_a_class_takes_shorter_pieces_only_while_it_is_small(found: list[tuple[int, int]]) -> None:
    classes = merge(found)
    assert sum(each.pieces for each in classes) == sum(number for _, number in found)
    borders = [0, *(each.tokens for each in classes)]
    for (below, _), each in zip(pairwise(borders), classes, strict=True):
        its = [(tokens, number) for tokens, number in found if below < tokens <= each.tokens]
        assert its[-1][0] == each.tokens
        assert each.pieces == sum(number for _, number in its)
        assert its == its[-1:] or each.pieces - its[0][1] < LEAST_PIECES
        assert (each.tokens - its[0][0]) * 512 <= each.tokens
        if below:  # it could not have taken that one, too
            assert each.pieces >= LEAST_PIECES or (each.tokens - below) * 512 > each.tokens


def one_by_one(classes: list[Class], row_tokens: int) -> Counter[tuple[int, ...]]:
    """The rule of the page with one piece at a time."""
    opened = -(-sum(tokens * pieces for tokens, pieces in classes) // row_tokens)
    spaces, since, held = [row_tokens] * opened, [0] * opened, [()] * opened
    for number in reversed(range(len(classes))):
        tokens, left = classes[number]
        while left:
            emptiest = max(spaces, default=0)
            fitting = [space for space in spaces if space >= tokens]
            if emptiest < 2 * tokens and not fitting:
                added = -(-left // (row_tokens // tokens))
                spaces += [row_tokens] * added
                since += [sum(map(len, held))] * added
                held += [()] * added
                continue
            space = emptiest if emptiest >= 2 * tokens else min(fitting)
            row = min((row for row in range(len(spaces)) if spaces[row] == space), key=lambda row: since[row])
            spaces[row], held[row], left = space - tokens, (*held[row], number), left - 1
            since[row] = sum(map(len, held))
    return Counter(each for each in held if each)


@given(st.dictionaries(st.integers(2, 33), st.integers(1, 12), min_size=1, max_size=8))
def test_moves_in_bulk_are_those_of_one_piece_at_a_time(found: dict[int, int]) -> None:
    classes = [Class(*each) for each in sorted(found.items())]
    patterns = spread(classes, 33)
    assert dict(patterns) == one_by_one(classes, 33)
    assert [each.classes for each in patterns] == sorted(each.classes for each in patterns)


def test_an_epoch_deals_the_pieces_of_a_class_anew() -> None:
    packing = Source([[5] * 600], 0, 16, 600).packing()
    first, second = ([frozenset(row) for row in rows_in(packing, epoch)] for epoch in (0, 1))
    assert {len(row) for row in first} == {3}
    assert len(set(first) & set(second)) < 5
    places = [row.index(min(row)) for row in rows_in(Source([[9, 3] * 400], 0, 12, 800).packing(), 3)]
    assert min(Counter(places).values()) > 100, "long pieces always come first"


@pytest.mark.parametrize(
    ("num_documents", "median", "seq_len", "block_documents"),
    [
        pytest.param(NUM_PIECES * 5 // 8, 400, 1024, 2**18, id="web"),
        pytest.param(1_100_000, 4, 16, 2**24, id="a block of more than 2^20 documents"),
        pytest.param(3000, 60_000, 2048, 1000, id="books"),
        pytest.param(40_000, 400, 2**17, 2**14, id="hundreds of documents in a row"),
    ],
)
def test_millions_of_pieces(num_documents: int, median: int, seq_len: int, block_documents: int) -> None:
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(median), 1.35, num_documents).astype(np.int64)
    starts = lengths.cumsum() - lengths
    shard_ends = np.array([starts[num_documents // 3], lengths.sum()])
    table = build(starts, lengths, shard_ends, seq_len=seq_len, block_documents=block_documents)
    packing = Packing(table, key=7)
    epoch = u64(3)
    slots, borders = packing.slots(np.arange(packing.num_rows, dtype=np.uint64), epoch)
    pieces = packing.pieces_at(slots, epoch)
    assert (np.bincount(pieces.astype(np.int64)) == 1).all()
    begins, counts = packing.tokens(pieces)
    assert np.add.reduceat(counts, borders[:-1]).max() <= seq_len + 1
    # The predictions of all pieces are those of all documents, and nothing overlaps.
    assert (counts - 1).sum() == np.maximum(lengths - 1, 0).sum()
    order = begins.argsort()
    assert (begins[order][1:] >= (begins + counts - 1)[order][:-1]).all()
    documents = packing.documents(pieces)
    assert (begins >= starts[documents]).all()
    assert (begins + counts <= (starts + lengths)[documents]).all()
    assert (packing.slots_of(pieces, epoch) == slots).all()
    some = random.integers(0, pieces.size, 100_000)
    rows = np.repeat(np.arange(packing.num_rows), np.diff(borders))
    assert (packing.rows_of(slots[some]) == rows[some]).all()
    assert (packing.touching(begins[some] + 1, begins[some] + 2) == np.unique(pieces[some])).all()


def test_a_class_of_more_than_2_16_documents() -> None:
    packing = Source([[3] * 140_000], 0, 7, 2**18).packing()
    starts, _ = packing.tokens(everything(packing))
    assert starts.tolist() == list(range(0, 420_000, 3))
    assert packing.table.tail_splits.dtype == np.uint32


def test_a_document_of_more_than_2_32_tokens() -> None:
    packing = Source([[7, 2**32 + 5, 9]], 0, 2**16, 3).packing()
    assert packing.num_pieces == 2 + 2**16 + 1
    starts, counts = packing.tokens(everything(packing))
    assert (counts - 1).sum() == 6 + 2**32 + 4 + 8
    assert starts.max() == 7 + 2**32 + 5
    assert packing.touching(2**32 + 12, 2**40).size == 1


def test_blocks_may_be_packed_elsewhere() -> None:
    lengths = np.arange(1000) % 37
    given_ = (lengths.cumsum() - lengths, lengths, np.array([lengths.sum()]))
    here = build(*given_, seq_len=16, block_documents=100)
    with ThreadPoolExecutor(2) as pool:
        there = build(*given_, seq_len=16, block_documents=100, run=pool.map)
    assert all(np.array_equal(one, other) for one, other in zip(here, there, strict=True))


def test_documents_with_tokens_between_them_are_refused() -> None:
    starts, lengths = np.array([0, 5, 11]), np.array([5, 5, 5])
    with pytest.raises(ValueError, match="must begin where the one before it ends, at 10, got 11"):
        build(starts, lengths, np.array([16]), seq_len=4, block_documents=8)
