"""The samples of one source in the order of Megatron-Core's GPTDataset (gpt_dataset.py, 0.16).

Megatron repeats the documents of a source until they hold enough tokens, shuffles them, and lays them end to
end: the source's *stream*. Sample k is the tokens `[k * seq_len, (k + 1) * seq_len]` of the stream, both
included, so it joins the end of one document with the next ones. Then the samples are shuffled:

    documents        A 5 tokens, B 3, C 4
    shuffled         B         A                   C
    stream           0  1  2 | 3  4  5  6  7 | 8  9 10 11
    samples of 4+1   0  0  0   0 0,1 1  1  1   1 ...
    shuffled         1, 0: the first row is the stream's tokens [4, 9): four of A and one of C

Where several epochs are needed, all documents of all epochs are shuffled together, and so are all samples.
But if less than four fifths of the last epoch are needed, it is shuffled by itself and comes last.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Samples = NDArray[np.uint32]

_LAST_EPOCH_SHARE: Final = 0.80
_SLICE: Final = 1 << 20  # documents that a look-up goes through in some ms


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


def extent(num_tokens: int, num_samples: int, seq_len: int) -> Extent:
    """Return how many epochs of so many tokens give at least `num_samples`."""
    epochs = max(1, -(-(num_samples * seq_len + 1) // num_tokens))
    of_one, before_last, total = ((n * num_tokens - 1) // seq_len for n in (1, epochs - 1, epochs))
    is_apart = epochs > 1 and num_samples - before_last < int(_LAST_EPOCH_SHARE * of_one)
    return Extent(epochs, total, before_last if is_apart else None, of_one)


def draw(sequences: Sequences, num_samples: int, seq_len: int, seed: int) -> Drawn:
    """Shuffle the documents of a source and its samples, as Megatron does for `num_samples`."""
    needed = extent(int(sequences.lengths.sum()), num_samples, seq_len)
    state = np.random.RandomState(seed)
    is_apart = needed.whole_samples is not None
    shuffled = []
    for epochs in (needed.epochs - 1, 1) if is_apart else (needed.epochs,):
        # The type that Megatron has: what is drawn must not depend on it, but it takes half the memory.
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


def part_of(sequences: Sequences, split: Sequence[float], part: int) -> Sequences:
    """Return the documents of one part of a split, rounded as Megatron rounds."""
    shares = np.zeros(3)
    shares[: len(split)] = split
    ends = [0.0]
    for share in (shares / shares.sum()).tolist():
        ends.append(ends[-1] + share)
    size = float(sequences.lengths.size)
    begin, end = round(ends[part] * size), round(ends[part + 1] * size)
    return Sequences(sequences.starts[begin:end], sequences.lengths[begin:end])


class Streams:
    """The streams of all sources of a plan, laid end to end; samples are numbered through the sources.

    Attributes:
        begins: `(k,) int64`, first token of each document of the streams, over all corpora of the plan.
        bounds: `(k + 1,) int64`, where each lies in the streams; then their tokens in all.
        samples: `(m,)`, the sample at each position of each source.
        places: `(m,)`, the inverse of `samples`.
        firsts: `(3, sources + 1) int64`: of each source the first sample and the first token of the streams,
            and the samples of one epoch.
    """

    def __init__(
        self, begins: Int64Array, bounds: Int64Array, samples: Samples, places: Samples, firsts: Int64Array
    ) -> None:
        self.begins, self.bounds, self.samples, self.places, self.firsts = (
            begins,
            bounds,
            samples,
            places,
            firsts,
        )
        self.first_sample, self.first_token, self.epoch_samples = firsts

    @classmethod
    def join(cls, drawn: Sequence[Drawn]) -> Streams:
        """Lay the streams of sources end to end."""
        firsts = np.zeros((3, len(drawn) + 1), dtype=np.int64)
        for number, each in enumerate(drawn):
            before = firsts[:, number]
            firsts[:2, number + 1] = before[0] + each.samples.size, before[1] + each.lengths.sum()
            firsts[2, number] = each.epoch_samples
        total = int(firsts[0, -1])
        samples = np.empty(total, dtype=np.uint32)
        for first, each in zip(firsts[0].tolist(), drawn, strict=False):
            samples[first : first + each.samples.size] = each.samples + np.uint32(first)
        places = np.empty_like(samples)
        places[samples] = np.arange(total, dtype=np.uint32)
        bounds = np.concatenate([[0], *(each.lengths for each in drawn)]).cumsum()
        return cls(np.concatenate([each.begins for each in drawn]), bounds, samples, places, firsts)

    def cut(
        self, sources: NDArray[np.intp], samples: Int64Array, seq_len: int
    ) -> tuple[Int64Array, Int64Array]:
        """Return the pieces of documents that samples join.

        Returns:
            `(p, 2)`: first token over all corpora, tokens; and `(k + 1,)`: the first piece of each sample,
            then their number.
        """
        starts = self.first_token[sources] + (samples - self.first_sample[sources]) * seq_len
        stops = starts + (seq_len + 1)
        low = self.bounds.searchsorted(starts, side="right") - 1
        num_pieces = self.bounds.searchsorted(stops, side="left") - low
        borders = np.concatenate(([0], num_pieces.cumsum()))
        documents = np.arange(borders[-1]) + np.repeat(low - borders[:-1], num_pieces)
        origins = self.bounds[documents]
        begins = np.maximum(origins, np.repeat(starts, num_pieces))
        ends = np.minimum(self.bounds[documents + 1], np.repeat(stops, num_pieces))
        return np.stack((self.begins[documents] + begins - origins, ends - begins), axis=1), borders

    def touching(
        self, source: int, start: int, stop: int, seq_len: int
    ) -> Generator[None, None, tuple[Int64Array, Int64Array]]:
        """Find the samples that hold a token of [start, stop), over all corpora; in slices.

        Returns:
            `(k,)` each: ranges of samples, first and last; empty where the last is before the first.
        """
        low, high = self.bounds.searchsorted(self.first_token[source : source + 2]).tolist()
        found = []
        for at in range(low, high, _SLICE):
            begins, bounds = self.begins[at : min(at + _SLICE, high)], self.bounds[at : at + _SLICE + 1]
            lengths = np.diff(bounds[: begins.size + 1])
            here = np.flatnonzero((begins < stop) & (begins + lengths > start))
            origins = bounds[here] - self.first_token[source]
            first = origins + np.maximum(0, start - begins[here])
            last = origins + np.minimum(lengths[here], stop - begins[here]) - 1
            found.append((np.maximum(0, -((seq_len - first) // seq_len)), last // seq_len))
            yield
        firsts, lasts = (np.concatenate(column) for column in zip(*found, strict=True))
        own = self.first_sample[source : source + 2].tolist()
        return firsts + own[0], np.minimum(lasts + own[0], own[1] - 1)
