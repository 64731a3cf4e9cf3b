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
from collections.abc import Mapping
from typing import Any

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

STOP_SECONDS = 1.0

_log = logging.getLogger("corpus_server")
_provider: Any = None


def start() -> None:
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


def stop() -> None:
    """Send what waits and stop; blocks for at most `STOP_SECONDS`."""
    global _provider
    if _provider is not None:
        # A thread that nobody waits for longer: a collector that is gone must not keep the worker.
        sending = threading.Thread(target=_provider.shutdown, name="traces", daemon=True)
        _provider = None
        sending.start()
        sending.join(STOP_SECONDS)


def is_on() -> bool:
    """Tell whether spans are recorded."""
    return _provider is not None


def record(
    name: str,
    *,
    trace_parent: str,
    seconds: float,
    attributes: Mapping[str, str | int],
    stages: Mapping[str, float],
    failed: bool,
) -> None:
    """Record the span of a request that has just ended, and below it one for each stage.

    Stages of a response of several pieces take turns; their spans show the sums, one after another.

    Args:
        trace_parent: W3C `traceparent` of the request; "": a trace begins here.
        seconds: that it took.
    """
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    end = time.time_ns()
    begin = end - int(seconds * 1e9)
    parent = TraceContextTextMapPropagator().extract({"traceparent": trace_parent})
    tracer = _provider.get_tracer("corpus_server")
    span = tracer.start_span(
        name, parent, kind=SpanKind.SERVER, attributes=dict(attributes), start_time=begin
    )
    if span.is_recording():
        at = begin
        for stage, took in stages.items():
            child = tracer.start_span(stage, set_span_in_context(span), start_time=at)
            at = min(end, at + int(took * 1e9))
            child.end(at)
        if failed:
            span.set_status(Status(StatusCode.ERROR))
    span.end(end)
