"""Logs, traces, dashboard and alert rules, against running servers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from corpus_server.responses.requests import MAX_LINES, SLOW_SECONDS
from tests.conftest import ServedCorpus
from tests.corpora import some_tokens, write_raw
from tests.raw_http import RawConnection
from tests.serving import ROOT, RunningServer, ask, wait_until
from tests.tokens import Tokens

BATCH = "/v1/batches?corpus=web&seq_len=16&batch_size=12&checksum=tail&step="
PROMETHEUS = ROOT / "docker" / "prometheus"


@pytest.fixture(scope="module")
def seen(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, Tokens]]:
    """A server with tokens that logs JSON, after one request of every kind."""
    folder = tmp_path_factory.mktemp("seen")
    tokens = Tokens(folder / "tokens.toml")
    tokens.add("me", "read:*", "plans", "metrics", "inspect")
    tokens.add("ops", "metrics")
    arguments = ["--tokens", str(tokens.path), "--log-format", "json"]
    with RunningServer({"web": corpora["web"].path}, folder, arguments=arguments) as server:
        mine = tokens.header("me")
        plan = {"seq_len": 16, "stages": [{"global_batch_size": 12, "mixture": {"web": 1}}]}
        posted = server.get("/v1/plans", method="POST", body=json.dumps(plan).encode(), headers=mine)
        plan_id = posted.json()["id"]
        with closing(server.connect()) as connection:
            for step in range(30):
                ask(connection, f"/v1/batches?plan={plan_id}&step={step}", headers=mine)
        server.get(f"{BATCH}-1&token={tokens.secrets['me']}", headers={**mine, "X-Request-Id": "mine-1"})
        server.get(f"{BATCH}5", headers={"Authorization": "Bearer wrong", "X-Request-Id": "mine-2"})
        server.get("/v1/corpora/nothing", headers={**mine, "X-Request-Id": "mine-3"})
        for number, target in ((4, f"{BATCH}5"), (5, "/docs")):
            server.get(target, headers={**tokens.header("ops"), "X-Request-Id": f"mine-{number}"})
        server.wait_until_idle(headers=mine)
        yield server, tokens


def lines_of(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]


def test_what_failed_has_a_line_with_its_id_and_what_did_not_has_none(
    seen: tuple[RunningServer, Tokens],
) -> None:
    lines = [line for line in lines_of(seen[0]) if line["event"] == "request"]
    # What takes a second has one, too; on a busy machine, anything may.
    lines = [line for line in lines if line["status"] != 200 or line["seconds"] < SLOW_SECONDS]
    about = {
        line["request_id"]: [line[name] for name in ("status", "type", "via", "token", "route")]
        for line in lines
    }
    assert about == {
        "mine-1": [422, "invalid-parameter", "fast-path", "me", "/v1/batches"],
        "mine-2": [401, "unauthorized", "fast-path", "anyone", "refused"],
        "mine-3": [404, "unknown-corpus", "application", "me", "/v1/corpora/{name}"],
        "mine-4": [403, "forbidden", "fast-path", "ops", "refused"],
        "mine-5": [403, "forbidden", "application", "ops", "unknown"],
    }
    assert all(line["level"] == "info" and line["timestamp"] and line["seconds"] < 60 for line in lines)


def test_what_strangers_send_cannot_fill_the_log(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    """Few lines in a second, none of them long, all of our own."""
    with RunningServer({"web": corpora["web"].path}, tmp_path, arguments=["--log-format", "json"]) as server:
        before, began = len(server.log()), time.monotonic()
        sent = [
            b"nonsense\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"A" * 60_000 + b" /v1/plans HTTP/1.1\r\nHost: x\r\n\r\n",
        ]
        for each in sent * 50:
            with RawConnection(server) as connection:
                connection.send(each)
                assert len(connection.read().body) < 2000
        num_seconds = int(time.monotonic() - began) + 2
        server.wait_until_idle()
        lines = server.log()[before:].splitlines()
    assert len(lines) <= num_seconds * (MAX_LINES + 1)
    assert max(map(len, lines)) < 500
    assert {json.loads(line)["event"] for line in lines if "more requests" not in line} == {"request"}


def test_a_start_fits_a_terminal(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path, arguments=["--log-format", "text"]) as server:
        lines = server.log().splitlines()
    assert [line for line in lines if "web: 9,834 uint16 tokens, 3 shards, " in line], lines
    assert max(map(len, lines)) <= 80, lines


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_name_cannot_forge_a_line_of_the_log(tmp_path: Path, form: str) -> None:
    """A shard whose name has line ends and escapes of a terminal changes, and the log says so."""
    forged = "2026-01-01 [info] all is well"
    folder = tmp_path / "web"
    folder.mkdir()
    path = write_raw(folder / f"a\n{forged}\x1b[2K\u2028\udcff.bin", some_tokens(5000))
    with RunningServer({"web": folder}, tmp_path, arguments=["--log-format", form]) as server:
        before = len(server.log())
        path.write_bytes(b"")
        assert server.get(f"{BATCH}1").status == 503
        wait_until(lambda: "corpus-changed" in server.log(), "nothing was logged")
        lines = server.log()[before:].splitlines()
    assert not [line for line in lines if line.startswith(forged)]
    assert [line for line in lines if "\\n2026-01-01" in line and "corpus-changed" in line]
    assert "\x1b" not in "".join(lines)


def test_every_name_in_dashboard_and_rules_is_a_metric(seen: tuple[RunningServer, Tokens]) -> None:
    server, tokens = seen
    text = server.get("/metrics", headers=tokens.header("me")).body.decode()
    known: dict[str, dict[str, set[str]]] = {"up": {"job": set(), "instance": set()}}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = known.setdefault(sample.name, {"instance": set()})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    for expression in [*_of_dashboard(), *_of_rules()]:
        names = re.findall(r"\b(up|corpus_\w+)\b(?:\{(.*?)\})?", expression)
        assert names, expression
        found: set[str] = set()
        for name, matchers in names:
            assert name in known, f"{name} in {expression}"
            found |= known[name].keys()
            for label, how, value in re.findall(r'(\w+)(=~|=|!=)"(.*?)"', matchers):
                assert label in known[name], f"{name}{{{label}}} in {expression}"
                if label == "via" or label == "cache":
                    assert how != "=" or value in known[name][label], f"{label}={value} in {expression}"
        for group in re.findall(r"by \((.*?)\)", expression):
            assert set(group.split(", ")) <= found, f"by ({group}) in {expression}"


def _of_dashboard() -> list[str]:
    board = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "corpus-server.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = [each["query"].replace("label_values", "") for each in board["templating"]["list"]]
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]] + variables


def _of_rules() -> list[str]:
    # Each expression is one line, or a block that is indented deeper.
    found = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*\n))", (PROMETHEUS / "alerts.yml").read_text())
    assert len(found) == (PROMETHEUS / "alerts.yml").read_text().count("- alert:")
    return [block or line for block, line in found]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian package prometheus) is missing"
)
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts.test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stages_of_the_fast_path_and_the_tokens_are_counted(seen: tuple[RunningServer, Tokens]) -> None:
    server, tokens = seen
    text = server.get("/metrics", headers=tokens.header("me")).body.decode()
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    stages = {stage: values["corpus_stage_seconds_count", ("stage", stage)] for stage in ("wait", "send")}
    assert stages["wait"] == stages["send"] == 31  # 30 batches and the one that was refused
    assert values["corpus_tokens_total", ("corpus", "web")] == 30 * 12 * 17
    (plan,) = [key for key in values if key[0] == "corpus_plan_tokens_total"]
    assert values[plan] == 30 * 12 * 17
    refused = {key[1][1]: value for key, value in values.items() if key[0] == "corpus_refusals_total"}
    came = {slug: number for slug, number in refused.items() if number}
    assert came == {"invalid-parameter": 1, "unauthorized": 1, "unknown-corpus": 1, "forbidden": 2}
    # Else an alert would miss the first one: Prometheus sees no rise in a series that begins with it.
    assert refused["corpus-changed"] == refused["internal-error"] == 0


def test_a_trace_has_the_spans_of_both_sides(
    corpora: dict[str, ServedCorpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that parses protobuf sees one trace: the client's span, the server's, its stages."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="opentelemetry is missing ([otel])")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from corpus_client.network import transport, wire
    from corpus_client.network.endpoint import Endpoint
    from corpus_client.network.options import Network

    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
        monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
        with RunningServer({"web": corpora["web"].path}, tmp_path) as server:
            request = wire.ArrayRequest(path=f"{BATCH}5", shape=(1, 12, 17), dtype="uint16", plan_id=None)
            endpoint = Endpoint.parse(server.url, Network())
            with closing(transport.Connection(endpoint)) as connection:
                deadline = time.monotonic() + 30
                connection.send(request.path, deadline=deadline)
                headers = connection.receive_into(
                    memoryview(bytearray(request.num_bytes)), request, deadline=deadline
                )
            wait_until(lambda: len(collector.spans) >= 6, collector.spans)
            spans = list(collector.spans)
        provider.shutdown()
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"GET /v1/batches", "wait", "locate", "gather", "send"}
    assert len({span.trace_id for span in spans}) == 1
    client, server_side = sorted(
        (span for span in spans if span.name == "GET /v1/batches"), key=lambda span: bool(span.parent_span_id)
    )
    assert server_side.parent_span_id == client.span_id
    stages = [by_name[name] for name in ("wait", "locate", "gather", "send")]
    assert {span.parent_span_id for span in stages} == {server_side.span_id}
    for span in (client, server_side):
        attributes = {each.key: each.value.string_value for each in span.attributes}
        assert attributes["corpus.request_id"] == headers["x-request-id"]


class Collector:
    """An OTLP collector over HTTP: keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
                    ExportTraceServiceRequest,
                )

                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        probes = ("GET /healthz", "GET /readyz")
                        collector.spans += [each for each in scope.spans if each.name not in probes]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()
