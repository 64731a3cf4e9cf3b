"""A URL where something else answers: a login page, a web server on that port. Not asked for 300 s."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from corpus_client import CorpusLoader, RemoteCorpus, errors
from corpus_client.arrays import ArrayLoader
from corpus_client.network import control
from corpus_client.network.replicas import Replicas
from corpus_client.tools.app import app
from tests.client.reference_server import ReferenceServer

PAGE = b"<html><h1>Log in</h1></html>"
SHAPE: dict[str, Any] = {"seq_len": 16, "global_batch_size": 12}
SAID = re.escape(
    "must be a JSON object, got text/html: '<html><h1>Log in</h1></html>', so what answers there is no "
    "corpus-server; is the port right, and does a login page stand in between?"
)


class _Portal(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Answer every second question at one path with an object, and all else with a page."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_right = self.path == "/v1/corpora" and len(self.asked) % 2 == 0
        if self.path == "/v1/corpora":
            self.asked.append(self.path)
        kind, body = ("application/json", b"{}") if is_right else ("text/html", PAGE)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def portal() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Portal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "make",
    [
        lambda url: CorpusLoader(url, corpus="web", **SHAPE),
        lambda url: ArrayLoader(url, corpus="web", rank=0, world_size=1, **SHAPE),
        lambda url: RemoteCorpus(url, "web"),
    ],
    ids=["loader", "arrays", "corpus"],
)
def test_another_server_is_named_at_once(portal: str, make: Callable[[str], object]) -> None:
    """All ask by one connection pool, whose deadline is 300 s."""
    with pytest.raises(errors.NotCorpusServer, match=SAID):
        make(portal)


def test_a_command_says_so_too(portal: str, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.npy"
    plan.write_text('{"seq_len": 16, "stages": []}')
    done = CliRunner().invoke(app, f"export {portal} --plan {plan} --out {out} --stop 1".split())
    assert done.exit_code == 2
    assert re.search(SAID, done.stderr)


def test_a_replica_that_is_another_server_is_refused(portal: str, server: ReferenceServer) -> None:
    """As one with another corpus is: a wrong URL is known when the loader is made."""
    with pytest.raises(errors.NotCorpusServer, match=portal):
        CorpusLoader([server.url, portal], corpus="web", **SHAPE, device="cpu")


def test_a_page_in_the_midst_of_a_run_is_asked_again(portal: str) -> None:
    """A proxy in maintenance shows one, and a run need not end of that."""
    with Replicas(portal) as replicas:
        assert [replicas.ask(control.get("/v1/corpora")) for _ in range(3)] == [{}, {}, {}]
    assert len(_Portal.asked) == 5
