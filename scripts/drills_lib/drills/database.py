"""The database of plans is damaged in eight ways under a running server, then a worker is killed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web
from tests.reference import one_source
from tests.server.test_plan_store import (
    delete,
    delete_folder,
    drop_column,
    drop_table,
    empty_totals,
    overwrite,
    strange_version,
)
from tests.serving import RunningServer

ROWS = (58,)
COUNT = "8 kinds of damage, each with a kill"
SECONDS = 40
ORACLE = "the file, and the ids of the same plans before"
RULE = "new plans are taken at once and keep their ids, readiness stays 200, no 500, no restart is needed"
OF_THE_FILE = (delete, delete_folder, overwrite)
OF_THE_TABLES = (drop_table, drop_column, empty_totals, strange_version)


def cut(path: Path) -> None:
    """Take everything away."""
    os.truncate(path, 0)


def _do(harm: Callable[..., None], path: Path) -> None:
    if harm not in OF_THE_TABLES:
        harm(path)
        return
    with closing(sqlite3.connect(path)) as database:
        harm(database)
        database.commit()


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder, 1_000_000)
    path = folder / "state" / "plans.sqlite"
    plans = [one_source("web", 16, 4, seed=seed) for seed in range(20)]
    statuses: set[int] = set()
    with RunningServer({"web": web.path}, folder, workers=2) as server:
        ids = [server.post_plan(plan).json()["id"] for plan in plans]
        harms: tuple[Callable[..., None], ...] = (*OF_THE_FILE, cut, *OF_THE_TABLES)
        for number, harm in enumerate(harms):
            _do(harm, path)
            for killed in (False, True):
                if killed:
                    server.kill_worker(number % 2)
                what = f"{harm.__name__}{', a worker killed' if killed else ''}"
                fresh = server.post_plan(one_source("web", 16, 4, seed=1000 + 2 * number + killed))
                found.expect(fresh.status == 200, f"{what}: a new plan got {fresh.status} {fresh.body!r}")
                for plan_id in ids:
                    statuses.add(server.get("/v1/batches", plan=plan_id, step=0).status)
                again = [server.post_plan(plan).json().get("id") for plan in plans]
                found.expect(again == ids, f"{what}: posted again, plans have other ids")
                for plan_id in ids:
                    status = server.get("/v1/batches", plan=plan_id, step=0).status
                    found.expect(status == 200, f"{what}: {status} for a plan that was posted again")
                ready_now = server.get("/readyz")
                found.expect(ready_now.status == 200, f"{what}: readiness says {ready_now.body!r}")
        found.expect("Traceback" not in server.log(), "the log has a traceback")
        set_aside = len(list(path.parent.glob("plans.sqlite.damaged-*")))
    found.figure("set aside", set_aside, least=1)
    found.expect(statuses <= {200, 404}, f"before they were posted again: {sorted(statuses)}")
