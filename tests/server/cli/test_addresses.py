"""Commands reach a server by URL, `host:port` or Unix socket; through a proxy only where it is elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.recorded import Record, write_part
from tests.reference import one_source
from tests.serving import RunningServer, run_here

NOBODY = "http://user:secret@127.0.0.1:9"  # the port `discard`, where nobody listens


@contextmanager
def failing_proxy() -> Iterator[str]:
    """Run a proxy that reaches nothing, as its page says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(502, "Bad Gateway")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("uds", [False, True], ids=["loopback", "unix socket"])
def test_no_command_asks_a_proxy_for_this_machine(tmp_path: Path, uds: bool) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    with RunningServer({"web": path}, tmp_path, uds=tmp_path / "s" if uds else None) as server:
        plan = server.post_plan(one_source("web", 16, 8)).json()["id"]
        write_part(tmp_path / "losses", [Record(0, row, "web", 2 + row % 3) for row in range(8)], plan=plan)
        for command in (
            ["plans", "list", server.url],
            ["plans", "show", plan[:12], server.url],
            ["export", server.url, "--plan", plan[:12], "--step", "0"],
            ["spikes", tmp_path / "losses", server.url],
        ):
            done = run_here(*command, HTTP_PROXY=NOBODY, http_proxy=NOBODY, NO_PROXY="", no_proxy="")
            assert (done.returncode, done.stderr) == (0, ""), command
        if not uds:
            shown = run_here("export", f"localhost:{server.port}", "--plan", plan, "--step", "0")
            assert json.loads(shown.stdout.splitlines()[0])["step"] == 0


def test_errors_name_the_proxy() -> None:
    proxies = {"HTTP_PROXY": NOBODY, "http_proxy": NOBODY, "NO_PROXY": "", "no_proxy": ""}
    done = run_here("plans", "list", "http://data.invalid:8000", **proxies)
    assert done.returncode == 2
    assert "through the proxy http://127.0.0.1:9 of the environment" in done.stderr
    assert "NO_PROXY=data.invalid goes without one" in done.stderr
    assert "secret" not in done.stderr
    with failing_proxy() as proxy:
        done = run_here("plans", "list", "http://data.invalid:8000", **{**proxies, "http_proxy": proxy})
    assert f"through the proxy {proxy} of the environment answered HTTP 502" in done.stderr
    without = run_here("plans", "list", "http://data.invalid:8000", **{**proxies, "no_proxy": "data.invalid"})
    assert "proxy" not in without.stderr
    assert "is the server running?" in without.stderr
