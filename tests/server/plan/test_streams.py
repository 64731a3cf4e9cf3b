"""Streams of documents: how long they are, and that each document is in them."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from corpus_server.plan.orders.megatron import MegatronOrder
from corpus_server.plan.orders.neox import NeoxOrder
from corpus_server.plan.streams import Drawn, Extent, Sequences, draw, extent

LENGTHS = (5, 3, 0, 4)
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
    assert extent(num_tokens, num_samples, seq_len, is_last_apart=True) == expected
    together = extent(num_tokens, num_samples, seq_len, is_last_apart=False)
    assert together == expected._replace(whole_samples=None)


@pytest.mark.parametrize("num_samples", [1, 2, 3, 5, 6, 11, 40])
def test_a_stream_holds_each_document_once_an_epoch(num_samples: int) -> None:
    own = sequences(LENGTHS, first=100)
    needed = extent(12, num_samples, SEQ_LEN, is_last_apart=True)
    drawn = draw(own, num_samples, SEQ_LEN, seed=3, is_last_apart=True)
    assert sorted(tokens(drawn)) == sorted([*range(100, 112)] * needed.epochs)
    assert sorted(drawn.samples.tolist()) == list(range(needed.samples))
    assert (drawn.lengths > 0).all()
    assert drawn.epoch_samples == 2
    if needed.whole_samples is not None:  # the last epoch, and its samples, are behind the others
        assert sorted(tokens(drawn)[-12:]) == list(range(100, 112))
        assert sorted(drawn.samples[: needed.whole_samples].tolist()) == list(range(needed.whole_samples))


@pytest.mark.parametrize(
    ("split", "size", "megatron", "neox"),
    [
        ((1.0,), 10, [0, 10, 10, 10], [0, 10, 10, 10]),
        ((969.0, 30.0, 1.0), 10, [0, 10, 10, 10], [0, 10, 10, 10]),
        ((0.5, 0.25, 0.25), 10, [0, 5, 8, 10], [0, 6, 8, 10]),  # 7.5 and 2.5 are rounded to even numbers
        ((3.0, 1.0), 10, [0, 8, 10, 10], [0, 8, 10, 10]),
        ((0.0, 1.0, 1.0), 10, [0, 0, 5, 10], [0, 0, 5, 10]),
        ((1.0, 1.0, 1.0), 11, [0, 4, 7, 11], [0, 3, 7, 11]),
    ],
)
def test_the_parts_of_a_split(
    split: tuple[float, ...], size: int, megatron: list[int], neox: list[int]
) -> None:
    assert MegatronOrder.split_bounds(split, size) == megatron
    assert NeoxOrder.split_bounds(split, size) == neox
