"""The recorder of one loader: phases of the fetcher, waits of the training loop, spans of the last steps.

`enter` and `fetching` belong to the fetcher thread, everything else to the training loop's; `reading` and
`stats` may be called from any.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from corpus_client import errors
from corpus_client.observe.attribution import FetchSeconds, LoaderStats, Phase, WaitSeconds

ROWS = ("requests", "fetcher", "transfers", "training loop")


class Span(NamedTuple):
    """One bar of the picture; start and stop are seconds of `time.perf_counter`."""

    start: float
    stop: float
    row: str
    name: str
    arguments: dict[str, int]


class Recorder:
    """Measures phases and waits, keeps the spans of the last `num_steps` steps, and marks NVTX ranges.

    nvtx: `torch.cuda.nvtx`, whose ranges of the calling thread Nsight Systems shows; None: no ranges.
    """

    def __init__(self, num_steps: int = 0, nvtx: Any = None) -> None:
        self.num_steps = num_steps
        self.received_bytes = self.num_retries = self.num_hedged = 0  # as in `LoaderStats`
        self.yielded_step: int | None = None  # the loader's last one, which requests tell the server
        self._nvtx = nvtx
        self._lock = threading.Lock()
        self._phase: Phase = "idle"
        self._since = time.perf_counter()
        self._seconds = {each.name: 0.0 for each in fields(FetchSeconds)}
        self._for_slots = WaitSeconds()
        self._wait_seconds = self._upload_seconds = 0.0
        self._first_asked: float | None = None
        self._asked = self._yielded = 0.0
        self._spans: deque[Span] = deque()
        self._copies: deque[tuple[int, int, Any]] = deque()
        self._asked_lately: deque[float] = deque(maxlen=num_steps or None)

    def enter(self, phase: Phase, *, server_seconds: float = 0.0, staging_seconds: float = 0.0) -> None:
        """End the present phase and begin another.

        server_seconds: of the phase that ends, what the server says it took; staging_seconds: of these, how
        long it waited for its object store.
        """
        now = time.perf_counter()
        with self._lock:
            ended, since = self._phase, self._since
            self._seconds[ended] += now - since
            staging = min(staging_seconds, now - since)
            self._seconds["staging"] += staging
            self._seconds["server"] += max(0.0, min(server_seconds, now - since) - staging)
            self._phase, self._since = phase, now
        self._add(since, now, "fetcher", ended)
        if self._nvtx is not None:
            if ended == "receive":
                self._nvtx.range_pop()
            if phase == "receive":
                self._nvtx.range_push("receive")

    @contextlib.contextmanager
    def fetching(self, first_step: int, num_steps: int) -> Iterator[None]:
        """Return a context around awaiting the response with these steps."""
        started = time.perf_counter()
        with self._range("fetch"):
            yield
        self._add(started, time.perf_counter(), "requests", "fetch", first_step=first_step, steps=num_steps)

    def reading(self) -> FetchSeconds:
        """Return the seconds in each phase, the present one included."""
        now = time.perf_counter()
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._phase] += now - self._since
        return FetchSeconds(**seconds)

    def ask(self) -> None:
        """Note that the training loop asks for a batch, or begins to prepare for it."""
        self._asked = time.perf_counter()
        if self._first_asked is None:
            self._first_asked = self._yielded = self._asked
        if self._nvtx is not None:
            self._nvtx.range_push("wait")
        if self.num_steps:
            self._asked_lately.append(self._asked)
            if self._yielded < self._asked:
                self._add(self._yielded, self._asked, "training loop", "step")

    def get(self, step: int | None) -> None:
        """Note that the training loop got the batch of a step; None if no batch was returned."""
        self._yielded = time.perf_counter()
        self._wait_seconds += self._yielded - self._asked
        if self._nvtx is not None:
            self._nvtx.range_pop()
        if self.num_steps:
            arguments = {} if step is None else {"step": step}
            self._add(self._asked, self._yielded, "training loop", "wait", **arguments)
            self._forget(step)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context around a wait for a slot, which is counted by cause."""
        before = self.reading()
        try:
            yield
        finally:
            self._for_slots += WaitSeconds.during(self.reading() - before)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Return a context around queueing a copy."""
        started = time.perf_counter()
        with self._range("transfer"):
            yield
        self._upload_seconds += time.perf_counter() - started

    def uploaded(self, first_step: int, num_steps: int, group: Any) -> None:
        """Note that the batches of these steps are being copied; `group.interval()` tells when, later."""
        if self.num_steps:
            self._copies.append((first_step, num_steps, group))

    def stats(self, *, copies_on_host: bool) -> LoaderStats:
        """Return the times. copies_on_host: whether this CPU copies batches, rather than ask a device to."""
        wait = self._for_slots
        if not copies_on_host:
            wait += WaitSeconds(transfer=self._upload_seconds)
        others = wait.network + wait.server + wait.transfer + wait.retry + wait.bucket
        return LoaderStats(
            seconds=0.0 if self._first_asked is None else self._yielded - self._first_asked,
            wait_seconds=self._wait_seconds,
            # What remains is this thread's own work: copies, and handing over.
            wait=replace(wait, host=max(0.0, self._wait_seconds - others)),
            fetch=self.reading(),
            received_bytes=self.received_bytes,
            num_retries=self.num_retries,
            num_hedged=self.num_hedged,
        )

    def spans(self) -> list[Span]:
        """Return the spans of the last steps in the order of their beginning."""
        found = list(self._spans)
        for first_step, num_steps, group in self._copies:
            if (interval := group.interval()) is not None:
                arguments = {"first_step": first_step, "steps": num_steps}
                found.append(Span(interval[0], interval[1], "transfers", "transfer", arguments))
        return sorted(found, key=lambda span: span.start)

    def _range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._nvtx is None else self._nvtx.range(name)

    def _add(self, start: float, stop: float, row: str, name: str, **arguments: int) -> None:
        if self.num_steps:
            self._spans.append(Span(start, stop, row, name, arguments))

    def _forget(self, step: int | None) -> None:
        """Drop what ended before the oldest of the last steps began."""
        asked = self._asked_lately
        while len(asked) == self.num_steps and self._spans and self._spans[0].stop < asked[0]:
            self._spans.popleft()
        while step is not None and self._copies:
            first_step, num_steps, _ = self._copies[0]
            if first_step + num_steps > step - self.num_steps:
                break
            self._copies.popleft()


def write_trace(path: str | os.PathLike[str], recorder: Recorder) -> None:
    """Write a recorder's spans as a picture for Perfetto (ui.perfetto.dev) or chrome://tracing.

    Times are microseconds of `time.perf_counter`. Format: "Trace Event Format" of the Chromium project, with
    complete events (`ph: X`) and thread names (`ph: M`).
    """
    if not recorder.num_steps:
        raise errors.InvalidArgument(
            "trace needs the last steps, and trace_steps is 0; pass staging=Staging(trace_steps=200)"
        )
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "corpus-client"}}
    ]
    for number, row in enumerate(ROWS, 1):
        where = {"ph": "M", "pid": process, "tid": number}
        events.append({**where, "name": "thread_name", "args": {"name": row}})
        events.append({**where, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in recorder.spans():
        what = {"ph": "X", "name": span.name, "cat": span.row, "args": span.arguments}
        where = {"pid": process, "tid": ROWS.index(span.row) + 1}
        events.append({**what, **where, "ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6})
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")
