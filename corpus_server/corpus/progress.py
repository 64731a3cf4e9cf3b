"""How far a long work on a corpus has come."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[str, int, int, int], None]
"""Called after every piece, at least once a second, by one thread at a time: what is being done, how much of
it is done, how much there is in all (bytes, or what the caller shows), tokens that this run has made."""


class Meter:
    """Counts what is done, and reports progress; safe to use from several threads."""

    def __init__(self, what: str, total: int, report: Progress | None) -> None:
        self._what, self._done, self._total, self._report = what, 0, total, report
        self._lock = threading.Lock()
        self.add(0)

    def add(self, more: int) -> None:
        """Count what is done now."""
        with self._lock:
            self._done += more
            if self._report is not None:
                self._report(self._what, self._done, self._total, 0)
