"""Reused memory for answers, within a budget.

An answer that fits is gathered whole into one buffer, hashed there and sent from there. When the
budget is in use, by many or by stalled readers, an answer gets one small buffer and goes through
it piece by piece: slower, but memory stays bounded by budget + answers under way x piece.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 256 * 1024
MAX_WHOLE_BYTES = 16 * 2**20
"""Larger answers go in pieces: hashing and sending are then one pass each, at cache speed."""


class BufferPool:
    """Buffers of power-of-two sizes; used by the event loop's thread alone.

    Args:
        budget_bytes: buffers for whole answers, in use and kept for reuse, never exceed it together.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.leased_bytes = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._free_bytes = 0

    def lease(self, wanted_bytes: int, *, unit_bytes: int) -> NDArray[np.uint8]:
        """Return a buffer of at least `wanted_bytes` if it fits the budget, else a piece.

        Args:
            wanted_bytes: the whole answer.
            unit_bytes: what a piece must hold at least.
        """
        whole = _rounded(wanted_bytes)
        if wanted_bytes <= MAX_WHOLE_BYTES and self.leased_bytes + whole <= self.budget_bytes:
            return self._take(whole)
        return self._take(_rounded(max(min(PIECE_BYTES, wanted_bytes), unit_bytes)))

    def release(self, buffer: NDArray[np.uint8]) -> None:
        """Take a buffer back; nothing may read it any more."""
        self.leased_bytes -= buffer.nbytes
        self._free.setdefault(buffer.nbytes, []).append(buffer)
        self._free_bytes += buffer.nbytes
        self._trim()

    def _take(self, size: int) -> NDArray[np.uint8]:
        self.leased_bytes += size
        if kept := self._free.get(size):
            self._free_bytes -= size
            return kept.pop()
        self._trim()
        return np.empty(size, dtype=np.uint8)

    def _trim(self) -> None:
        """Forget kept buffers, largest first, while they and those in use exceed the budget."""
        for size in sorted(self._free, reverse=True):
            kept = self._free[size]
            while kept and self._free_bytes + self.leased_bytes > self.budget_bytes:
                kept.pop()
                self._free_bytes -= size


def _rounded(size: int) -> int:
    return max(4096, 1 << (size - 1).bit_length()) if size > 0 else 4096
