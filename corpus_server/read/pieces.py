"""Copy rows of several pieces each from the maps of shards into one array.

Pieces are copied in chunks of one length, which are windows (see `gather.py`), and from there to their
places. The last chunk of a piece reaches beyond its end. Chunks are written in order, so the next piece
overwrites what was too much. With chunks of 4 tokens, pieces of 6 and 5:

    chunks of piece 0     a b c d | e f x x
    chunks of piece 1                 A B C D | E x x x
    written               a b c d e f A B C D E ...

Both copies release the GIL. Where the last chunk of a piece would lead out of its shard or of the array, a
slice is copied instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.rows import NO_SHARD, Pieces
from corpus_server.read.gather import Gatherer, Selection

_CHUNK_TOKENS = 256
"""Pieces of web pages, 400 tokens in the median, take a tenth longer in chunks of 128 or 512."""

_COPIED_BYTES = 256 * 1024
"""Of chunks at once, which stay in the cache until they are at their places: a fifth faster than all of them.
With 512 KiB glibc's heap shrank after each copy at times, and half of the time went into page faults."""


class PieceSelection(Selection):
    """Rows of several pieces each, as `Gatherer.select` returns windows.

    The arrays of the base class have an element for each piece that lies in a shard.

    Args:
        pieces: every row has the same number of tokens; see `end_rows`.
        dtype: type of the result; must hold the tokens of the shards.
    """

    def __init__(self, gatherer: Gatherer, pieces: Pieces, dtype: np.dtype[np.integer]) -> None:
        every, borders = pieces
        stops = every[:, 2].cumsum()  # in all rows laid end to end, as all places here
        begins = stops - every[:, 2]
        is_own = every[:, 0] != NO_SHARD
        kept = np.flatnonzero(is_own)
        own = every.take(kept, axis=0)
        shard_numbers, numbers = places = gatherer.places(own, own[:, 2])
        room = gatherer.last_token[shard_numbers] - numbers
        num_chunks = -(-own[:, 2] // _CHUNK_TOKENS)
        reach = num_chunks * _CHUNK_TOKENS
        super().__init__(gatherer, places, np.minimum(reach, room), dtype)
        cut = np.flatnonzero(reach > room)
        num_chunks[cut] -= 1
        reach[cut] -= _CHUNK_TOKENS
        skipped = reach.cumsum() - reach
        steps = np.arange(0, reach.sum(), _CHUNK_TOKENS)
        self._chunks = np.repeat(numbers - skipped, num_chunks) + steps
        self._into = np.repeat(begins[kept] - skipped, num_chunks) + steps
        self._chunk_shards = np.repeat(shard_numbers, num_chunks)
        self._borders = np.concatenate(([0], is_own.cumsum()))[borders]
        self._chunk_borders = np.concatenate(([0], num_chunks.cumsum()))[self._borders]
        self._num_rows = len(borders) - 1
        self._row_tokens = int(stops[-1]) // self._num_rows if self._num_rows else 0
        # Not copied in chunks: ends of rows, and rests of pieces. Place, stop, shard number, start token.
        ends = np.flatnonzero(~is_own)
        alone, done = np.concatenate((ends, kept[cut])), np.concatenate((np.zeros_like(ends), reach[cut]))
        slices = begins[alone] + done, stops[alone], every[alone, 0], every[alone, 1] + done
        self._slices = np.stack(slices, axis=1)[alone.argsort()]

    def first_shards(self, part: slice) -> NDArray[np.unsignedinteger]:
        """See `Selection.first_shards`."""
        return self._shard_numbers[self._borders[:-1][part]]

    def _own(self, part: slice) -> slice:
        start, stop, _ = part.indices(self._num_rows)
        return slice(int(self._borders[start]), int(self._borders[max(start, stop)]))

    def _copy(self, part: slice) -> NDArray[np.integer]:
        start, stop, _ = part.indices(self._num_rows)
        num_rows = max(0, stop - start)
        first, num_tokens = start * self._row_tokens, num_rows * self._row_tokens
        tokens = np.empty(num_tokens + _CHUNK_TOKENS, self._dtype)  # the last chunk may reach beyond the rows
        shape = num_tokens + 1, _CHUNK_TOKENS
        places: NDArray[np.integer] = np.ndarray(shape, self._dtype, tokens.data, strides=tokens.strides * 2)
        low, high = self._chunk_borders[[start, start + num_rows]].tolist()
        at_once = _COPIED_BYTES // (_CHUNK_TOKENS * self._dtype.itemsize)
        for at in range(low, high, at_once):
            some = slice(at, min(at + at_once, high))
            copied = self._windows(self._chunk_shards[some], self._chunks[some], _CHUNK_TOKENS)
            places[self._into[some] - first] = copied
        low, high = self._slices[:, 0].searchsorted((first, first + num_tokens)).tolist()
        for place, end, number, token in self._slices[low:high].tolist():
            of_shard = token
            if number != NO_SHARD:
                of_shard = self._gatherer.shards[number].tokens[token : token + end - place]
            tokens[place - first : end - first] = of_shard
        return tokens[:num_tokens].reshape(num_rows, self._row_tokens)
