"""What the C library does with memory that was freed: keep some for the next piece of an answer.

Every piece is new memory. By default glibc gives most of it back to the kernel when it is freed, and takes
it again for the next piece: a page fault and a page to clear for every 4 KiB, together more than gathering
costs. An answer of 2 MiB took 230 faults and twice the time.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 4 * 2**20
"""Of freed memory at the end of each heap, of which every thread has one; larger blocks are given back."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed() -> bool:
    """Set it for this process; return whether its C library knows how."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, KEPT_BYTES) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))
