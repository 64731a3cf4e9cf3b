"""The disk of the state folder is full, and that of a run's records; then there is room again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from corpus_client import CorpusLoader
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web, fill, small_disk, train
from tests.corpora import write_megatron_lengths
from tests.reference import one_source
from tests.serving import RunningServer, wait_until

ROWS = (16, 38)
COUNT = "20 plans and a table on a full disk; 300 recorded steps"
SECONDS = 40
ORACLE = "the file; each recorded row counts as written or lost"
RULE = "503 state-unavailable for what is new, what is known goes on, all recovers by itself"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    docs = write_megatron_lengths(folder / "docs", np.random.default_rng(0).integers(2, 48, 50_000), eot=9)
    with small_disk(folder / "disk", "6m") as disk:
        server = RunningServer({"web": web.path, "docs": f"{docs},eot=9"}, folder, workers=2)
        server.state_dir = disk / "state"
        with server:
            refused = []

            def work() -> None:
                filler = fill(disk)
                packed = {**one_source("docs", 64, 8), "rows": {"documents": {}}}
                for document in (packed, *(one_source("web", 16, 4, seed=seed) for seed in range(20))):
                    response = server.post_plan(document)
                    refused.append((response.status, response.json().get("type")))
                ready = server.get("/readyz")
                found.expect(ready.status == 503, f"readiness says {ready.status} on a full disk")
                time.sleep(1)
                filler.unlink()
                wait_until(lambda: server.get("/readyz").status == 200, "it does not recover", seconds=30)
                for document in (packed, one_source("web", 16, 4, seed=1)):
                    response = server.post_plan(document)
                    found.expect(response.status == 200, f"with room: {response.status} {response.body!r}")

            loop = train(web, server.url, work)
            wrong = [each for each in refused if each != (503, "state-unavailable")]
            found.expect(not wrong, f"on a full disk: {wrong}")
            found.figure("refused", refused.count((503, "state-unavailable")), least=21)
            loop.tell(found, longest=1.0)
            found.expect("Traceback" not in server.log(), "the log has a traceback")
            _record(server, found, folder)


def _record(server: RunningServer, found: Found, folder: Path) -> None:
    """Record losses into a folder on a full disk."""
    with small_disk(folder / "records", "1m") as disk:
        filler = fill(disk)
        plan: dict[str, Any] = {"corpus": "web", "seq_len": 64, "global_batch_size": 8}
        waits = []
        with CorpusLoader(server.url, **plan, device="cpu", sources=True, record_dir=disk) as loader:
            for step in range(300):
                began = time.monotonic()
                loader.record(next(loader).step, [float(step)] * 8)
                waits.append(time.monotonic() - began)
                if step == 200:
                    filler.unlink()
        stats = loader.stats()
    found.figure("recorded", stats.num_recorded_rows, least=2400)
    found.figure("written or lost", stats.num_written_rows + stats.num_lost_rows, least=2400, most=2400)
    found.figure("longest wait beside full records, s", max(waits), most=1)
