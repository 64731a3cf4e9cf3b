"""Measure what a disk delivers, tell whether bytes came from it, and limit processes in memory and disk."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

_GROUPS = Path("/sys/fs/cgroup")
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


@contextmanager
def limited(
    pids: Sequence[int], num_bytes: int, *, path: Path, disk_rate: int | None = None
) -> Iterator[bool]:
    """Limit processes until the block ends, by control groups of version 1 or 2.

    Yields whether that was possible: it takes root.

    Args:
        num_bytes: of memory, page cache included.
        path: a file on the disk.
        disk_rate: bytes/s that they may read from the disk.
    """
    device = path.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    version_1 = {_GROUPS / "memory": {"memory.limit_in_bytes": str(num_bytes)}}
    version_2 = {_GROUPS: {"memory.max": str(num_bytes)}}
    if disk_rate is not None:
        version_1[_GROUPS / "blkio"] = {"blkio.throttle.read_bps_device": f"{disk} {disk_rate}"}
        version_2[_GROUPS]["io.max"] = f"{disk} rbps={disk_rate}"
    groups: list[Path] = []
    try:
        yield any(_join(pids, limits, groups) for limits in (version_1, version_2))
    finally:
        for group in groups:
            # A group that holds processes cannot be removed.
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()


def _join(pids: Sequence[int], limits: dict[Path, dict[str, str]], groups: list[Path]) -> bool:
    """Put processes into new groups below these; return whether that was possible."""
    try:
        for root, files in limits.items():
            group = root / f"bench-{os.getpid()}-{pids[0]}"
            group.mkdir()
            groups.append(group)
            for name, text in files.items():
                (group / name).write_text(text)
            for pid in pids:
                (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True
