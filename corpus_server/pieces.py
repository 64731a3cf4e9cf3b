"""Pieces, by which arithmetic tells those who read bytes where the tokens of rows lie.

A piece is a number of consecutive tokens of a shard. A window is one piece. A row of documents joins
several, and its unused end is a piece of no shard:

    places     shard  start  tokens          borders    row 0 is pieces 0 and 1, row 1 is piece 2
                   0    100      12          0
                   3      0       5          2
                   1     40      17          3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

NO_SHARD: Final = -1
"""Stands for a shard's number in a piece of no shard: its start is a token id, which comes `tokens` times."""


class Pieces(NamedTuple):
    """Rows, each of one piece or more.

    Attributes:
        places: `(p, 3) int64`: shard number, start token, tokens.
        borders: `(k + 1,) int64`: the first piece of each of k rows; then p.
    """

    places: Int64Array
    borders: Int64Array

    @classmethod
    def joined(cls, parts: Sequence[Pieces]) -> Pieces:
        """Return rows one part after another."""
        if len(parts) == 1:
            return parts[0]
        counts = [np.zeros(1, np.int64), *(np.diff(each.borders) for each in parts)]
        places = np.concatenate([np.empty((0, 3), np.int64), *(each.places for each in parts)])
        return cls(places, np.concatenate(counts).cumsum())

    @property
    def num_rows(self) -> int:
        """Return how many rows there are."""
        return len(self.borders) - 1

    def rows(self, which: NDArray[np.integer]) -> Pieces:
        """Return rows by their numbers."""
        counts = np.diff(self.borders)[which]
        _, pieces = expanded(self.borders[which], counts)
        return Pieces(self.places[pieces], np.concatenate(([0], counts.cumsum())))

    def each_once(self) -> Int64Array:
        """Return the row of each piece: `(p,)`."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.borders))

    def without_empty(self) -> Pieces:
        """Return rows without pieces of no token; of a row of nothing else the first one stays."""
        counts = self.places[:, 2]
        if counts.all():
            return self
        kept = counts > 0
        tokens = np.bincount(self.each_once(), weights=counts, minlength=self.num_rows)
        kept[self.borders[:-1]] |= tokens == 0
        return Pieces(self.places[kept], np.concatenate(([0], kept.cumsum()))[self.borders])

    def ended(self, length: int, token: NDArray[np.integer] | int) -> Pieces:
        """Return rows of `length` tokens: those that have fewer end with a piece of `NO_SHARD`.

        Args:
            token: id that fills the end of each row, `(k,)`, or of all.
        """
        places, borders = self
        num_tokens = np.concatenate(([0], places[:, 2].cumsum()))[borders]
        missing = length - np.diff(num_tokens)
        short = np.flatnonzero(missing)
        ids = np.broadcast_to(np.asarray(token, dtype=np.int64), missing.shape)
        ends = np.stack((np.full_like(short, NO_SHARD), ids[short], missing[short]), axis=1)
        ended = np.insert(places, borders[short + 1], ends, axis=0)
        return Pieces(ended, borders + np.concatenate(([0], (missing > 0).cumsum())))


def expanded(first: NDArray[np.integer], counts: NDArray[np.integer]) -> tuple[NDArray[np.intp], Int64Array]:
    """Return the numbers [first[k], first[k] + counts[k]) of every k: `(n,)` each, the k, and the number."""
    counts = np.asarray(counts, dtype=np.int64)
    which = np.repeat(np.arange(counts.size), counts)
    numbers = np.repeat(np.asarray(first, dtype=np.int64) - (counts.cumsum() - counts), counts)
    numbers += np.arange(which.size)
    return which, numbers


def split(bounds: Int64Array, starts: Int64Array, stops: Int64Array) -> Pieces:
    """Return ranges of a line of shards as pieces of them: a row for each range.

    Args:
        bounds: `(shards + 1,)`, where each shard begins on the line; then its end.
        starts, stops: `(k,)`, on the line; an empty range has no piece.
    """
    low = bounds.searchsorted(starts, side="right") - 1
    counts = np.where(starts < stops, bounds.searchsorted(stops, side="left") - low, 0)
    row, shards = expanded(low, counts)
    begins, ends = np.maximum(starts[row], bounds[shards]), np.minimum(stops[row], bounds[shards + 1])
    kept = begins < ends  # not of an empty shard
    places = np.stack((shards, begins - bounds[shards], ends - begins), axis=1)[kept]
    return Pieces(places, np.concatenate(([0], np.bincount(row[kept], minlength=starts.size).cumsum())))
