"""Megatron's streams of documents: against lists of single tokens."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from corpus_server.plan.questions.slices import finish
from corpus_server.plan.streams import Drawn, Extent, Sequences, Streams, draw, extent, part_of

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


def joined() -> tuple[list[Drawn], Streams]:
    firsts = [0, 12, 19]
    drawn = [
        draw(sequences(lengths, first), num_samples, SEQ_LEN, seed=5)
        for lengths, first, num_samples in zip(LENGTHS, firsts, (6, 3, 4), strict=True)
    ]
    return drawn, Streams.join(drawn)


def test_streams_are_laid_end_to_end() -> None:
    drawn, streams = joined()
    sizes = [each.samples.size for each in drawn]
    assert streams.first_sample.tolist() == [0, *accumulate(sizes)]
    assert streams.first_token.tolist() == [0, *accumulate(len(tokens(each)) for each in drawn)]
    assert streams.epoch_samples.tolist() == [2, 1, 2, 0]
    assert streams.begins.tolist() == [begin for each in drawn for begin in each.begins.tolist()]
    lengths = [length for each in drawn for length in each.lengths.tolist()]
    assert streams.bounds.tolist() == [0, *accumulate(lengths)]
    numbered = [
        sample + first
        for each, first in zip(drawn, streams.first_sample.tolist(), strict=False)
        for sample in each.samples.tolist()
    ]
    assert streams.samples.tolist() == numbered
    assert [numbered[place] for place in streams.places.tolist()] == list(range(len(numbered)))


def test_samples_are_cut_into_the_pieces_of_their_documents() -> None:
    drawn, streams = joined()
    expected, sources = [], []
    for source, each in enumerate(drawn):
        stream = tokens(each)
        for sample in range(each.samples.size):
            expected.append(stream[sample * SEQ_LEN : (sample + 1) * SEQ_LEN + 1])
            sources.append(source)
    chosen = np.arange(len(expected), dtype=np.int64)[::-1].copy()
    pieces, borders = streams.cut(np.array(sources, dtype=np.intp)[chosen], chosen, SEQ_LEN)
    assert borders.size == len(expected) + 1
    assert borders[-1] == len(pieces)
    found = [
        [token for begin, size in pieces[low:high].tolist() for token in range(begin, begin + size)]
        for low, high in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
    ]
    assert found == [expected[sample] for sample in chosen.tolist()]
    begins = {
        begin: size
        for each in drawn
        for begin, size in zip(each.begins.tolist(), each.lengths.tolist(), strict=True)
    }
    for first, size in pieces.tolist():  # none reaches over the end of its document
        assert any(begin <= first and first + size <= begin + length for begin, length in begins.items())


def test_samples_that_hold_a_token_are_found() -> None:
    """Each document of the stream has a range of samples; the last tokens of a stream may be in none."""
    drawn, streams = joined()
    for source, each in enumerate(drawn):
        stream, first = tokens(each), int(streams.first_sample[source])
        every = sorted(set(stream))
        for start in every:
            for stop in (start + 1, start + 3, every[-1] + 1):
                lows, highs = finish(streams.touching(source, start, stop, SEQ_LEN))
                found = {
                    sample
                    for low, high in zip(lows.tolist(), highs.tolist(), strict=True)
                    for sample in range(low, high + 1)
                }
                expected = {
                    first + sample
                    for sample in range(each.samples.size)
                    if any(start <= token < stop for token in stream[sample * SEQ_LEN :][: SEQ_LEN + 1])
                }
                assert found == expected
