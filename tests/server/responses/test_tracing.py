"""Spans of requests: when they begin and end, what is below them, and the end of a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is missing ([otel])")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from corpus_server.admission.request import RequestHead
from corpus_server.responses import tracing
from corpus_server.responses.requests import Requests
from corpus_server.responses.response import Answered
from corpus_server.responses.tracing import start_tracing, stop_tracing

END = 10**18
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What keeps the spans of a process whose clock stands still."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "provider", provider)
    monkeypatch.setattr(tracing.time, "time_ns", lambda: END)
    yield exporter
    provider.shutdown()


@pytest.mark.parametrize(("flags", "status", "num_spans"), [("01", 200, 5), ("01", 503, 5), ("00", 200, 0)])
def test_a_span_continues_its_trace_ends_now_and_its_stages_follow_one_another(
    exporter: InMemorySpanExporter, flags: str, status: int, num_spans: int
) -> None:
    request = RequestHead("GET", b"/x?secret", {}, trace_parent=PARENT + flags)
    about = {"route": "/x", "via": "application", "status": status, "sent_bytes": 5, "seconds": 2.5}
    Requests("off").done(Answered(request=request, **about, stages=(0.5, 0.25, 1.0, 9.0)))
    spans = exporter.get_finished_spans()
    assert len(spans) == num_spans
    if spans:
        *stages, span = spans
        begin = END - 2_500_000_000
        assert (span.name, span.kind, span.attributes["http.route"]) == ("GET /x", SpanKind.SERVER, "/x")
        assert (span.start_time, span.end_time) == (begin, END)
        assert span.status.is_ok == (status == 200)
        assert f"00-{span.context.trace_id:032x}-{span.parent.span_id:016x}-" == PARENT
        assert [(each.name, each.start_time - begin, each.end_time - begin) for each in stages] == [
            ("wait", 0, 500_000_000),
            ("locate", 500_000_000, 750_000_000),
            ("gather", 750_000_000, 1_750_000_000),
            ("send", 1_750_000_000, 2_500_000_000),
        ]
        assert {each.parent.span_id for each in stages} == {span.context.span_id}


def test_a_collector_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def shutdown() -> None:
        threads.append(threading.current_thread())
        begun.set()
        end.wait(60)

    monkeypatch.setattr(tracing, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(tracing, "provider", SimpleNamespace(shutdown=shutdown))
    stop_tracing()
    assert begun.wait(60)
    assert threads[0].daemon
    end.set()
    threads[0].join(60)


def test_a_package_that_is_missing_is_named_and_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, module, None)
    start_tracing()
    (record,) = caplog.records
    assert record.getMessage() == f"no traces: {module} is missing; pip install corpus-server[otel]"
