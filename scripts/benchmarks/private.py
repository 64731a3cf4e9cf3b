"""Read the private memory of a process: what the machine would get back if the process ended.

USS, the sum of all `Private_` lines of `/proc/PID/smaps`, also counts pages of a mapped file that only
one process maps. Of a corpus those are page cache, which stays when the process ends and which the
kernel takes whenever it likes; so maps of token files are left out here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

_SAMPLE_SECONDS = 0.05


def private_bytes(pid: int, *, leaving_out: Sequence[Path] = ()) -> int:
    """Return the private memory of a process, without the maps of files at or below some paths.

    It walks every mapped page: milliseconds for each GiB of them, in which the process cannot map.
    """
    return sum(
        each.private_clean + each.private_dirty
        for each in psutil.Process(pid).memory_maps()
        if not any(Path(each.path).is_relative_to(path) for path in leaving_out)
    )


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; cheap to read, exact to about a MiB."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


class Peak:
    """The largest private memory that a process had in a block.

    Attributes:
        num_samples: taken so far.
        num_bytes: the largest one; right when the block has ended.
    """

    num_samples = num_bytes = 0


@contextmanager
def watched(pid: int, *, leaving_out: Sequence[Path] = ()) -> Iterator[Peak]:
    """Follow the private memory of a process in a thread.

    Anonymous memory, nearly all of it, is sampled 20 times a second; what is private of program files
    hardly changes and is read at the end.
    """
    peak, stop = Peak(), threading.Event()

    def follow() -> None:
        while not stop.wait(_SAMPLE_SECONDS):
            peak.num_bytes = max(peak.num_bytes, anonymous_bytes(pid))
            peak.num_samples += 1

    thread = threading.Thread(target=follow, name="memory-watch", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
    of_files = private_bytes(pid, leaving_out=leaving_out) - anonymous_bytes(pid)
    peak.num_bytes = max(peak.num_bytes, anonymous_bytes(pid)) + of_files
