"""How long something takes: on the host's clock, or between two events of a GPU.

A call that queues work on a GPU returns before the work is done, so two durations belong to it: how long
the call held the CPU, and how long it took until its work was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

WARM_UPS = 2
LEAST_REPEATS = 3
LIMIT_SECONDS = 2.0
"""After so long a measurement is repeated no more, once it has been made `LEAST_REPEATS` times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds of one thing measured `repeats` times."""

    median: float
    p10: float
    p90: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Median and deciles of these."""
        p10, median, p90 = np.percentile(seconds, [10, 50, 90])
        return cls(median=float(median), p10=float(p10), p90=float(p90), repeats=len(seconds))

    def divided(self, parts: int) -> Spread:
        """The same for one of `parts` equal parts."""
        return Spread(
            median=self.median / parts, p10=self.p10 / parts, p90=self.p90 / parts, repeats=self.repeats
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """A call timed: until its work was `done`, and how long it `held` the CPU."""

    done: Spread
    held: Spread


Call = Callable[[], object]


class Meter(Protocol):
    """A clock that belongs to a device."""

    @property
    def device(self) -> torch.device:
        """Where the work is done."""

    def time(self, call: Call, *, repeats: int, before: Call | None = None) -> Timing:
        """Warm up, then call again and again; `before` runs ahead of each one and is not timed."""

    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """Within it, work is queued on one further stream, beside the current one."""


def open_meter(device: torch.device) -> Meter:
    """The clock for this device; a CUDA device becomes the current one."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter()


def pinned_like(tensor: torch.Tensor, meter: Meter) -> torch.Tensor:
    """Memory of the same size and content that the meter's device can read by itself."""
    return tensor.pin_memory() if meter.device.type == "cuda" else tensor.clone()


def _enough(done: Sequence[float], repeats: int) -> bool:
    return len(done) >= repeats or (len(done) >= LEAST_REPEATS and sum(done) > LIMIT_SECONDS)


class HostMeter:
    """`time.perf_counter`; nothing is queued, so a call holds the CPU as long as it takes."""

    device = torch.device("cpu")

    def time(self, call: Call, *, repeats: int, before: Call | None = None) -> Timing:
        """See `Meter`."""
        done: list[float] = []
        for number in range(WARM_UPS + repeats):
            if before is not None:
                before()
            began = time.perf_counter()
            call()
            seconds = time.perf_counter() - began
            if number >= WARM_UPS:
                done.append(seconds)
                if _enough(done, repeats):
                    break
        return Timing(done=Spread.of(done), held=Spread.of(done))

    def synchronize(self) -> None:
        """Nothing is queued."""

    def side_stream(self) -> AbstractContextManager[Any]:
        """There is one order only."""
        return nullcontext()


class CudaMeter:
    """Events of the current stream for `done`, the host's clock around the call for `held`.

    The device is idle when a call is made, unless `before` has queued something; then `done` counts from
    the end of that.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def time(self, call: Call, *, repeats: int, before: Call | None = None) -> Timing:
        """See `Meter`."""
        done: list[float] = []
        held: list[float] = []
        for number in range(WARM_UPS + repeats):
            self.synchronize()
            if before is not None:
                before()
            start, stop = _timing_event(), _timing_event()
            start.record()
            began = time.perf_counter()
            call()
            call_seconds = time.perf_counter() - began
            stop.record()
            stop.synchronize()
            if number >= WARM_UPS:
                held.append(call_seconds)
                done.append(start.elapsed_time(stop) / 1e3)
                if _enough(done, repeats):
                    break
        return Timing(done=Spread.of(done), held=Spread.of(held))

    def synchronize(self) -> None:
        """Wait for every stream of the device."""
        torch.cuda.synchronize(self.device)

    def side_stream(self) -> AbstractContextManager[Any]:
        """The meter's own stream."""
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return stream


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
