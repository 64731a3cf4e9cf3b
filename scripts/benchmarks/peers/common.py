"""What the peers' servers share: which windows a step has, and how their address becomes known."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

REQUEST = struct.Struct("<QII")
"""step, rows, window length."""

MESSAGE_BYTES = 1 << 20
"""gRPC and Flight send so many bytes at a time: single batches of 64 x 1,025 are delivered half as fast."""


def starts_of(step: int, num_tokens: int, rows: int, length: int) -> npt.NDArray[np.int64]:
    """Return the window starts of a step, `(rows,) int64`, as every peer computes them."""
    return np.random.default_rng(step).integers(0, num_tokens - length, rows)


def steps_per_message(rows: int, length: int) -> int:
    """Return how many steps gRPC and Flight put into one message."""
    return max(1, MESSAGE_BYTES // (2 * rows * length))


class Windows:
    """The windows of a mapped corpus of uint16 tokens, gathered or pointed at."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, dtype=np.uint16, mode="r")
        self._bytes = self._data.data.cast("B")
        self._views: dict[int, npt.NDArray[np.uint16]] = {}

    def gather(self, step: int, rows: int, length: int) -> npt.NDArray[np.uint16]:
        """Copy a step's windows, `(rows, length)` uint16, C order, into an array that the caller owns.

        One fancy index is the fastest gather that NumPy has.
        """
        tokens: npt.NDArray[np.uint16] = self._view(length)[starts_of(step, len(self._data), rows, length)]
        return tokens

    def gather_steps(self, step: int, count: int, rows: int, length: int) -> npt.NDArray[np.uint16]:
        """Copy the windows of consecutive steps, `(count * rows, length)`, as `gather` does."""
        steps = range(step, step + count)
        starts = np.concatenate([starts_of(each, len(self._data), rows, length) for each in steps])
        tokens: npt.NDArray[np.uint16] = self._view(length)[starts]
        return tokens

    def slices(self, step: int, rows: int, length: int) -> list[memoryview]:
        """Return views of a step's windows in the map, `2 * length` bytes each."""
        starts = starts_of(step, len(self._data), rows, length)
        return [self._bytes[2 * start : 2 * (start + length)] for start in starts.tolist()]

    def _view(self, length: int) -> npt.NDArray[np.uint16]:
        if length not in self._views:
            self._views[length] = np.lib.stride_tricks.sliding_window_view(self._data, length)
        return self._views[length]


def publish(address_file: Path, address: str) -> None:
    """Say where the server listens; the file appears with its content."""
    partial = address_file.with_suffix(".partial")
    partial.write_text(address)
    partial.rename(address_file)
