"""The samples of one source, as Megatron-Core's GPTDataset and GPT-NeoX's GPT2Dataset order them.

Both repeat the documents of a source until they hold enough tokens, shuffle them, and lay them end to
end: the source's *stream*. Sample k is the tokens `[k * seq_len, (k + 1) * seq_len]` of the stream, both
included, so it joins the end of one document with the next ones. Then the samples are shuffled:

    documents        A 5 tokens, B 3, C 4
    shuffled         B         A                   C
    stream           0  1  2 | 3  4  5  6  7 | 8  9 10 11
    samples of 4+1   0  0  0   0 0,1 1  1  1   1 ...
    shuffled         1, 0: the first row is the stream's tokens [4, 9): four of A and one of C

Where several epochs are needed, all documents of all epochs are shuffled together, and so are all samples.
But in Megatron-Core, if less than four fifths of the last epoch are needed, it is shuffled by itself and
comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array

Samples = NDArray[np.uint32]

_LAST_EPOCH_SHARE: Final = 0.80


class Sequences(NamedTuple):
    """The documents of a source, in file order: first token and length of each, `(n,) int64`."""

    starts: Int64Array
    lengths: Int64Array


class Drawn(NamedTuple):
    """The stream of one source and the order of its samples.

    Attributes:
        begins: `(k,) int64`, first token of each document of the stream.
        lengths: `(k,) int64`, none 0.
        samples: sample at each position.
        epoch_samples: samples of one epoch.
    """

    begins: Int64Array
    lengths: Int64Array
    samples: Samples
    epoch_samples: int


class Extent(NamedTuple):
    """How large a source's stream gets."""

    epochs: int
    samples: int
    whole_samples: int | None  # before the last epoch, if that comes by itself
    epoch_samples: int


def extent(num_tokens: int, num_samples: int, seq_len: int, *, is_last_apart: bool) -> Extent:
    """Return how many epochs of so many tokens give at least `num_samples`."""
    epochs = max(1, -(-(num_samples * seq_len + 1) // num_tokens))
    of_one, before_last, total = ((n * num_tokens - 1) // seq_len for n in (1, epochs - 1, epochs))
    is_apart = is_last_apart and epochs > 1 and num_samples - before_last < int(_LAST_EPOCH_SHARE * of_one)
    return Extent(epochs, total, before_last if is_apart else None, of_one)


def draw(sequences: Sequences, num_samples: int, seq_len: int, seed: int, *, is_last_apart: bool) -> Drawn:
    """Shuffle the documents of a source and its samples, as for `num_samples`."""
    needed = extent(int(sequences.lengths.sum()), num_samples, seq_len, is_last_apart=is_last_apart)
    state = np.random.RandomState(seed)
    is_apart = needed.whole_samples is not None
    shuffled = []
    for epochs in (needed.epochs - 1, 1) if is_apart else (needed.epochs,):
        # The type that both have: what is drawn must not depend on it, but it takes half the memory.
        documents = np.tile(np.arange(sequences.lengths.size, dtype=np.int32), epochs)
        state.shuffle(documents)
        shuffled.append(documents)
    order = np.concatenate(shuffled)
    order = order[sequences.lengths[order] > 0]  # empty documents were shuffled too, and give nothing
    borders = [0, needed.whole_samples, needed.samples] if is_apart else [0, needed.samples]
    samples = np.arange(needed.samples, dtype=np.uint32)
    for start, stop in pairwise(borders):
        state.shuffle(samples[start:stop])
    return Drawn(sequences.starts[order], sequences.lengths[order], samples, needed.epoch_samples)


class Streams(NamedTuple):
    """The streams of all sources of a plan, laid end to end; samples are numbered through the sources.

    Attributes:
        begins: `(k,) int64`, first token of each document of the streams, over all corpora of the plan.
        bounds: `(k + 1,) int64`, where each lies in the streams; then their tokens in all.
        samples: `(m,)`, the sample at each position of each source.
        places: `(m,)`, the inverse of `samples`.
        firsts: `(3, sources + 1) int64`: of each source the first sample and the first token of the streams,
            and the samples of one epoch.
    """

    begins: Int64Array
    bounds: Int64Array
    samples: Samples
    places: Samples
    firsts: Int64Array


def join(drawn: Sequence[Drawn]) -> Streams:
    """Lay the streams of sources end to end."""
    firsts = np.zeros((3, len(drawn) + 1), dtype=np.int64)
    firsts[0, 1:] = np.cumsum([each.samples.size for each in drawn])
    firsts[1, 1:] = np.cumsum([each.lengths.sum() for each in drawn])
    firsts[2, :-1] = [each.epoch_samples for each in drawn]
    numbered = zip(drawn, firsts[0].tolist(), strict=False)
    samples = np.concatenate([each.samples + np.uint32(first) for each, first in numbered])
    places = np.empty_like(samples)
    places[samples] = np.arange(samples.size, dtype=np.uint32)
    bounds = np.concatenate([[0], *(each.lengths for each in drawn)]).cumsum()
    return Streams(np.concatenate([each.begins for each in drawn]), bounds, samples, places, firsts)
