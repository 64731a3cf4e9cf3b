"""Windows of a corpus: which `seq_len + 1` tokens a sample id names.

Windows are numbered through the shards in order and never cross a shard. With shards of 10 and 7
tokens, `seq_len = 3` and `stride = 3`:

    sample id     0     1     2   |  3     4
    shard         0     0     0   |  1     1
    start         0     3     6   |  0     3
    tokens       0-3   3-6   6-9  | 0-3   3-6
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.rows import Pieces, Rows, UInt64Array, check_number


class WindowIndex:
    """The windows of a list of shards; takes O(shards) memory, and O(log shards) time per look-up.

    A window has `seq_len + 1` tokens; those of a shard begin `stride` tokens apart.

    Attributes:
        first_window: `(shards + 1,) uint64`, sample id of each shard's first window; then their number.
        first_token: `(shards + 1,) uint64`, tokens in the shards before each; then in all.
    """

    def __init__(self, shard_tokens: Sequence[int], *, seq_len: int, stride: int) -> None:
        self.seq_len = seq_len
        self.stride = stride
        counts = [max(0, (num_tokens - seq_len - 1) // stride + 1) for num_tokens in shard_tokens]
        self.first_window = np.cumsum([0, *counts], dtype=np.uint64)
        self.first_token = np.cumsum([0, *shard_tokens], dtype=np.uint64)

    def touching(self, starts: NDArray[np.uint64], stops: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the windows that hold a token of each range: `(k, 2) uint64`, half-open, maybe empty.

        The windows that touch a range are neighbours, so that one range of sample ids holds them.

        Args:
            starts, stops: `(k,) uint64`, half-open ranges of tokens over all shards, none empty.
        """
        lowest = self._window_at(starts, reach=self.seq_len + 1)
        above = self._window_at(stops - np.uint64(1), reach=0)
        return np.stack((np.minimum(lowest, above), above), axis=1)

    def _window_at(self, tokens: NDArray[np.uint64], *, reach: int) -> NDArray[np.uint64]:
        """Return for each token the first window that starts after `token - reach`."""
        shards = np.searchsorted(self.first_token, tokens, side="right") - 1
        local = (tokens - self.first_token[shards]).astype(np.int64)
        count = (self.first_window[shards + 1] - self.first_window[shards]).astype(np.int64)
        number = np.clip((local - reach) // self.stride + 1, 0, count)
        return self.first_window[shards] + number.astype(np.uint64)

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where windows [start, stop), at least one, lie: shard number, tokens [start, stop) in it."""
        first, last = (self.first_window.searchsorted((start, stop - 1), side="right") - 1).tolist()
        bounds = self.first_window[first : last + 2].tolist()
        bounds[0], bounds[-1] = start, stop
        origins = self.first_window[first : last + 1].tolist()
        return [
            (shard, (low - origin) * self.stride, (high - 1 - origin) * self.stride + self.seq_len + 1)
            for shard, origin, low, high in zip(
                range(first, last + 1), origins, bounds[:-1], bounds[1:], strict=True
            )
            if low < high  # a shard may have no window
        ]

    def locate(self, sample_ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return where `(k,) uint64` windows lie: `(k, 2) int64`, shard number and start token in it."""
        shards = self.first_window.searchsorted(sample_ids, side="right") - 1
        located = np.empty((len(sample_ids), 2), dtype=np.int64)
        located[:, 0] = shards
        located[:, 1] = (sample_ids - self.first_window[shards]) * np.uint64(self.stride)
        return located


class Windows(Rows):
    """The windows of a plan's sources as its rows: those of each source's shards, one source after another.

    Attributes:
        index: of all shards of all sources.
        first_token: `(sources + 1,) uint64`, tokens of the sources before each; then of all.
        longest: tokens of each source's longest shard.
    """

    is_window = True

    def __init__(self, shard_tokens: Sequence[Sequence[int]], *, seq_len: int, stride: int) -> None:
        every = [num_tokens for shards in shard_tokens for num_tokens in shards]
        self.index = WindowIndex(every, seq_len=seq_len, stride=stride)
        first_shard = np.cumsum([0, *map(len, shard_tokens)])
        self.first_row = self.index.first_window[first_shard]
        self.first_token = self.index.first_token[first_shard]
        self.num_rows = self.epoch_rows = np.diff(self.first_row)
        self.longest = [max(shards, default=0) for shards in shard_tokens]

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.index.first_window.nbytes + self.index.first_token.nbytes

    def pieces(self, sources: NDArray[np.intp] | int, rows: UInt64Array, epochs: UInt64Array) -> Pieces:
        """See `Rows.pieces`: one each."""
        return as_pieces(self.index.locate(rows), self.index.seq_len + 1)

    def touching(
        self, source: int, start: int, stop: int, *, most: int
    ) -> Generator[None, None, UInt64Array]:
        """See `Rows.touching`."""
        yield
        tokens = self.first_token[source] + np.array([[start], [stop]], dtype=np.uint64)
        low, high = self.index.touching(*tokens)[0].tolist()
        check_number(high - low, most, stop)
        return np.arange(low, high, dtype=np.uint64)

    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """See `Rows.extents`."""
        return self.index.extents(start, stop)


def as_pieces(located: NDArray[np.int64], length: int) -> Pieces:
    """Return rows of one piece each, `(k, 2)` shard number and start token, with their lengths."""
    pieces = np.hstack((located, np.full((len(located), 1), length)))
    return pieces, np.arange(len(located) + 1)
