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
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from corpus_server.plan.rows import NO_SHARD, Pieces
from corpus_server.read.gather import Gatherer, Selection

_CHUNK_TOKENS = 256
"""Pieces of web pages, 400 tokens in the median, take a tenth longer in chunks of 128 or 512."""

_NUM_CHUNKS = 512
"""Copied at once: they stay in the cache until they are at their places, a fifth faster than all together."""


class PieceSelection(Selection):
    """Rows of several pieces each, as `Gatherer.select` returns windows.

    The arrays have an element for each piece that lies in a shard.

    Args:
        pieces: every row has the same number of tokens; see `end_rows`.
        dtype: type of the result; must hold the tokens of the shards.
    """

    def __init__(self, gatherer: Gatherer, pieces: Pieces, dtype: np.dtype[np.integer]) -> None:
        every, borders = pieces
        stops = every[:, 2].cumsum()
        begins = stops - every[:, 2]  # in all rows laid end to end
        is_own = every[:, 0] != NO_SHARD
        own = every[is_own]
        places = gatherer.places(own, own[:, 2])
        self._counts, self._begins = own[:, 2].copy(), begins[is_own]
        self._borders = np.concatenate(([0], is_own.cumsum()))[borders]
        self._ends = np.stack((begins, stops, every[:, 1]), axis=1)[~is_own]
        self._num_rows = len(borders) - 1
        self._row_tokens = int(stops[-1]) // self._num_rows if self._num_rows else 0
        touched = np.minimum(_in_chunks(self._counts), gatherer.last_token[places[0]] - places[1])
        super().__init__(gatherer, places, touched, dtype)

    def _own(self, part: slice) -> slice:
        start, stop, _ = part.indices(self._num_rows)
        return slice(int(self._borders[start]), int(self._borders[max(start, stop)]))

    def _copy(self, part: slice) -> NDArray[np.integer]:
        start, stop, _ = part.indices(self._num_rows)
        first, num_rows = start * self._row_tokens, max(0, stop - start)
        tokens = np.empty(num_rows * self._row_tokens, dtype=self._dtype)
        own = self._own(part)
        self._copy_pieces(own, self._begins[own] - first, tokens)
        low, high = self._ends[:, 0].searchsorted((first, first + tokens.size)).tolist()
        for begin, end, token in self._ends[low:high].tolist():
            tokens[begin - first : end - first] = token
        return tokens.reshape(num_rows, self._row_tokens)

    def _copy_pieces(self, own: slice, begins: NDArray[np.int64], tokens: NDArray[np.integer]) -> None:
        """Copy neighbouring pieces to where they begin in `tokens`."""
        numbers, counts = self._numbers[own], self._counts[own]
        reach = _in_chunks(counts)
        leads_out = (reach > self._lengths[own]) | (begins + reach > tokens.size)
        reach -= leads_out * _CHUNK_TOKENS
        num_chunks = reach // _CHUNK_TOKENS
        skipped = reach.cumsum() - reach
        steps = np.arange(0, reach.sum(), _CHUNK_TOKENS)
        chunks = np.repeat(numbers - skipped, num_chunks) + steps
        into = np.repeat(begins - skipped, num_chunks) + steps
        shard_numbers = np.repeat(self._shard_numbers[own], num_chunks)
        shape = (max(0, tokens.size - _CHUNK_TOKENS + 1), _CHUNK_TOKENS)
        places = as_strided(tokens, shape, tokens.strides * 2)
        for first in range(0, len(chunks), _NUM_CHUNKS):
            at = slice(first, first + _NUM_CHUNKS)
            places[into[at]] = self._windows(shard_numbers[at], chunks[at], _CHUNK_TOKENS)
        one_by_one = np.flatnonzero(leads_out)
        numbers, begins, stops = numbers + reach, begins + reach, begins + counts
        located = self._gatherer.locations(self._shard_numbers[own][one_by_one], numbers[one_by_one])
        for each, (number, start) in zip(one_by_one.tolist(), located.tolist(), strict=True):
            begin, stop = int(begins[each]), int(stops[each])
            tokens[begin:stop] = self._gatherer.shards[number].tokens[start : start + stop - begin]


def _in_chunks(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many tokens the chunks of pieces hold."""
    held: NDArray[np.int64] = -(-counts // _CHUNK_TOKENS) * _CHUNK_TOKENS
    return held
