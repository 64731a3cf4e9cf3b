"""Prometheus metrics, right under several worker processes, and the limit on a URL's length.

prometheus-client reads `PROMETHEUS_MULTIPROC_DIR` when it is imported; `serve` sets it before the
workers start. Nobody marks a killed worker dead, so each scrape reaps the gauges of those gone.
"""

from __future__ import annotations

import os
import re
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)
from starlette.types import Message, Receive, Scope, Send

from corpus_server.web.connection import connection_of
from corpus_server.web.problems import problem

if TYPE_CHECKING:
    from corpus_server.web.hot import HotPath
    from corpus_server.web.lane import Lane

MAX_URL_BYTES = 8192

REQUESTS = Counter("corpus_requests", "Requests answered.", ["route", "status"])
SECONDS = Histogram(
    "corpus_request_seconds",
    "Seconds from the request's head to the last byte handed to the kernel.",
    ["route"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0),
)
SENT = Counter("corpus_sent_bytes", "Body bytes sent.", ["route"])
READ_AHEAD = Counter("corpus_read_ahead_bytes", "Bytes of windows asked of the disk ahead of requests.")
ACTIVE = Gauge("corpus_active_requests", "Requests under way.", multiprocess_mode="livesum")

_GAUGE_FILE = re.compile(r"gauge_live\w*_(\d+)\.db")


def is_running(pid: int) -> bool:
    """Tell whether a process of that number runs; one that is dead and not yet waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def render() -> bytes:
    """Return the metrics of all live and past workers as Prometheus text."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        return generate_latest(REGISTRY)
    for path in Path(folder).iterdir():
        match = _GAUGE_FILE.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            multiprocess.mark_process_dead(int(match[1]), folder)  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def count(route: str, status: int, sent_bytes: int, seconds: float) -> None:
    """Count one request that was answered."""
    requests, sent, took = _series(route, status)
    requests.inc()
    sent.inc(sent_bytes)
    took.observe(seconds)


@cache
def _series(route: str, status: int) -> tuple[Counter, Counter, Histogram]:
    # Looking one up by its labels costs more than counting; there are as many as routes and statuses.
    return REQUESTS.labels(route, str(status)), SENT.labels(route), SECONDS.labels(route)


class Measured:
    """ASGI middleware: counts every request by route template, refuses URLs beyond the limit."""

    def __init__(self, app: HotPath) -> None:
        self._app = app

    @property
    def lane(self) -> Lane | None:
        """The short way past the framework, which counts for itself; None until there is one."""
        return self._app.lane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and observe its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        sent = 0
        began = time.perf_counter()

        async def observed(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            elif scope["method"] != "HEAD":  # the protocol drops the body of those
                sent += len(message.get("body", b""))
            await send(message)

        ACTIVE.inc()
        try:
            if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_URL_BYTES:
                answer = problem(414, "url-too-long", f"the URL exceeds {MAX_URL_BYTES} bytes")
                await answer(scope, receive, observed)
            else:
                await self._app(scope, receive, observed)
        finally:
            ACTIVE.dec()
            connection = connection_of(scope)
            if connection is not None and connection.sent_bytes:
                status, sent = 200, connection.sent_bytes
            route = getattr(scope.get("route"), "path", "unknown")
            count(route, status, sent, time.perf_counter() - began)
