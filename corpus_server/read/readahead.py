"""Ask the kernel to read windows from disk, all of them in parallel, without waiting.

Otherwise a cold window is read when the copy reaches it, one after another. One `process_madvise` on the
own process takes 1,024 ranges (Linux 5.10); an older kernel needs one `madvise` for each range.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_MADV_WILLNEED = 3  # asm-generic/mman-common.h
_SYS_PROCESS_MADVISE = 440  # the same number on every architecture
_MAX_RANGES = 1024  # UIO_MAXIOV


def read_ahead(addresses: NDArray[np.uint64], num_bytes: int | NDArray[np.integer]) -> None:
    """Ask the kernel for ranges of `num_bytes`, of each or of all, at the byte addresses `(k,) uint64`.

    It is a hint: it never fails, not even for an unmapped range.
    """
    ranges = np.empty((len(addresses), 2), dtype=np.uint64)
    ranges[:, 0] = addresses & np.uint64(~(mmap.PAGESIZE - 1) & (2**64 - 1))
    ranges[:, 1] = addresses + np.asarray(num_bytes, dtype=np.uint64) - ranges[:, 0]
    libc = _libc()
    with _own_pid_fd() as pid_fd:
        for first in range(0, len(ranges), _MAX_RANGES):
            part = ranges[first : first + _MAX_RANGES]
            num_advised = -1
            if pid_fd >= 0:
                num_advised = libc.syscall(
                    ctypes.c_long(_SYS_PROCESS_MADVISE),
                    ctypes.c_int(pid_fd),
                    ctypes.c_void_p(part.ctypes.data),
                    ctypes.c_ulong(len(part)),
                    ctypes.c_int(_MADV_WILLNEED),
                    ctypes.c_uint(0),
                )
            if num_advised < 0:
                for address, length in part.tolist():
                    libc.madvise(address, length, _MADV_WILLNEED)


@contextlib.contextmanager
def _own_pid_fd() -> Iterator[int]:
    """Yield a descriptor of this process, or -1 if the system has none (before Linux 5.3, sandboxes)."""
    try:
        pid_fd = os.pidfd_open(os.getpid())
    except (OSError, AttributeError):
        yield -1
        return
    try:
        yield pid_fd
    finally:
        os.close(pid_fd)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
