"""How far a long reading of a corpus has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (bytes_done, bytes_total) after every piece, in the caller's thread."""


class ByteCounter:
    """Counts the bytes that are done, and those of them that were read from disk, and reports progress."""

    def __init__(self, bytes_total: int, report: Progress | None) -> None:
        self.bytes_done = self.bytes_read = 0
        self._bytes_total = bytes_total
        self._report = report

    def add(self, num_bytes: int, *, read: bool = True) -> None:
        """Count bytes that are done now; `read` says whether they were read from disk."""
        self.bytes_done += num_bytes
        self.bytes_read += num_bytes if read else 0
        if self._report is not None:
            self._report(self.bytes_done, self._bytes_total)
