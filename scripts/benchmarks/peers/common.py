"""Share among the peers' servers which windows a step has and how their address becomes known."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.servers import Address

REQUEST = struct.Struct("<IQIII")
"""way to send, first step, steps, rows, window length."""


def starts_of(step: int, count: int, num_tokens: int, rows: int, length: int) -> npt.NDArray[np.int64]:
    """Return the window starts of consecutive steps, `(count * rows,) int64`, as every peer computes them.

    A mixing function of the row's number (splitmix64 without its last round), because NumPy's generators
    take 15 microseconds to be seeded for a step: a quarter of what the limit needs for one of 64 x 1,025.
    """
    mixed = np.arange(step * rows + 1, (step + count) * rows + 1, dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    return (mixed % np.uint64(num_tokens - length)).astype(np.int64)


class Peer:
    """Share what the consumers of all peers have; see `Contender`.

    Args:
        peer: its server.
        ahead_bytes: as of `Contender`.
    """

    def __init__(self, name: str, peer: Address, shape: Shape, ahead_bytes: int) -> None:
        self.name, self.pids, self.ahead_bytes = name, peer.pids, ahead_bytes
        self._shape, self._num_tokens = shape, peer.num_tokens

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return starts_of(step, 1, self._num_tokens, self._shape.rows, self._shape.length)


class Windows:
    """Gather or slice the windows of a mapped corpus of uint16 tokens; used by one thread."""

    def __init__(self, path: Path) -> None:
        # As a plain array: slicing a memmap object costs a microsecond more.
        self._data = np.asarray(np.memmap(path, dtype=np.uint16, mode="r"))
        self._bytes = self._data.data.cast("B")
        self._views: dict[int, npt.NDArray[np.uint16]] = {}

    def starts(self, step: int, count: int, rows: int, length: int) -> npt.NDArray[np.int64]:
        """Return where the windows of consecutive steps begin, `(count * rows,)`."""
        return starts_of(step, count, len(self._data), rows, length)

    def gather(self, step: int, count: int, rows: int, length: int) -> npt.NDArray[np.uint16]:
        """Copy the windows of consecutive steps, `(count * rows, length)`, C order, into a new array.

        One fancy index is the fastest gather that NumPy has.
        """
        tokens: npt.NDArray[np.uint16] = self._view(length)[self.starts(step, count, rows, length)]
        return tokens

    def copy(self, starts: npt.NDArray[np.int64], length: int, into: npt.NDArray[np.uint16]) -> None:
        """Copy windows one after another into `into`, `(len(starts) * length,)`, without new memory."""
        np.concatenate([self._data[start : start + length] for start in starts.tolist()], out=into)

    def slices(self, step: int, rows: int, length: int) -> list[memoryview]:
        """Return views of a step's windows in the map, `2 * length` bytes each."""
        starts = self.starts(step, 1, rows, length)
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
