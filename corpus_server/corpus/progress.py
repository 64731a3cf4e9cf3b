"""How far a long reading of a corpus has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes_done, bytes_total) after every piece, in the caller's thread."""


class ByteCounter:
    """Counts the bytes that are done, and reports progress."""

    def __init__(self, bytes_total: int, report: Progress | None) -> None:
        self._bytes_done, self._bytes_total, self._report = 0, bytes_total, report

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done now."""
        self._bytes_done += num_bytes
        if self._report is not None:
            self._report(self._bytes_done, self._bytes_total)
