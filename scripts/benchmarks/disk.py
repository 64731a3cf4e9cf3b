"""What a disk delivers of windows at random places, and whether somebody's bytes came from it."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_KEPT_SHARE = 0.02
"""Of all pages: whoever opens a corpus reads a few of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """How many windows were read, and in what time."""

    num_windows: int
    seconds: float

    @property
    def windows_per_second(self) -> float:
        """The rate."""
        return self.num_windows / self.seconds


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
    """Return how much of a file the page cache holds, in [0, 1]; only its owner learns it (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        pages = np.empty(-(-data.nbytes // mmap.PAGESIZE), np.uint8)
        failed = libc.mincore(data.ctypes.data, data.nbytes, pages.ctypes.data)
        del data  # the map cannot be closed under it
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return float(np.mean(pages & 1))


def bytes_read(pids: Sequence[int]) -> int:
    """Return the bytes that disks have read for processes since they began, waited for or ahead."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))
    return total


def read_parallel(
    path: Path, offsets: npt.NDArray[np.int64], num_bytes: int, *, depth: int, seconds: float
) -> Read:
    """Read windows in turn with `depth` threads of `preadv`, until they end or the time is over.

    Args:
        offsets: `(windows,)` bytes.
        num_bytes: of a window.
    """
    counts = [0] * depth
    fd = os.open(path, os.O_RDONLY)
    began = time.perf_counter()

    def work(number: int) -> None:
        buffer = [bytearray(num_bytes)]
        for offset in offsets[number::depth].tolist():
            os.preadv(fd, buffer, offset)
            counts[number] += 1
            if counts[number] % 16 == 0 and time.perf_counter() - began > seconds:
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(depth)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Read(num_windows=sum(counts), seconds=time.perf_counter() - began)
    finally:
        os.close(fd)


def has_fio() -> bool:
    """Tell whether fio is installed."""
    return shutil.which("fio") is not None


@contextmanager
def fio_reading(path: Path, num_bytes: int, *, depth: int) -> Iterator[None]:
    """Let fio read windows of a file at random places until the block ends.

    Raises:
        RuntimeError: it ended before.
    """
    size = path.stat().st_size // num_bytes * num_bytes
    command = [
        "fio",
        "--name=reader",
        f"--filename={path}",
        "--readonly",
        "--rw=randread",
        f"--bs={num_bytes}",
    ]
    command += [
        f"--bs={num_bytes}",
        "--bs_unaligned=1",
        f"--size={size}",
        "--ioengine=psync",
        "--thread",
        f"--numjobs={depth}",
    ]
    command += ["--direct=0", "--invalidate=0", "--time_based", "--runtime=3600", "--norandommap"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(0.5)  # it sets up its threads
            yield
            if process.poll() is not None:
                raise RuntimeError(f"fio ended with {process.returncode}: {' '.join(command)}")
        finally:
            process.kill()


def read_with_fio(path: Path, offsets: npt.NDArray[np.int64], num_bytes: int, *, depth: int) -> Read:
    """Let fio read windows with `depth` threads through the page cache; its own clock counts."""
    depth = min(depth, len(offsets))
    with tempfile.TemporaryDirectory() as folder:
        # invalidate=0: the file was dropped, and others may be at work on it.
        job = "[global]\nioengine=psync\nthread=1\ndirect=0\ninvalidate=0\ngroup_reporting=1\n"
        for number in range(depth):
            log = Path(folder) / str(number)
            reads = "".join(f"{path} read {place} {num_bytes}\n" for place in offsets[number::depth].tolist())
            log.write_text(f"fio version 2 iolog\n{path} add\n{path} open\n{reads}{path} close\n")
            job += f"[reader{number}]\nread_iolog={log}\n"
        job_file = Path(folder) / "job.fio"
        job_file.write_text(job)
        command = ["fio", "--readonly", "--output-format=json", str(job_file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(done.stdout)["jobs"][0]["read"]
    if read["total_ios"] != len(offsets):
        raise RuntimeError(f"fio read {read['total_ios']} of {len(offsets)} windows: {done.stderr}")
    return Read(num_windows=len(offsets), seconds=max(read["runtime"], 1) / 1e3)
