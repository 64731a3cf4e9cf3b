"""What each thread has spent on reading, so that no two threads write to the same number."""

from __future__ import annotations

import threading
from typing import Any

_all: list[dict[str, Any]] = []


class _OfThread(threading.local):
    """Numbers of the calling thread.

    Attributes:
        locate_seconds: spent on finding out where rows lie.
        num_reads: pieces whose windows were copied.
        num_cold_reads: those that had to wait for the disk, as major page faults tell.
        num_faults: major page faults in them.
    """

    def __init__(self) -> None:
        self.locate_seconds = 0.0
        self.num_reads = self.num_cold_reads = self.num_faults = 0
        _all.append(self.__dict__)  # of this thread alone

    def count_read(self, num_faults: int) -> None:
        """Count a piece that was copied."""
        self.num_reads += 1
        if num_faults > 0:
            self.num_cold_reads += 1
            self.num_faults += num_faults


OF_THREAD = _OfThread()


def total(name: str) -> float:
    """Return the sum of an attribute over all threads, ended ones included."""
    return float(sum(each[name] for each in list(_all)))
