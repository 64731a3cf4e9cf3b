"""Windows of a corpus: which `seq_len + 1` tokens a sample id names.

Windows are numbered through the shards in order and never cross a shard. With shards of 10 and 7
tokens, `seq_len = 3` and `stride = 3`:

    sample id     0     1     2   |  3     4
    shard         0     0     0   |  1     1
    start         0     3     6   |  0     3
    tokens       0-3   3-6   6-9  | 0-3   3-6
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def count_windows(num_tokens: int, seq_len: int, stride: int) -> int:
    """Return how many windows of `seq_len + 1` tokens a shard holds."""
    return max(0, (num_tokens - seq_len - 1) // stride + 1)


class WindowIndex:
    """The windows of a list of shards: O(shards) memory, O(log shards) per look-up.

    Args:
        shard_tokens: tokens of each shard.
        seq_len: inputs per row; a window is one token longer.
        stride: tokens between the starts of neighbouring windows of a shard.
    """

    def __init__(self, shard_tokens: Sequence[int], *, seq_len: int, stride: int) -> None:
        self.seq_len = seq_len
        self.stride = stride
        counts = [count_windows(num_tokens, seq_len, stride) for num_tokens in shard_tokens]
        # first_window[k]: sample id of shard k's first window; one entry more than shards.
        self._first_window = np.zeros(len(counts) + 1, dtype=np.uint64)
        np.cumsum(counts, dtype=np.uint64, out=self._first_window[1:])
        self._first_token = np.zeros(len(counts) + 1, dtype=np.uint64)
        np.cumsum(shard_tokens, dtype=np.uint64, out=self._first_token[1:])

    @property
    def num_windows(self) -> int:
        """Windows of all shards together."""
        return int(self._first_window[-1])

    def first_window(self, shard: int) -> int:
        """Return the sample id of a shard's first window; of the shard after the last, `num_windows`."""
        return int(self._first_window[shard])

    def first_token(self, shard: int) -> int:
        """Return the number of a shard's first token over all shards; after the last, their sum."""
        return int(self._first_token[shard])

    def touching(self, starts: NDArray[np.uint64], stops: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the windows that hold a token of each range.

        Args:
            starts, stops: `(k,) uint64`, half-open ranges of tokens over all shards, none empty.

        Returns:
            `(k, 2) uint64`: half-open ranges of sample ids, which may be empty. They are contiguous, for
            windows are numbered as they lie.
        """
        lowest = self._window_at(starts, reach=self.seq_len + 1)
        above = self._window_at(stops - np.uint64(1), reach=0)
        return np.stack((np.minimum(lowest, above), above), axis=1)

    def _window_at(self, tokens: NDArray[np.uint64], *, reach: int) -> NDArray[np.uint64]:
        """Return the first window that starts after `token - reach` (at it, for reach 0: after it)."""
        shards = np.searchsorted(self._first_token, tokens, side="right") - 1
        local = (tokens - self._first_token[shards]).astype(np.int64)
        count = (self._first_window[shards + 1] - self._first_window[shards]).astype(np.int64)
        number = np.clip((local - reach) // self.stride + 1, 0, count)
        return self._first_window[shards] + number.astype(np.uint64)

    def locate(self, sample_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return where windows lie.

        Args:
            sample_ids: `(k,) uint64`, each below `num_windows`.

        Returns:
            `(k, 2) int64`: shard number and start token inside that shard.
        """
        shards = self._first_window.searchsorted(sample_ids, side="right") - 1
        located = np.empty((len(sample_ids), 2), dtype=np.int64)
        located[:, 0] = shards
        located[:, 1] = (sample_ids - self._first_window[shards]) * np.uint64(self.stride)
        return located
