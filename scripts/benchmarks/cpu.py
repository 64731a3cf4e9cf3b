"""Read the CPU time of processes."""

from __future__ import annotations

import time
from collections.abc import Sequence


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of this process and others so far, of all their threads, user and system.

    Raises:
        ProcessLookupError: one of them has ended.
    """
    # A process's own clock (CPUCLOCK_SCHED of linux/posix-timers.h) counts nanoseconds; /proc counts
    # in hundredths of a second.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)
