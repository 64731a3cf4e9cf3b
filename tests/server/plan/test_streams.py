"""Megatron's streams of documents: against lists of single tokens."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from corpus_server.plan.orders.megatron import Samples, Table
from corpus_server.plan.questions.slices import finish
from corpus_server.plan.rows import Windows
from corpus_server.plan.streams import Drawn, Extent, Sequences, draw, extent, join, part_of

LENGTHS = ((5, 3, 0, 4), (7,), (1, 0, 2, 6, 1))
SEQ_LEN = 4


def sequences(lengths: tuple[int, ...], first: int = 0) -> Sequences:
    starts = [first, *accumulate(lengths, initial=first)][1:-1] if lengths else []
    return Sequences(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64))


def tokens(drawn: Drawn) -> list[int]:
    """Return the stream of a source, token by token."""
    pairs = zip(drawn.begins.tolist(), drawn.lengths.tolist(), strict=True)
    return [token for begin, length in pairs for token in range(begin, begin + length)]


@pytest.mark.parametrize(
    ("num_tokens", "num_samples", "seq_len", "expected"),
    [
        pytest.param(41, 10, 4, Extent(1, 10, None, 10), id="one epoch, to the last token"),
        pytest.param(41, 11, 4, Extent(2, 20, 10, 10), id="a sample of a second one"),
        pytest.param(41, 1, 4, Extent(1, 10, None, 10), id="part of an epoch"),
        pytest.param(40, 10, 4, Extent(2, 19, 9, 9), id="a token too few"),
        pytest.param(41, 17, 4, Extent(2, 20, 10, 10), id="seven tenths of the last"),
        pytest.param(41, 18, 4, Extent(2, 20, None, 10), id="eight tenths of the last"),
        pytest.param(41, 30, 4, Extent(3, 30, None, 10), id="three epochs"),
        pytest.param(41, 24, 4, Extent(3, 30, 20, 10), id="less of the third"),
        pytest.param(2, 3, 1, Extent(2, 3, None, 1), id="two tokens"),
        pytest.param(3, 7, 4, Extent(10, 7, None, 0), id="epochs shorter than a sample"),
    ],
)
def test_epochs_and_samples_that_are_needed(
    num_tokens: int, num_samples: int, seq_len: int, expected: Extent
) -> None:
    """The last epoch comes by itself if less than four fifths of it are needed."""
    assert extent(num_tokens, num_samples, seq_len) == expected


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 6, 11, 40])
def test_a_stream_holds_each_document_once_an_epoch(num_samples: int) -> None:
    own = sequences(LENGTHS[0], first=100)
    needed, drawn = extent(12, num_samples, SEQ_LEN), draw(own, num_samples, SEQ_LEN, seed=3)
    assert sorted(tokens(drawn)) == sorted([*range(100, 112)] * needed.epochs)
    assert sorted(drawn.samples.tolist()) == list(range(needed.samples))
    assert (drawn.lengths > 0).all()
    assert drawn.epoch_samples == 2
    if needed.whole_samples is not None:  # the last epoch, and its samples, are behind the others
        assert sorted(tokens(drawn)[-12:]) == list(range(100, 112))
        assert sorted(drawn.samples[: needed.whole_samples].tolist()) == list(range(needed.whole_samples))


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        ((1.0,), [0, 10, 10, 10]),
        ((969.0, 30.0, 1.0), [0, 10, 10, 10]),
        ((0.5, 0.25, 0.25), [0, 5, 8, 10]),  # 7.5 is rounded to the even number
        ((3.0, 1.0), [0, 8, 10, 10]),
        ((0.0, 1.0, 1.0), [0, 0, 5, 10]),
    ],
)
def test_the_parts_of_a_split(split: tuple[float, ...], bounds: list[int]) -> None:
    own = sequences(tuple(range(10)), first=7)
    for part in range(3):
        found = part_of(own, split, part)
        assert found.lengths.tolist() == list(range(bounds[part], bounds[part + 1]))
        assert found.starts.tolist() == own.starts[bounds[part] : bounds[part + 1]].tolist()


def joined() -> tuple[list[list[int]], Samples]:
    """Return the samples of three sources, by number, and the code under test; each source is one shard."""
    drawn = [
        draw(sequences(lengths, first), num_samples, SEQ_LEN, seed=5)
        for lengths, first, num_samples in zip(LENGTHS, (0, 12, 19), (6, 3, 4), strict=True)
    ]
    expected = [
        tokens(each)[sample * SEQ_LEN : (sample + 1) * SEQ_LEN + 1]
        for each in drawn
        for sample in range(each.samples.size)
    ]
    empty = np.zeros(0, dtype=np.int64)
    windows = Windows([[sum(lengths)] for lengths in LENGTHS], seq_len=SEQ_LEN, stride=SEQ_LEN)
    return expected, Samples(Table(*join(drawn), empty, empty, empty), windows)  # type: ignore[arg-type]


def test_samples_are_permuted_within_their_sources() -> None:
    _, samples = joined()
    for source, size in enumerate(samples.num_rows.tolist()):
        own = draw(sequences(LENGTHS[source]), (6, 3, 4)[source], SEQ_LEN, seed=5).samples.tolist()
        rows = np.arange(size, dtype="uint64")
        assert samples.windows(source, rows, rows).tolist() == own
        assert [own[place] for place in samples.offsets(source, rows, rows).tolist()] == rows.tolist()
    assert samples.epoch_rows.tolist() == [2, 1, 2]


def test_samples_are_cut_into_the_pieces_of_their_documents() -> None:
    expected, samples = joined()
    rows = np.arange(len(expected), dtype="uint64")[::-1].copy()
    sources = samples.first_row.searchsorted(rows, side="right") - 1
    pieces, borders = samples.pieces(sources, rows, rows)
    first = [0, 12, 19]
    ends = {*accumulate(length for lengths in LENGTHS for length in lengths)}
    found = []
    for low, high in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        begins = [(first[shard] + start, size) for shard, start, size in pieces[low:high].tolist()]
        # None reaches over the end of its document.
        assert not any(at < end < at + size for at, size in begins for end in ends)
        found.append([token for at, size in begins for token in range(at, at + size)])
    assert found == [expected[row] for row in rows.tolist()]


def test_samples_that_hold_a_token_are_found() -> None:
    """Also where the last tokens of a stream are in none."""
    expected, samples = joined()
    for source, (first, size) in enumerate(zip((0, 12, 19), map(sum, LENGTHS), strict=True)):
        own = range(*samples.first_row[source : source + 2].tolist())
        for start in range(size):
            for stop in {start + 1, min(start + 3, size), size}:
                held = range(first + start, first + stop)
                found = finish(samples.touching(source, start, stop, most=100))
                assert found.tolist() == [row for row in own if set(expected[row]) & set(held)]
