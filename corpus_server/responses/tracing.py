"""OpenTelemetry spans of requests, sent by OTLP over HTTP; nothing of it is imported unless it is asked for.

The standard variables configure it: `OTEL_EXPORTER_OTLP_ENDPOINT` turns it on, `OTEL_TRACES_SAMPLER`,
`OTEL_SERVICE_NAME` and the others work as everywhere. A span is made when its request is done, from times
that are measured anyway, so a request under way carries nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from corpus_server import metrics
from corpus_server.responses.response import Answered

MAX_METHOD = 32
"""Characters of a method in lines and spans; a client may send as many as fit into a head."""

STOP_SECONDS = 1.0
"""For sending the last spans to a collector that may be gone."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

_log = logging.getLogger("corpus_server")
provider: Any = None
"""Of spans; None: nobody wants any."""


def start_tracing() -> None:
    """Send traces from now on if the environment names a collector; once per process."""
    global provider
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
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def stop_tracing() -> None:
    """Send the spans that wait and stop; blocks for at most `STOP_SECONDS`."""
    global provider
    if provider is not None:
        # A thread that nobody waits for longer: a collector that is gone must not keep the worker.
        sending = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
        provider = None
        sending.start()
        sending.join(STOP_SECONDS)


def trace(answered: Answered) -> None:
    """Record the span of a request that has just ended, and below it one for each stage.

    Stages of a response of several pieces take turns; their spans show the sums, one after another.
    """
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    request, method = answered.request, answered.request.method[:MAX_METHOD]
    end = time.time_ns()
    at = end - int(answered.seconds * 1e9)
    tracer = provider.get_tracer("corpus_server")
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
