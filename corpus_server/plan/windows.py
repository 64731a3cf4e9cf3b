"""The windows of a plan's sources, and how their tokens and shards are numbered.

Windows are numbered through the shards in order and never cross a shard. With shards of 10 and 7
tokens, `seq_len = 3` and `stride = 3`:

    number        0     1     2   |  3     4
    shard         0     0     0   |  1     1
    start         0     3     6   |  0     3
    tokens       0-3   3-6   6-9  | 0-3   3-6
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from corpus_server.pieces import Int64Array, Pieces, UInt64Array, at_or_below
from corpus_server.plan.numbers import UnitNumbers


class Windows:
    """Windows of `seq_len + 1` tokens; those of a shard begin `stride` tokens apart.

    Takes O(shards) memory, and O(log shards) time per look-up. Plans share one that have the same sources and
    lengths.

    Args:
        shard_tokens: of each source, the tokens of its shards.

    Attributes:
        shard_window: `(shards + 1,) uint64`, number of each shard's first window; then of all windows.
        shard_token: `(shards + 1,) uint64`, tokens in the shards before each; then in all.
        first_shard: `(sources + 1,)`, number of each source's first shard; then of all shards.
        first_window: `(sources + 1,) uint64`, number of each source's first window; then of all windows.
        first_token: `(sources + 1,) uint64`, tokens of the sources before each; then of all.
        num_windows: `(sources,) uint64`.
        longest: tokens of each source's longest shard.
    """

    def __init__(self, shard_tokens: Sequence[Sequence[int]], *, seq_len: int, stride: int) -> None:
        self.seq_len, self.stride = seq_len, stride
        every = [num_tokens for shards in shard_tokens for num_tokens in shards]
        counts = [max(0, (num_tokens - seq_len - 1) // stride + 1) for num_tokens in every]
        self.shard_window = np.cumsum([0, *counts], dtype=np.uint64)
        self.shard_token = np.cumsum([0, *every], dtype=np.uint64)
        self.first_shard = np.cumsum([0, *map(len, shard_tokens)], dtype=np.intp)
        self.first_window = self.shard_window[self.first_shard]
        self.first_token = self.shard_token[self.first_shard]
        self.num_windows: UInt64Array = np.diff(self.first_window)
        self.longest = [max(shards, default=0) for shards in shard_tokens]

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.shard_window.nbytes + self.shard_token.nbytes

    def num_tokens(self, source: int) -> int:
        """Return how many tokens a source has."""
        return int(self.first_token[source + 1] - self.first_token[source])

    def locate(self, windows: UnitNumbers) -> Int64Array:
        """Return where `(k,)` windows lie: `(k, 2) int64`, shard number and start token in it."""
        return self.pieces(windows).places[:, :2]

    def pieces(self, windows: UnitNumbers) -> Pieces:
        """Return windows as rows of one piece."""
        shards = at_or_below(self.shard_window, windows)
        places = np.empty((len(windows), 3), dtype=np.int64)
        places[:, 0] = shards
        places[:, 1] = (windows - self.shard_window[shards]) * np.uint64(self.stride)
        places[:, 2] = self.seq_len + 1
        return Pieces(places, np.arange(len(windows) + 1))

    def in_shards(self, tokens: UInt64Array) -> tuple[Int64Array, Int64Array]:
        """Return the shards of tokens that are counted over all sources, and the tokens' numbers in them."""
        shards = at_or_below(self.shard_token, tokens)
        return shards, (tokens - self.shard_token[shards]).astype(np.int64)

    def holding(self, starts: UInt64Array, stops: UInt64Array) -> UInt64Array:
        """Return the windows that hold a token of each range: `(k, 2) uint64`, half-open, maybe empty.

        The windows that touch a range are neighbours, so that one range of numbers holds them.

        Args:
            starts, stops: `(k,) uint64`, half-open ranges of tokens over all shards, none empty.
        """
        lowest = self._window_at(starts, reach=self.seq_len + 1)
        above = self._window_at(stops - np.uint64(1), reach=0)
        return np.stack((np.minimum(lowest, above), above), axis=1)

    def _window_at(self, tokens: UInt64Array, *, reach: int) -> UnitNumbers:
        """Return for each token the first window that starts after `token - reach`."""
        shards, within = self.in_shards(tokens)
        count = (self.shard_window[shards + 1] - self.shard_window[shards]).astype(np.int64)
        number = np.clip((within - reach) // self.stride + 1, 0, count)
        return self.shard_window[shards] + number.astype(np.uint64)

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where windows [start, stop), at least one, lie: shard number, tokens [start, stop) in it."""
        first, last = (self.shard_window.searchsorted((start, stop - 1), side="right") - 1).tolist()
        bounds = [start, *self.shard_window[first + 1 : last + 1].tolist(), stop]
        found = []
        for shard, (low, high) in enumerate(pairwise(bounds), first):
            if low < high:  # a shard may have no window
                origin = int(self.shard_window[shard])
                begin, last_begin = ((at - origin) * self.stride for at in (low, high - 1))
                found.append((shard, begin, last_begin + self.seq_len + 1))
        return found
