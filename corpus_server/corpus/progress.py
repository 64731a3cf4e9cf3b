"""How far a long work on a corpus has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int, int], None]
"""Called after every piece, in the caller's thread: what is being done, bytes done, bytes in all, tokens that
this run has made."""


class ByteCounter:
    """Counts the bytes that are done, and reports progress."""

    def __init__(self, what: str, bytes_total: int, report: Progress | None) -> None:
        self._what, self._bytes_done, self._bytes_total, self._report = what, 0, bytes_total, report

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done now."""
        self._bytes_done += num_bytes
        if self._report is not None:
            self._report(self._what, self._bytes_done, self._bytes_total, 0)
