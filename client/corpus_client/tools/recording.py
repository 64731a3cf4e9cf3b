"""When things happened in a run: the training loop by the host's clock, the device by its own events.

Both become seconds since the recorder was made. A recorder that is not `active` costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from corpus_client.tools.timeline import Kind, Span


class Recorder:
    """Spans of a run on a device. On the CPU a task is on its lane while the call runs."""

    def __init__(self, device: torch.device, *, active: bool) -> None:
        self.active = active
        self._cuda = device.type == "cuda"
        self._spans: list[Span] = []
        self._pairs: list[tuple[str, Kind, int, torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda and active:
            torch.cuda.synchronize(device)
            self._zero_event = _event()
        self._zero = time.perf_counter()

    def host(self, lane: str, kind: Kind, step: int) -> AbstractContextManager[None]:
        """What the calling thread does within the block."""
        return self._host(lane, kind, step) if self.active else nullcontext()

    def device(self, lane: str, kind: Kind, step: int) -> AbstractContextManager[None]:
        """What is queued within the block on the current stream."""
        if not self.active:
            return nullcontext()
        return self._device(lane, kind, step) if self._cuda else self._host(lane, kind, step)

    def add(self, lane: str, kind: Kind, step: int, start: float, stop: float) -> None:
        """What was measured elsewhere; `time.perf_counter` seconds."""
        begun, ended = start - self._zero, stop - self._zero
        self._spans.append(Span(lane=lane, kind=kind, step=step, start=begun, stop=ended))

    def spans(self) -> list[Span]:
        """All of them; waits for the device."""
        found = list(self._spans)
        for lane, kind, step, start, stop in self._pairs:
            stop.synchronize()
            begun, ended = (self._zero_event.elapsed_time(event) / 1e3 for event in (start, stop))
            found.append(Span(lane=lane, kind=kind, step=step, start=begun, stop=ended))
        return sorted(found, key=lambda span: span.start)

    @contextmanager
    def _host(self, lane: str, kind: Kind, step: int) -> Iterator[None]:
        start = time.perf_counter() - self._zero
        yield
        stop = time.perf_counter() - self._zero
        self._spans.append(Span(lane=lane, kind=kind, step=step, start=start, stop=stop))

    @contextmanager
    def _device(self, lane: str, kind: Kind, step: int) -> Iterator[None]:
        start = _event()
        yield
        self._pairs.append((lane, kind, step, start, _event()))


def _event() -> torch.cuda.Event:
    """An event recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
