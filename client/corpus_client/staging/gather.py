"""Copy windows of local shards straight into the memory that the device reads.

All maps lie in one address space, so windows of any number of shards of one type are rows of one strided
view. Torch copies rows to where they belong; NumPy's fancy index would make an array of its own first, and
copying that on costs half as much again.

One thread copies. Torch's others would spin between two gathers, and take the cores from the server and the
model: on two cores, both of them brought a fifth of one's throughput at times.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors
from corpus_client.network.control import ShardDescription

Tokens = npt.NDArray[np.integer]

PIECE_BYTES = 256 << 10
"""Where shards are of several types: NumPy's temporary copy of a piece stays in the cache."""

_SIGNED: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.int16), 4: np.dtype(np.int32)}
"""By itemsize: torch cannot index every unsigned type, and a copy does not look at the sign."""


class LocalShard:
    """One mapped shard.

    tokens: `(num_tokens,)` as stored, read-only; valid until `close`.
    """

    def __init__(self, path: Path, described: ShardDescription) -> None:
        self.path = path
        self.described = described
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise errors.LocalCopyMismatch(
                f"corpus {described.corpus!r}: shard {described.name} must lie at {path}, "
                f"got {error.strerror}; is local_root right?"
            ) from error
        status = os.fstat(self._file.fileno())
        self._opened = (status.st_size, status.st_mtime_ns)
        if status.st_size != described.size_bytes:
            self._file.close()
            raise errors.LocalCopyMismatch(
                f"corpus {described.corpus!r}: {path} must have {described.size_bytes:,} bytes, "
                f"got {status.st_size:,}; was the copy interrupted?"
            )
        self.tokens: Tokens = np.empty(0, described.dtype)
        if described.num_tokens:
            view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            view.madvise(mmap.MADV_RANDOM)  # else a cold window of 2 KiB reads megabytes ahead
            dtype = np.dtype(described.dtype).newbyteorder("<")
            self.tokens = np.frombuffer(view, dtype, count=described.num_tokens, offset=described.data_offset)
        self.address = self.tokens.ctypes.data

    def check_unchanged(self) -> None:
        """Raise unless the file still has the size and time it was opened with."""
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) != self._opened:
            raise errors.LocalCopyMismatch(f"{self.path} changed while it was in use; copy it again")

    def close(self) -> None:
        """Close the file; the map goes with the last view of it."""
        self._file.close()
        self.tokens = np.empty(0, self.described.dtype)


class Gatherer:
    """Gathers windows of a fixed list of open shards, which column 0 of indices counts; for one thread."""

    def __init__(self, shards: Sequence[LocalShard], window: int) -> None:
        self._shards = shards
        self._window = window
        self._last_start = np.array([len(shard.tokens) - window for shard in shards], np.int64)
        self._numbers = self._starts = np.empty(0, np.int64)
        self._first_token = np.zeros(len(shards), np.int64)  # of each shard in the view of all
        self._all_windows = self._view_of_all()
        try:  # imported here: whoever brings their own torch needs threadpoolctl for local copies only
            from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise errors.InvalidArgument(
                "a local copy of the shards needs threadpoolctl, which is not installed; "
                "pip install 'corpus-client[torch]'"
            ) from error
        # OpenMP counts its threads for each thread that calls it: nobody else is limited.
        self._openmp = ThreadpoolController().select(user_api="openmp")

    def select(self, indices: npt.NDArray[np.int64]) -> int:
        """Choose the windows that `gather` copies; return their number.

        indices: `(rows, 2) int64`: shard number, start token in that shard; at least one row.
        """
        self._numbers, self._starts = np.ascontiguousarray(indices.T)
        for number in (self._numbers.min(), self._numbers.max()):
            if not 0 <= number < len(self._shards):
                raise errors.AnswerCorrupt(f"shard numbers must be in [0, {len(self._shards)}), got {number}")
        outside = (self._starts < 0) | (self._starts > self._last_start[self._numbers])
        if outside.any():
            number, start = indices[outside][0].tolist()
            raise errors.AnswerCorrupt(f"a start lies outside {self._shards[number].path}: {start}")
        return len(indices)

    def gather(self, first: int, out: Tokens) -> None:
        """Copy selected windows from number `first` on; refuse shards that changed.

        out: `(rows, window)`, C order; any integer dtype that holds the shards' tokens.
        """
        numbers, starts = self._numbers[first : first + len(out)], self._starts[first : first + len(out)]
        touched = np.flatnonzero(np.bincount(numbers)).tolist()
        for number in touched:
            self._shards[number].check_unchanged()
        if self._all_windows is not None and self._shards[0].tokens.dtype == out.dtype:
            rows = torch.from_numpy(self._first_token[numbers] + starts)
            into = torch.from_numpy(out.view(_SIGNED[out.itemsize]))
            with self._openmp.limit(limits=1):
                torch.index_select(self._all_windows, 0, rows, out=into)
        else:
            rows_at_once = max(1, PIECE_BYTES // (self._window * out.itemsize))
            for number in touched:
                windows = np.lib.stride_tricks.sliding_window_view(self._shards[number].tokens, self._window)
                (places,) = np.nonzero(numbers == number)
                for at in range(0, len(places), rows_at_once):
                    piece = places[at : at + rows_at_once]
                    out[piece] = windows[starts[piece]]
        for number in touched:
            # After the copy: a file that was truncated under it reads zeros, not an error.
            self._shards[number].check_unchanged()

    def _view_of_all(self) -> torch.Tensor | None:
        """Return the addresses that hold all shards, as rows of windows.

        None: the shards differ in type or alignment, or lie too far apart.
        """
        kinds = {(shard.tokens.dtype, shard.address % shard.tokens.itemsize) for shard in self._shards}
        if len(kinds) != 1 or not all(len(shard.tokens) for shard in self._shards):
            return None
        ((dtype, _),) = kinds
        lowest = min(shard.address for shard in self._shards)
        num_bytes = max(shard.address + shard.tokens.nbytes for shard in self._shards) - lowest
        num_tokens = num_bytes // dtype.itemsize
        if num_tokens < self._window or num_tokens * self._window >= 2**62:
            return None
        self._first_token[:] = [(shard.address - lowest) // dtype.itemsize for shard in self._shards]
        # What lies between the maps is never read, and nothing is written.
        memory = memoryview((ctypes.c_char * num_bytes).from_address(lowest))
        tokens = torch.from_numpy(np.frombuffer(memory, _SIGNED[dtype.itemsize]))
        return tokens.as_strided((num_tokens - self._window + 1, self._window), (1, 1))
