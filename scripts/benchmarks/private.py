"""The private memory of a process: what would come back to the machine if it ended.

USS, the sum of all `Private_` lines of `/proc/PID/smaps`, also counts pages of a mapped file that only
one process maps. Of a corpus those are page cache, which stays when the process ends and which the
kernel takes whenever it likes; so maps of token files are left out here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)")
_SAMPLE_SECONDS = 0.05


def private_bytes(pid: int, *, leaving_out: Sequence[Path] = ()) -> int:
    """Private memory of a process, without the maps of files at or below some paths.

    It walks every mapped page: milliseconds for each GiB of them, in which the process cannot map.
    """
    total, counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Private_"):
            total += int(line.split()[1]) * 1024 * counted
        elif (head := _HEAD.fullmatch(line)) is not None:
            counted = not any(Path(head[1]).is_relative_to(path) for path in leaving_out)
    return total


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file stands behind; cheap to read, exact to about a MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"process {pid} has ended")


class Watch:
    """Follows the private memory of a process in a thread, from entering to leaving.

    Anonymous memory, nearly all of it, is sampled 20 times a second; what is private of program files
    hardly changes and is read at the end.

    Attributes:
        samples: (seconds since the start, private bytes), filled when the block ends.
    """

    def __init__(self, pid: int, *, leaving_out: Sequence[Path] = ()) -> None:
        self._pid = pid
        self._leaving_out = leaving_out
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="memory-watch", daemon=True)
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            of_files = private_bytes(self._pid, leaving_out=self._leaving_out) - anonymous_bytes(self._pid)
            self.samples = [(seconds, anonymous + of_files) for seconds, anonymous in self.samples]

    @property
    def peak_bytes(self) -> int:
        """The largest sample."""
        return max(num_bytes for _, num_bytes in self.samples)

    def _follow(self) -> None:
        began = time.perf_counter()
        while True:
            self.samples.append((time.perf_counter() - began, anonymous_bytes(self._pid)))
            if self._stop.wait(_SAMPLE_SECONDS):
                return
