"""What the C library does with memory that was freed: keep some for the next piece of an answer.

Every piece is new memory. By default glibc gives most of it back to the kernel when it is freed, and takes
it again for the next piece: a page fault and a page to clear for every 4 KiB, together more than gathering
costs. An answer of 2 MiB took 230 faults and twice the time.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 4 * 2**20
"""Of freed memory at the end of each heap, of which every thread has one; larger blocks are given back."""

TRIMMED_FROM_BYTES = 2 * KEPT_BYTES
"""Of freed memory there: more than pieces come to, which would else wander up to it and begin anew."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def keep_freed() -> bool:
    """Set it for this process; return whether its C library knows how."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = {_M_TRIM_THRESHOLD: TRIMMED_FROM_BYTES, _M_TOP_PAD: KEPT_BYTES, _M_MMAP_THRESHOLD: KEPT_BYTES}
    return all(mallopt(option, num_bytes) for option, num_bytes in options.items())
