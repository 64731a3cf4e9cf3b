"""A worker's event loop does nothing that makes all of its connections wait."""

import os
from collections import Counter
from pathlib import Path
from unittest import mock

from corpus_server.web.page.routes import VIEWS
from tests.corpora import write_raw
from tests.reference import one_source
from tests.serving import RunningServer, wait_until

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


COLLECTED = """
import gc, os, sys, threading, time

def collect():
    while not os.path.exists({asked!r}):
        time.sleep(0.01)
    gc.collect()
    gc.disable()
    os.rename({asked!r}, {begun!r})
    while not os.path.exists({asked!r}):
        time.sleep(0.01)
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    with open({found!r} + "-", "w") as file:
        file.write("\\n".join(str(type(each)) for each in gc.garbage))
    os.rename({found!r} + "-", {found!r})

def begin():
    with open("/proc/self/cmdline") as command:
        if "corpus_server.run.template" in command.read():
            threading.Thread(target=collect, daemon=True).start()

os.register_at_fork(after_in_child=begin)
"""
"""Says which objects of a worker only the garbage collector frees."""


def test_requests_leave_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    """It runs in the event loop's thread, for 0.4 ms after some 30 requests, and all connections wait."""
    site = tmp_path / "site"
    asked, begun, found = (tmp_path / name for name in ("asked", "begun", "found"))
    site.mkdir()
    text = COLLECTED.format(asked=str(asked), begun=str(begun), found=str(found))
    (site / "sitecustomize.py").write_text(text)
    with (
        mock.patch.dict(os.environ, {"PYTHONPATH": str(site)}),
        RunningServer({"web": write_raw(tmp_path / "web.bin", range(5000))}, tmp_path / "server") as server,
    ):
        plan = server.post_plan(one_source("web", 16, 4)).json()["id"]
        paths = [
            *("/healthz", "/readyz", "/nowhere", "/v1/corpora/web"),
            *(f"/v1/batches?plan={plan}&step={step}" for step in range(3)),
            f"/v1/batches?plan={plan}&step=0&count=-1",
        ]

        def ask(times: int) -> None:
            for path in paths * times:
                server.get(path)
            server.post_plan(one_source("web", 16, 4))

        ask(1)
        asked.touch()
        wait_until(begun.exists, server.log)
        ask(20)
        asked.touch()
        wait_until(found.exists, server.log)
    left = Counter(found.read_text().splitlines())
    assert {kind: count for kind, count in left.items() if count >= 20} == {}


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
