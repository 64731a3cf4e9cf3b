"""Spans of requests: when they begin and end, what is below them, and the end of a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is missing ([otel])")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from corpus_server.answers import tracing

END = 10**18
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What keeps the spans of a process whose clock stands still."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_provider", provider)
    monkeypatch.setattr(tracing.time, "time_ns", lambda: END)
    yield exporter
    provider.shutdown()


def record(**given: Any) -> None:
    about = {"trace_parent": "", "seconds": 2.5, "attributes": {}, "stages": {}, "failed": False}
    tracing.record("GET /x", **{**about, **given})


def test_a_span_ends_now_and_its_stages_follow_one_another(exporter: InMemorySpanExporter) -> None:
    attributes = {"http.route": "/x", "http.response.status_code": 200}
    record(attributes=attributes, stages={"wait": 0.5, "locate": 0.25, "gather": 1.0})
    *stages, span = exporter.get_finished_spans()
    begin = END - 2_500_000_000
    assert (span.name, span.kind, dict(span.attributes)) == ("GET /x", SpanKind.SERVER, attributes)
    assert (span.start_time, span.end_time, span.parent) == (begin, END, None)
    assert span.status.status_code is StatusCode.UNSET
    assert [(each.name, each.start_time - begin, each.end_time - begin) for each in stages] == [
        ("wait", 0, 500_000_000),
        ("locate", 500_000_000, 750_000_000),
        ("gather", 750_000_000, 1_750_000_000),
    ]
    assert {each.parent.span_id for each in stages} == {span.context.span_id}


@pytest.mark.parametrize(("flags", "num_spans"), [("01", 2), ("00", 0)], ids=["sampled", "not sampled"])
def test_a_trace_is_continued_if_the_client_samples_it(
    exporter: InMemorySpanExporter, flags: str, num_spans: int
) -> None:
    record(trace_parent=PARENT[:-2] + flags, stages={"wait": 1.0}, failed=True)
    spans = exporter.get_finished_spans()
    assert len(spans) == num_spans
    for span in spans:
        assert f"{span.context.trace_id:x}" == PARENT.split("-")[1].lstrip("0")
    if spans:
        assert f"{spans[-1].parent.span_id:016x}" == PARENT.split("-")[2]


def test_a_collector_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def shutdown() -> None:
        threads.append(threading.current_thread())
        begun.set()
        end.wait(60)

    monkeypatch.setattr(tracing, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(tracing, "_provider", SimpleNamespace(shutdown=shutdown))
    tracing.stop()
    assert begun.wait(60)
    assert not tracing.is_on()
    assert threads[0].daemon
    end.set()
    threads[0].join(60)


def test_a_package_that_is_missing_is_named_and_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, module, None)
    tracing.start()
    assert not tracing.is_on()
    (record,) = caplog.records
    assert record.getMessage() == f"no traces: {module} is missing; pip install corpus-server[otel]"
