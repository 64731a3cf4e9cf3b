"""Windows of local shards, straight into the memory that the device reads.

All maps lie in one address space, so windows of any number of shards of one type are rows of one strided
view. Torch copies rows to where they belong; NumPy's fancy index would make an array of its own first, and
copying that on costs half as much again.

One thread copies. Torch's others would spin between two gathers, and take the cores from the server and the
model: on two cores, both of them brought a fifth of one's throughput at times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from corpus_client import errors

Tokens = npt.NDArray[np.integer]

PIECE_BYTES = 256 << 10
"""Where shards are of several types: NumPy's temporary copy of a piece stays in the cache."""

_SIGNED: dict[int, np.dtype[np.integer]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
}
"""By itemsize: torch cannot index every unsigned type, and a copy does not look at the sign."""


class Shard(Protocol):
    """What gathering needs to know of a shard."""

    @property
    def path(self) -> Path:
        """Of its file."""

    @property
    def tokens(self) -> Tokens:
        """As stored, `(num_tokens,)`, a view of the map."""

    def check_unchanged(self) -> None:
        """Raise unless the file is the one that was opened."""


class Gatherer:
    """Gathers windows of a fixed list of open shards; it and its selections are for one thread.

    Args:
        shards: what column 0 of indices counts; open for as long as this is used.
        window: tokens of a row.
    """

    def __init__(self, shards: Sequence[Shard], window: int) -> None:
        self._shards = shards
        self._window = window
        self._last_start = np.array([len(shard.tokens) - window for shard in shards], np.int64)
        self._span = _Span.of(shards, window)

    def select(self, indices: npt.NDArray[np.int64]) -> Selection:
        """Choose windows, to be copied as a whole or in pieces.

        Args:
            indices: `(rows, 2) int64`: shard number, start token in that shard; at least one row.

        Raises:
            AnswerCorrupt: an index is outside its shard.
        """
        numbers, starts = np.ascontiguousarray(indices.T)
        for number in (numbers.min(), numbers.max()):
            if not 0 <= number < len(self._shards):
                raise errors.AnswerCorrupt(f"shard numbers must be in [0, {len(self._shards)}), got {number}")
        outside = (starts < 0) | (starts > self._last_start[numbers])
        if outside.any():
            number, start = indices[outside][0].tolist()
            raise errors.AnswerCorrupt(f"a start lies outside {self._shards[number].path}: {start}")
        return Selection(self._shards, self._window, self._span, numbers, starts)


class Selection:
    """Windows that are known to lie inside their shards."""

    def __init__(
        self,
        shards: Sequence[Shard],
        window: int,
        span: _Span | None,
        numbers: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
    ) -> None:
        self._shards = shards
        self._window = window
        self._span = span
        self._numbers = numbers
        self._starts = starts
        self._rows = span.rows(numbers, starts) if span is not None else torch.empty(0)

    def __len__(self) -> int:
        return len(self._numbers)

    def gather(self, first: int, out: Tokens) -> None:
        """Copy windows from `first` on.

        Args:
            out: `(rows, window)`, C order; any integer dtype that holds the shards' tokens.

        Raises:
            LocalCopyMismatch: a shard changed.
        """
        part = slice(first, first + len(out))
        touched = np.flatnonzero(np.bincount(self._numbers[part])).tolist()
        for number in touched:
            self._shards[number].check_unchanged()
        if self._span is not None and self._span.dtype == out.dtype:
            self._span.copy(self._rows[part], out)
        else:
            self._copy_by_shard(touched, part, out)
        for number in touched:
            # After the copy: a file that was truncated under it reads zeros, not an error.
            self._shards[number].check_unchanged()

    def _copy_by_shard(self, touched: Sequence[int], part: slice, out: Tokens) -> None:
        numbers, starts = self._numbers[part], self._starts[part]
        rows_at_once = max(1, PIECE_BYTES // (self._window * out.itemsize))
        for number in touched:
            windows = np.lib.stride_tricks.sliding_window_view(self._shards[number].tokens, self._window)
            (rows,) = np.nonzero(numbers == number)
            for at in range(0, len(rows), rows_at_once):
                piece = rows[at : at + rows_at_once]
                out[piece] = windows[starts[piece]]


class _Span:
    """The stretch of address space that holds shards of one type and alignment, as rows of windows."""

    def __init__(self, shards: Sequence[Shard], window: int, lowest: int, num_tokens: int) -> None:
        self.dtype = shards[0].tokens.dtype
        itemsize = self.dtype.itemsize
        self._first_token = np.array([(_address(shard) - lowest) // itemsize for shard in shards], np.int64)
        # It says that it may be written, or torch would warn; nothing does.
        tokens = np.asarray(_AddressSpace(lowest, num_tokens, _SIGNED[itemsize].str))
        self._windows = torch.from_numpy(tokens).as_strided((num_tokens - window + 1, window), (1, 1))
        # OpenMP counts its threads for each thread that calls it: nobody else is limited.
        self._openmp = ThreadpoolController().select(user_api="openmp")

    @classmethod
    def of(cls, shards: Sequence[Shard], window: int) -> _Span | None:
        """The span of all shards; None: they differ in type or alignment, or are too far apart."""
        filled = [shard for shard in shards if len(shard.tokens)]
        kinds = {(shard.tokens.dtype, _address(shard) % shard.tokens.itemsize) for shard in filled}
        if len(kinds) != 1 or len(filled) < len(shards):
            return None
        lowest = min(map(_address, shards))
        end = max(_address(shard) + shard.tokens.nbytes for shard in shards)
        num_tokens = (end - lowest) // shards[0].tokens.itemsize
        if num_tokens < window or num_tokens * window >= 2**62:
            return None
        return cls(shards, window, lowest, num_tokens)

    def rows(self, numbers: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> torch.Tensor:
        """Which rows of the view are windows, by their shards and starts there."""
        return torch.from_numpy(self._first_token[numbers] + starts)

    def copy(self, rows: torch.Tensor, out: Tokens) -> None:
        """Copy rows of the view to those of `out`, which has this type."""
        into = torch.from_numpy(out.view(_SIGNED[out.itemsize]))
        with self._openmp.limit(limits=1):
            torch.index_select(self._windows, 0, rows, out=into)


class _AddressSpace:
    """Exposes a stretch of memory to NumPy; what lies between the maps is never indexed."""

    def __init__(self, lowest: int, num_tokens: int, typestr: str) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (lowest, False),
            "shape": (num_tokens,),
            "typestr": typestr,
        }


def _address(shard: Shard) -> int:
    return int(shard.tokens.__array_interface__["data"][0])
