"""Watch processes and latencies while something runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import psutil

MIB = 2**20
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the processes hold at a time.

    Args:
        seconds: since watching began.
        memory: bytes that the largest of them does not share with files.
    """

    seconds: float
    memory: int
    descriptors: int
    threads: int


class Watch:
    """Samples the largest of some processes once a second, from entering to leaving.

    Args:
        pids: called for each sample; processes come and go.
    """

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            memory = descriptors = threads = 0
            for pid in self._pids():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    status = process.memory_info()
                    memory = max(memory, status.rss - status.shared)
                    descriptors = max(descriptors, process.num_fds())
                    threads = max(threads, process.num_threads())
            self.samples.append(Sample(time.monotonic() - began, memory, descriptors, threads))
            if self._over.wait(SAMPLE_SECONDS):
                return

    def slope(self, name: str) -> float:
        """Return the growth an hour over the second half: the first half may fill caches."""
        half = self.samples[len(self.samples) // 2 :]
        if len(half) < 3:
            return 0.0
        seconds, values = ([getattr(each, what) for each in half] for what in ("seconds", name))
        return float(np.polyfit(seconds, values, 1)[0] * 3600)

    def table(self, num_rows: int = 10) -> list[str]:
        """Return memory, descriptors and threads over time, and their slopes, as a Markdown table."""
        lines = ["| minute | memory MiB | descriptors | threads |", "|--:|--:|--:|--:|"]
        for number in np.linspace(0, len(self.samples) - 1, num_rows).astype(int):
            each = self.samples[number]
            lines.append(
                f"| {each.seconds / 60:.1f} | {each.memory / MIB:.1f} | {each.descriptors} | {each.threads} |"
            )
        slopes = [self.slope(name) for name in ("memory", "descriptors", "threads")]
        lines.append(
            f"| slope an hour, second half | {slopes[0] / MIB:+.1f} | {slopes[1]:+.1f} | {slopes[2]:+.1f} |"
        )
        return lines


def percentiles(seconds: Sequence[float]) -> str:
    """Return p50 and p99 in milliseconds."""
    if not seconds:
        return "no answers"
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(seconds):,}"
