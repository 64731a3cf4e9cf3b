"""Sizes and durations as people write them; how long a call takes, and how long it holds the CPU.

A call that queues work on a GPU returns before the work is done, so the two differ.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from corpus_client import errors
from corpus_client.staging.ring import runtime_of

WARM_UPS = 2
LEAST_REPEATS = 3
LIMIT_SECONDS = 2.0  # of one measurement, once it was repeated `LEAST_REPEATS` times

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
LEAST, MOST = 64, 64 << 30

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Percentiles of one figure that was measured `repeats` times."""

    median: float
    p10: float
    p90: float
    p99: float
    repeats: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Spread:
        """Return the spread of these figures."""
        p10, median, p90, p99 = map(float, np.percentile(figures, [10, 50, 90, 99]))
        return cls(median=median, p10=p10, p90=p90, p99=p99, repeats=len(figures))


class Clock:
    """A clock that belongs to a device, which becomes the current one.

    An accelerator with streams times its work by events, and is idle when the first call is made.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.runtime = device, runtime_of(device)
        if self.runtime is not None:
            self.runtime.set_device(device)

    def measure(
        self, name: str, num_bytes: int, call: Call, repeats: int, in_a_row: int = 1
    ) -> dict[str, Any]:
        """Return what `time` measures of a call that moves bytes, as a report has it."""
        seconds, held = self.time(call, repeats=repeats, in_a_row=in_a_row)
        figures = {"name": name, "bytes": num_bytes, "bytes_per_second": num_bytes / seconds.median}
        return {**figures, "seconds": asdict(seconds), "held": asdict(held)}

    def time(self, call: Call, *, repeats: int, in_a_row: int = 1) -> tuple[Spread, Spread]:
        """Warm up, then measure; each measurement is of `in_a_row` calls, one after the other.

        Returns seconds of one call until its work was done, and seconds for which it held the CPU.
        """
        timed: list[tuple[float, float]] = []
        for number in range(WARM_UPS + repeats):
            self.synchronize()
            start = self.event()
            began = time.perf_counter()
            for _ in range(in_a_row):
                call()
            done = held = time.perf_counter() - began
            if start is not None:
                stop = self.event()
                stop.synchronize()
                done = start.elapsed_time(stop) / 1e3
            if number >= WARM_UPS:
                timed.append((done / in_a_row, held / in_a_row))
            if len(timed) >= LEAST_REPEATS and sum(each for each, _ in timed) * in_a_row > LIMIT_SECONDS:
                break
        done_seconds, held_seconds = zip(*timed, strict=True)
        return Spread.of(done_seconds), Spread.of(held_seconds)

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        if self.runtime is not None:
            self.runtime.synchronize(self.device)

    def event(self) -> Any:
        """Return an event with a time, recorded on the current stream; None where there are no streams."""
        if self.runtime is None:
            return None
        event = self.runtime.Event(enable_timing=True)
        event.record()
        return event


def parse_size(text: str) -> int:
    """Return the bytes of one size, a whole number of a known unit."""
    match = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    size = int(match[1]) * UNITS.get(match[2], 0) if match else 0
    if not LEAST <= size <= MOST:
        raise errors.InvalidArgument(
            f"a size must be a whole number of B, kB, MB, GB, KiB, MiB or GiB in [{LEAST}B, 64GiB], "
            f"got {text!r}"
        )
    return size


def size_name(num_bytes: float) -> str:
    """Return a short name in binary units: `4 KiB`, `7.629 MiB`."""
    power = min(int(math.log2(max(num_bytes, 1))) // 10, 3)
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def seconds_name(seconds: float) -> str:
    """Return a short name in the unit that fits: `1.2 us`, `35 ms`."""
    unit, factor = next((each for each in SECONDS if seconds >= each[1]), SECONDS[-1])
    count = seconds / factor
    return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
