"""A server of a newer release, with another database of plans, shares the state folder of a running one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import QUERY, Web
from scripts.processes import ROOT, claim_port, is_ready, running
from tests.reference import one_source
from tests.serving import RunningServer

ROWS = (12, 58)
COUNT = "both at once, then the older one again"
SECONDS = 19
ORACLE = "the file"
RULE = (
    "the newer one works; the older one refuses new plans by name, loses nothing else, and starts again alone"
)
VERSION = re.compile(r"^_SCHEMA_VERSION = (\d+)$", re.MULTILINE)


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder, 1_000_000)
    newer = _newer_release(folder)
    with RunningServer({"web": web.path}, folder) as older:
        known = older.post_plan(one_source("web", 16, 4)).json()["id"]
        rows = older.get("/v1/batches", plan=known, step=3).body
        url = f"http://127.0.0.1:{(port := claim_port())}"
        command = [sys.executable, "-m", "corpus_server", "serve", f"web={web.path}", "--port", str(port)]
        command += ["--state-dir", str(older.state_dir)]
        with running(command, ready=lambda: is_ready(url), tree=newer, log=folder / "newer.log"):
            posted = Request(f"{url}/v1/plans", json.dumps(one_source("web", 16, 4, seed=1)).encode())
            with urlopen(posted) as response:
                found.expect(response.status == 200, "the newer one takes no plan")
            refused = older.post_plan(one_source("web", 16, 4, seed=2))
            ready = older.get("/readyz")
            for what, response in (("a new plan", refused), ("readiness", ready)):
                says = "a newer release" in response.body.decode()
                found.expect(response.status == 503 and says, f"{what}: {response.status} {response.body!r}")
            batch = older.get("/v1/batches", plan=known, step=3)
            found.expect(batch.status != 200 or batch.body == rows, "the older one gives other rows")
            found.figure("known plan at the older one", batch.status)
            for step in range(100):
                inline = older.get("/v1/batches", **QUERY, step=step)
                found.expect(
                    inline.body == web.right(step).tobytes(), f"step {step} is wrong: {inline.status}"
                )
            found.expect("Traceback" not in older.log(), "the log has a traceback")
        older.restart()
        again = older.post_plan(one_source("web", 16, 4)).json().get("id")
        found.expect(again == known, "the older one gives the plan another id")
        found.expect(older.get("/readyz").status == 200, "the older one is not ready alone")
        kept = [each.name for each in older.state_dir.glob("plans.sqlite.newer*")]
        found.figure("databases of the newer one set aside", len(kept), least=1)


def _newer_release(folder: Path) -> Path:
    """Copy this tree, with the next version of the database."""
    tree = folder / "newer"
    shutil.copytree(ROOT / "corpus_server", tree / "corpus_server")
    path = tree / "corpus_server" / "plan_store" / "database.py"
    text, count = VERSION.subn(lambda found: f"_SCHEMA_VERSION = {int(found[1]) + 1}", path.read_text())
    assert count == 1, "the version of the database is written in another way"
    path.write_text(text)
    return tree
