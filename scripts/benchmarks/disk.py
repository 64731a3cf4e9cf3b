"""Measure what a disk delivers of windows at random places, and tell whether bytes came from it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

_KEPT_SHARE = 0.02  # of all pages: opening a corpus reads a few of them


def drop(path: Path) -> None:
    """Take a file out of the page cache.

    Raises:
        RuntimeError: it stays there: a process has it mapped, or the file system has no disk.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    kept = _resident_share(path)
    if kept > _KEPT_SHARE:
        raise RuntimeError(
            f"{kept:.0%} of {path} stay in memory; end the processes that map it, or put it on a disk"
        )


def _resident_share(path: Path) -> float:
    """Return how much of a file the page cache holds, in [0, 1]; mincore tells only its owner."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        pages = np.empty(-(-data.nbytes // mmap.PAGESIZE), np.uint8)
        failed = libc.mincore(data.ctypes.data, data.nbytes, pages.ctypes.data)
        del data  # the map cannot be closed while an array refers to it
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(np.mean(pages & 1))


def warm_memory(num_bytes: int) -> None:
    """Use memory and free it, so that the page cache that is filled next gets pages that the machine has.

    A virtual machine returns free memory to its host within seconds. To get it back costs more than to copy:
    here, filling the page cache is four times as slow 3 s after the memory was freed as right afterwards.
    """
    np.ones(num_bytes, np.uint8)


def bytes_read(pids: Sequence[int]) -> int:
    """Return the bytes that disks have read for processes since they began."""
    return sum(psutil.Process(pid).io_counters().read_bytes for pid in pids)


def read_parallel(
    path: Path, offsets: npt.NDArray[np.int64], num_bytes: int, *, depth: int, seconds: float
) -> tuple[int, float]:
    """Read windows in turn with `depth` threads of `preadv`, until they end or the time is over.

    Args:
        offsets: `(windows,)` bytes.
        num_bytes: of a window.

    Returns:
        How many windows were read, and the seconds that it took.
    """
    began = time.perf_counter()

    def work(number: int) -> int:
        buffer, count = [bytearray(num_bytes)], 0
        for offset in offsets[number::depth].tolist():
            os.preadv(file.fileno(), buffer, offset)
            count += 1
            if count % 16 == 0 and time.perf_counter() - began > seconds:
                break
        return count

    with path.open("rb") as file, ThreadPoolExecutor(depth) as threads:
        return sum(threads.map(work, range(depth))), time.perf_counter() - began
