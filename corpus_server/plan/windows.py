"""How the windows, tokens and shards of a plan's sources are numbered.

Windows are numbered through the shards in order and never cross a shard. With shards of 10 and 7
tokens, `seq_len = 3` and `stride = 3`:

    number        0     1     2   |  3     4
    shard         0     0     0   |  1     1
    start         0     3     6   |  0     3
    tokens       0-3   3-6   6-9  | 0-3   3-6
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corpus_server.pieces import Int64Array, UInt64Array, at_or_below


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

    def in_shards(self, tokens: UInt64Array) -> tuple[Int64Array, Int64Array]:
        """Return the shards of tokens that are counted over all sources, and the tokens' numbers in them."""
        shards = at_or_below(self.shard_token, tokens)
        return shards, (tokens - self.shard_token[shards]).astype(np.int64)
