"""Bring pages of mapped files into memory, many ranges in one system call.

`MADV_POPULATE_READ` reads a range and maps it, and answers EFAULT where a plain access would raise
SIGBUS (beyond the end of a truncated file, or after an I/O error): it is read-ahead and pre-check
in one. `process_madvise` on the own process takes 1,024 ranges at a time from Linux 6.13 on; 512
windows then cost about as much as ten calls of `madvise`. Older kernels get one call a range.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_MADV_POPULATE_READ = 22  # linux/mman.h, Linux 5.14
_MADV_WILLNEED = 3
_SYS_PROCESS_MADVISE = 440  # the same on every architecture
_MAX_RANGES = 1024  # UIO_MAXIOV
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EPERM}

Method = Literal["vectored", "single", "none"]


class PageFault(OSError):
    """A range of a map cannot be read: its file was truncated, or its disk failed."""


class Pager:
    """Populates ranges of this process's maps by the best means the kernel has.

    Attributes:
        method: `vectored`, `single` (a system call a range) or `none` (no Linux 5.14).
    """

    def __init__(self) -> None:
        self.method: Method = "none"
        if sys.platform != "linux":
            return
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._pid_fd = os.pidfd_open(os.getpid())
        probe = mmap.mmap(-1, mmap.PAGESIZE)
        view = np.frombuffer(probe, dtype=np.uint8)
        ranges = np.array([[view.ctypes.data, mmap.PAGESIZE]], dtype=np.uint64)
        for method in ("vectored", "single"):
            try:
                self._advise(ranges, _MADV_POPULATE_READ, method)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
            else:
                self.method = method
                break
        del view
        probe.close()

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        if self.method != "none" and self._pid_fd >= 0:
            os.close(self._pid_fd)
            self._pid_fd = -1

    def populate(self, addresses: NDArray[np.uint64], num_bytes: int | NDArray[np.uint64]) -> None:
        """Read ranges into memory and wait for them.

        Args:
            addresses: `(k,) uint64`, byte addresses inside live maps.
            num_bytes: length of each range.

        Raises:
            PageFault: a range cannot be read; touching it would have been a SIGBUS.
        """
        if self.method != "none":
            self._advise(_page_ranges(addresses, num_bytes), _MADV_POPULATE_READ, self.method)

    def read_ahead(self, addresses: NDArray[np.uint64], num_bytes: int | NDArray[np.uint64]) -> None:
        """Start reading ranges, all in parallel, without waiting; a hint that cannot fail."""
        if self.method == "none":
            return
        ranges = _page_ranges(addresses, num_bytes)
        try:
            # WILLNEED is accepted in vectored form since Linux 5.10.
            self._advise(ranges, _MADV_WILLNEED, "vectored")
        except OSError:
            for address, length in ranges.tolist():
                self._libc.madvise(address, length, _MADV_WILLNEED)

    def _advise(self, ranges: NDArray[np.uint64], advice: int, method: Method) -> None:
        """Apply advice to `(k, 2) uint64` page-aligned (address, length)."""
        if method == "single":
            for address, length in ranges.tolist():
                if self._libc.madvise(address, length, advice) != 0:
                    _raise(ctypes.get_errno())
            return
        for first in range(0, len(ranges), _MAX_RANGES):
            part = ranges[first : first + _MAX_RANGES]
            done = self._libc.syscall(
                _SYS_PROCESS_MADVISE,
                ctypes.c_int(self._pid_fd),
                ctypes.c_void_p(part.ctypes.data),
                ctypes.c_ulong(len(part)),
                ctypes.c_int(advice),
                ctypes.c_uint(0),
            )
            if done < 0:
                _raise(ctypes.get_errno())
            if done < int(part[:, 1].sum()):  # stopped at the first range that failed
                _raise(errno.EFAULT)


def _page_ranges(addresses: NDArray[np.uint64], num_bytes: int | NDArray[np.uint64]) -> NDArray[np.uint64]:
    ranges = np.empty((len(addresses), 2), dtype=np.uint64)
    ranges[:, 0] = addresses & np.uint64(~(mmap.PAGESIZE - 1) & (2**64 - 1))
    ranges[:, 1] = addresses + np.asarray(num_bytes, dtype=np.uint64) - ranges[:, 0]
    return ranges


def _raise(code: int) -> None:
    if code in _UNSUPPORTED:
        raise OSError(code, os.strerror(code))
    raise PageFault(code, os.strerror(code))
