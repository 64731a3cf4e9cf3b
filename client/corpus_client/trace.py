"""The last steps as a picture: rows of spans in the trace event format, and NVTX ranges.

Perfetto (ui.perfetto.dev) and chrome://tracing show the file. It has a row for the requests that are
awaited, with their steps; one for what the fetcher thread does about them; one for copies to the device;
one for the training loop with its waits. Times are microseconds of `time.perf_counter`. Format: "Trace
Event Format" of the Chromium project; complete events (`ph: X`) and thread names (`ph: M`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

Row = Literal["requests", "fetcher", "transfers", "training loop"]
ROWS: tuple[Row, ...] = get_args(Row)

_NOTHING = contextlib.nullcontext()


class Nvtx(Protocol):
    """`torch.cuda.nvtx`: ranges of the calling thread, shown by Nsight Systems."""

    def range_push(self, msg: str) -> Any:
        """Begin a range."""

    def range_pop(self) -> Any:
        """End the innermost one."""


class Timed(Protocol):
    """A copy whose time can be known later."""

    def interval(self) -> tuple[float, float] | None:
        """When it began and ended, `time.perf_counter` seconds; None: not measured, or not done."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time; seconds of `time.perf_counter`."""

    row: Row
    name: str
    start: float
    stop: float
    arguments: dict[str, Any] = field(default_factory=dict)


class Tracer:
    """Spans of the last `num_steps` steps, and NVTX ranges as things happen; with neither, nothing.

    `phase` and `fetch` belong to the fetcher thread, everything else to the training loop's.
    """

    def __init__(self, num_steps: int = 0, nvtx: Nvtx | None = None) -> None:
        self.num_steps = num_steps
        self.active = num_steps > 0 or nvtx is not None
        self._nvtx = nvtx
        self._spans: deque[Span] = deque()
        self._transfers: deque[tuple[int, int, Timed]] = deque()
        self._asked: deque[float] = deque(maxlen=num_steps or None)

    def phase(self, ended: str, since: float, now: float, begun: str) -> None:
        """The fetcher goes from one phase to the next."""
        self._add(Span("fetcher", ended, since, now))
        if self._nvtx is not None:
            if ended == "receive":
                self._nvtx.range_pop()
            if begun == "receive":
                self._nvtx.range_push("receive")

    def fetch(self, start_step: int, num_steps: int) -> contextlib.AbstractContextManager[None]:
        """Around awaiting the answer with these steps."""
        return self._fetching(start_step, num_steps) if self.active else _NOTHING

    def range(self, name: str) -> contextlib.AbstractContextManager[None]:
        """An NVTX range around a piece of code; the calling thread's."""
        return _NOTHING if self._nvtx is None else self._ranged(self._nvtx, name)

    def transfer(self, start_step: int, num_steps: int, transfer: Timed) -> None:
        """The batches of these steps are on their way to the device."""
        if self.num_steps:
            self._transfers.append((start_step, num_steps, transfer))

    def ask(self, since: float, now: float) -> None:
        """The training loop, busy `since` it got its last batch, asks for the next one."""
        if self._nvtx is not None:
            self._nvtx.range_push("wait")
        if self.num_steps:
            self._asked.append(now)
            if since < now:
                self._add(Span("training loop", "step", since, now))

    def get(self, since: float, now: float, step: int | None) -> None:
        """It asked `since`, and goes on; step: of the batch it got, if it got one."""
        if self._nvtx is not None:
            self._nvtx.range_pop()
        if self.num_steps:
            self._add(Span("training loop", "wait", since, now, {} if step is None else {"step": step}))
            self._forget(step)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write what is known of the last steps."""
        document = {"traceEvents": self._events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def _add(self, span: Span) -> None:
        if self.num_steps:
            self._spans.append(span)

    def _forget(self, step: int | None) -> None:
        """Drop what ended before the oldest of the last steps began."""
        while self._spans and self._spans[0].stop < self._asked[0]:
            self._spans.popleft()
        while step is not None and self._transfers:
            start_step, num_steps, _ = self._transfers[0]
            if start_step + num_steps > step - self.num_steps:
                break
            self._transfers.popleft()

    def _events(self) -> list[dict[str, Any]]:
        process = os.getpid()
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "corpus-client"}}
        ]
        for number, row in enumerate(ROWS, 1):
            where = {"pid": process, "tid": number}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": row}})
            events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": number}})
        spans = sorted([*tuple(self._spans), *self._transfer_spans()], key=lambda span: span.start)
        return events + [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.row,
                "pid": process,
                "tid": ROWS.index(span.row) + 1,
                "ts": span.start * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": span.arguments,
            }
            for span in spans
        ]

    def _transfer_spans(self) -> list[Span]:
        spans = []
        for start_step, num_steps, transfer in self._transfers:
            if (interval := transfer.interval()) is not None:
                arguments = {"first_step": start_step, "steps": num_steps}
                spans.append(Span("transfers", "transfer", *interval, arguments))
        return spans

    @contextlib.contextmanager
    def _fetching(self, start_step: int, num_steps: int) -> Iterator[None]:
        started = time.perf_counter()
        with self.range("fetch"):
            yield
        arguments = {"first_step": start_step, "steps": num_steps}
        self._add(Span("requests", "fetch", started, time.perf_counter(), arguments))

    @staticmethod
    @contextlib.contextmanager
    def _ranged(nvtx: Nvtx, name: str) -> Iterator[None]:
        nvtx.range_push(name)
        try:
            yield
        finally:
            nvtx.range_pop()
