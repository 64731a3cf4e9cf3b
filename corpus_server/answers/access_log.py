"""What becomes known of a request once it is answered: its counts, its line in the log, its trace.

Traces are OpenTelemetry spans, sent by OTLP over HTTP; nothing of it is imported unless it is asked for. The
standard variables configure it: `OTEL_EXPORTER_OTLP_ENDPOINT` turns it on, `OTEL_TRACES_SAMPLER`,
`OTEL_SERVICE_NAME` and the others work as everywhere. A span is made when its request is done, from times
that are measured anyway, so a request under way carries nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corpus_server import metrics
from corpus_server.admission.request import RequestHead

SLOW_SECONDS = 1.0
"""A response that took longer is notable; the median of small ones is below a millisecond."""

MAX_LINES = 20
"""Notable lines in a second of a process: what is refused must not fill the disk, and a line costs as much as
a refusal."""

MAX_METHOD = 32
"""Characters of a method in lines and spans; a client may send as many as fit into a head."""

STOP_SECONDS = 1.0
"""For sending the last spans to a collector that may be gone."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_log = logging.getLogger("corpus_server")
_provider: Any = None  # of spans; None: nobody wants any


# Not frozen: making one would cost as much as counting it.
@dataclass(kw_only=True, slots=True)
class Answered:
    """A request and its response, which was sent or cut.

    Args:
        request: what is known of its head.
        route: template of the path, `unknown` for none, `refused` for what its head alone decided.
        via: which path answered, `fast-path` or `application`.
        status: of the response.
        sent_bytes: of its body.
        seconds: from the request's head to the last byte handed to the kernel.
        problem_type: of a problem document.
        stages: seconds of each of `metrics.STAGES`, if they are known.
    """

    request: RequestHead
    route: str
    via: str
    status: int
    sent_bytes: int
    seconds: float = 0.0
    problem_type: str = ""
    stages: Sequence[float] = ()


class Requests:
    """Counts, logs and traces what was answered; for the event loop's thread.

    Args:
        logs: which requests get a line: `all`, `notable` for those that failed or were slow, or `off`. Lines
            for all cost 6 to 8 % of the throughput (`scripts/bench seeing`).
    """

    def __init__(self, logs: str) -> None:
        self._logs = logs
        self._second = 0
        self._num_lines = 0

    def done(self, answered: Answered) -> None:
        """Note a request that was answered."""
        status = answered.status
        metrics.count(answered.route, status, answered.sent_bytes, answered.seconds, via=answered.via)
        if answered.stages:
            metrics.count_stages(answered.stages)
        if answered.problem_type:
            metrics.REFUSALS.add(1, answered.problem_type)
        if _provider is not None:
            _trace(answered)
        is_notable = answered.seconds > SLOW_SECONDS or not (200 <= status < 300 or status == 304)
        if self._logs == "all" or (is_notable and self._logs == "notable" and self._may_log()):
            _log.info("request", extra=_fields(answered))

    def _may_log(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if self._num_lines > MAX_LINES:
                _log.info("%d more requests were not logged", self._num_lines - MAX_LINES)
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= MAX_LINES


def _fields(answered: Answered) -> dict[str, object]:
    """Return what a line says: nothing that a client may choose but its id and method, and no secrets."""
    request = answered.request
    return {
        "request_id": request.request_id,
        "method": request.method[:MAX_METHOD],
        "route": answered.route,
        "status": answered.status,
        "via": answered.via,
        "sent_bytes": answered.sent_bytes,
        "seconds": round(answered.seconds, 6),
        "token": request.caller.name,
        **({"type": answered.problem_type} if answered.problem_type else {}),
    }


def start_tracing() -> None:
    """Send traces from now on if the environment names a collector; once per process."""
    global _provider
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        _log.warning("no traces: %s is missing; pip install corpus-server[otel]", error.name)
        return
    name = os.environ.get("OTEL_SERVICE_NAME", "corpus-server")
    _provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def stop_tracing() -> None:
    """Send the spans that wait and stop; blocks for at most `STOP_SECONDS`."""
    global _provider
    if _provider is not None:
        # A thread that nobody waits for longer: a collector that is gone must not keep the worker.
        sending = threading.Thread(target=_provider.shutdown, name="traces", daemon=True)
        _provider = None
        sending.start()
        sending.join(STOP_SECONDS)


def _trace(answered: Answered) -> None:
    """Record the span of a request that has just ended, and below it one for each stage.

    Stages of a response of several pieces take turns; their spans show the sums, one after another.
    """
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    request, method = answered.request, answered.request.method[:MAX_METHOD]
    end = time.time_ns()
    at = end - int(answered.seconds * 1e9)
    tracer = _provider.get_tracer("corpus_server")
    span = tracer.start_span(
        f"{method} {answered.route}",
        TraceContextTextMapPropagator().extract({"traceparent": request.trace_parent}),
        kind=SpanKind.SERVER,
        attributes={
            "http.request.method": method,
            "http.route": answered.route,
            "http.response.status_code": answered.status,
            "http.response.body.size": answered.sent_bytes,
            "corpus.request_id": request.request_id,
            "corpus.via": answered.via,
        },
        start_time=at,
    )
    if span.is_recording():
        for stage, seconds in zip(metrics.STAGES, answered.stages, strict=False):
            child = tracer.start_span(stage, set_span_in_context(span), start_time=at)
            at = min(end, at + int(seconds * 1e9))
            child.end(at)
        if answered.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
    span.end(end)
