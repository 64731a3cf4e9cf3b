"""The last steps as a picture: rows of spans in the trace event format.

Perfetto (ui.perfetto.dev) and chrome://tracing show the file. It has a row for the requests that are
awaited, with their steps; one for what the fetcher thread does about them; one for copies to the device;
one for the training loop with its waits. Times are microseconds of `time.perf_counter`. Format: "Trace
Event Format" of the Chromium project; complete events (`ph: X`) and thread names (`ph: M`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROWS = ("requests", "fetcher", "transfers", "training loop")


class Span(NamedTuple):
    """One bar of the picture; start and stop are seconds of `time.perf_counter`."""

    start: float
    stop: float
    row: str
    name: str
    arguments: dict[str, int]


def write(path: str | os.PathLike[str], spans: Iterable[Span]) -> None:
    """Write spans as JSON in the trace event format."""
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "corpus-client"}}
    ]
    for number, row in enumerate(ROWS, 1):
        where = {"ph": "M", "pid": process, "tid": number}
        events.append({**where, "name": "thread_name", "args": {"name": row}})
        events.append({**where, "name": "thread_sort_index", "args": {"sort_index": number}})
    for span in spans:
        what = {"ph": "X", "name": span.name, "cat": span.row, "args": span.arguments}
        where = {"pid": process, "tid": ROWS.index(span.row) + 1}
        events.append({**what, **where, "ts": span.start * 1e6, "dur": (span.stop - span.start) * 1e6})
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document), encoding="utf-8")
