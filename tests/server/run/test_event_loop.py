"""A worker's event loop does nothing that makes all of its connections wait."""

import os
from pathlib import Path
from unittest import mock

from corpus_server.web.page.routes import VIEWS
from tests.corpora import write_raw
from tests.reference import one_source
from tests.serving import RunningServer

LOADED = """
import os, sys, threading, traceback

def note(what):
    if threading.current_thread() is not threading.main_thread() or not os.path.exists({ready!r}):
        return
    with open("/proc/self/comm") as name:
        if name.read() == "corpus-worker\\n":
            where = "".join(traceback.format_stack(limit=8))
            os.write(noted, f"{{what}}\\n{{where}}".encode())

class Finder:
    def find_spec(self, name, *_):
        note(f"import {{name}}")

def heard(event, arguments):
    if event == "compile":
        note(f"compile {{arguments!r:.200}}")

noted = os.open({noted!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
sys.meta_path.insert(0, Finder())
sys.addaudithook(heard)
"""
"""Notes which modules are imported, and which code is compiled, by the thread of a worker's event loop."""


def test_first_requests_have_the_event_loop_import_and_compile_nothing(tmp_path: Path) -> None:
    """What is loaded when it is first asked for takes up to 40 ms, for which all connections would wait."""
    site, ready, noted = (tmp_path / name for name in ("site", "ready", "noted"))
    site.mkdir()
    (site / "sitecustomize.py").write_text(LOADED.format(ready=str(ready), noted=str(noted)))
    with (
        mock.patch.dict(os.environ, {"PYTHONPATH": str(site)}),
        RunningServer({"web": write_raw(tmp_path / "web.bin", range(5000))}, tmp_path / "server") as server,
    ):
        ready.touch()
        plan = server.post_plan(one_source("web", 16, 4)).json()["id"]
        paths = [
            *(path.format(name="web", plan_id=plan, other=plan, step=1) for path in VIEWS),
            *(
                "/page/static/page.css",
                "/nowhere",
                "/healthz",
                "/readyz",
                "/metrics",
                "/docs",
                "/openapi.json",
            ),
            *(
                "/v1/corpora",
                "/v1/corpora/web",
                "/v1/corpora/web/tokens?format=json",
                "/v1/plans",
                "/v1/live",
            ),
            *(f"/v1/plans/{plan}", f"/v1/plans/{plan}/rows?step=3", f"/v1/plans/{plan}/usage?step=9"),
            f"/v1/plans/{plan}/shards?step=0",
            f"/v1/lookup?plan={plan}&corpus=web&token=9",
            *(f"/v1/batches?plan={plan}&step=0&format={form}" for form in ("raw", "npy", "json")),
        ]
        for path in paths:
            assert server.get(path).status in (200, 404), path
    assert noted.read_text() == ""
