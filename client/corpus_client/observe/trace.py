"""The last steps as a picture: rows of spans in the trace event format; and NVTX ranges.

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
from pathlib import Path
from typing import Any, NamedTuple

ROWS = ("requests", "fetcher", "transfers", "training loop")

_NOTHING = contextlib.nullcontext()


class Span(NamedTuple):
    """One bar of the picture; start and stop are seconds of `time.perf_counter`."""

    start: float
    stop: float
    row: str
    name: str
    arguments: dict[str, int]


class Tracer:
    """Keep the spans of the last `num_steps` steps, and mark NVTX ranges; without either it does nothing.

    `phase` and `fetch` belong to the fetcher thread, everything else to the training loop's.

    nvtx: `torch.cuda.nvtx`, whose ranges of the calling thread Nsight Systems shows.
    """

    def __init__(self, num_steps: int = 0, nvtx: Any = None) -> None:
        self.num_steps = num_steps
        self.active = num_steps > 0 or nvtx is not None
        self._nvtx = nvtx
        self._spans: deque[Span] = deque()
        self._transfers: deque[tuple[int, int, Any]] = deque()
        self._asked: deque[float] = deque(maxlen=num_steps or None)

    def phase(self, ended: str, since: float, now: float, begun: str) -> None:
        """Note that the fetcher goes from one phase to the next."""
        self._add(since, now, "fetcher", ended)
        if self._nvtx is not None:
            if ended == "receive":
                self._nvtx.range_pop()
            if begun == "receive":
                self._nvtx.range_push("receive")

    @contextlib.contextmanager
    def fetch(self, start_step: int, num_steps: int) -> Iterator[None]:
        """Return a context around awaiting the answer with these steps."""
        started = time.perf_counter()
        with self.range("fetch"):
            yield
        self._add(started, time.perf_counter(), "requests", "fetch", first_step=start_step, steps=num_steps)

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that is an NVTX range of the calling thread."""
        return _NOTHING if self._nvtx is None else self._nvtx.range(name)

    def transfer(self, start_step: int, num_steps: int, group: Any) -> None:
        """Note that the batches of these steps are being copied; `group.interval()` tells when, later."""
        if self.num_steps:
            self._transfers.append((start_step, num_steps, group))

    def ask(self, since: float, now: float) -> None:
        """Note that the training loop asks for a batch. since: when it got the last one."""
        if self._nvtx is not None:
            self._nvtx.range_push("wait")
        if self.num_steps:
            self._asked.append(now)
            if since < now:
                self._add(since, now, "training loop", "step")

    def get(self, since: float, now: float, step: int | None) -> None:
        """Note that the training loop goes on. since: when it asked; step: of the batch, if it got one."""
        if self._nvtx is not None:
            self._nvtx.range_pop()
        if self.num_steps:
            self._add(since, now, "training loop", "wait", **({} if step is None else {"step": step}))
            self._forget(step)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the spans of the last steps as JSON in the trace event format."""
        document = {"traceEvents": list(self._events()), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")

    def _add(self, start: float, stop: float, row: str, name: str, **arguments: int) -> None:
        if self.num_steps:
            self._spans.append(Span(start, stop, row, name, arguments))

    def _forget(self, step: int | None) -> None:
        """Drop what ended before the oldest of the last steps began."""
        while len(self._asked) == self.num_steps and self._spans and self._spans[0].stop < self._asked[0]:
            self._spans.popleft()
        while step is not None and self._transfers:
            start_step, num_steps, _ = self._transfers[0]
            if start_step + num_steps > step - self.num_steps:
                break
            self._transfers.popleft()

    def _events(self) -> Iterator[dict[str, Any]]:
        process = os.getpid()
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "corpus-client"}}
        for number, row in enumerate(ROWS, 1):
            where = {"ph": "M", "pid": process, "tid": number}
            yield {**where, "name": "thread_name", "args": {"name": row}}
            yield {**where, "name": "thread_sort_index", "args": {"sort_index": number}}
        spans = list(self._spans)
        for start_step, num_steps, group in self._transfers:
            if (interval := group.interval()) is not None:
                arguments = {"first_step": start_step, "steps": num_steps}
                spans.append(Span(interval[0], interval[1], "transfers", "transfer", arguments))
        for span in sorted(spans, key=lambda span: span.start):
            what = {"ph": "X", "name": span.name, "cat": span.row, "args": span.arguments}
            where = {"pid": process, "tid": ROWS.index(span.row) + 1}
            yield {**what, **where, "ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6}
