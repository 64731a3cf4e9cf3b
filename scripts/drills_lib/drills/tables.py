"""The table of a plan of rows of documents is changed in place under a running server, its times restored."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scripts.drills_lib.drill import Found
from tests.corpora import rewrite_in_place, write_megatron_lengths
from tests.reference import one_source
from tests.serving import RunningServer

ROWS = (58,)
COUNT = "each array in 4 ways, and the folder removed; 40 requests after each"
SECONDS = 30
ORACLE = "what the server answered before"
RULE = "no row is wrong, no 500, readiness stays 200, and all is right again 10 s after each"
NUM_STEPS = 40
BUILD_SECONDS = 10.0
"""For a table to be built again; it takes a second on a busy machine."""


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    path = write_megatron_lengths(folder / "docs", np.random.default_rng(0).integers(2, 48, 20_000), eot=9)
    statuses: dict[int, int] = {}
    num_wrong = 0
    with RunningServer({"docs": f"{path},eot=9"}, folder, workers=2) as server:
        plan = {**one_source("docs", 64, 8), "rows": {"documents": {}}}
        plan_id = server.post_plan(plan).json()["id"]

        def ask(step: int) -> tuple[int, bytes]:
            response = server.get("/v1/batches", plan=plan_id, step=step)
            return response.status, response.body

        right = [ask(step) for step in range(NUM_STEPS)]
        found.expect({status for status, _ in right} == {200}, "the first requests were refused")
        arrays = [each.name for each in _table(server).glob("*.npy")]
        for harm in HARMS:
            for name in arrays if harm is not remove_folder else arrays[:1]:
                harm(_table(server) / name)
                for step in range(NUM_STEPS):
                    status, body = ask(step)
                    statuses[status] = statuses.get(status, 0) + 1
                    num_wrong += status == 200 and body != right[step][1]
                end = time.monotonic() + BUILD_SECONDS
                while (again := [ask(step) for step in range(NUM_STEPS)]) != right and time.monotonic() < end:
                    pass
                found.expect(again == right, f"{harm.__name__} of {name}: not right at the end")
                ready = server.get("/readyz").status
                found.expect(ready == 200, f"{harm.__name__} of {name}: readiness says {ready}")
        found.expect(server.log().count("ended with") == 0, "a worker was lost")
    found.figure("harms", (len(HARMS) - 1) * len(arrays) + 1)
    found.figure("wrong", num_wrong, most=0)
    for status, count in sorted(statuses.items()):
        found.figure(str(status), count)
    found.expect(set(statuses) <= {200, 503}, f"statuses {sorted(statuses)}")


def _table(server: RunningServer) -> Path:
    """Return the folder of the only table."""
    (path,) = (server.state_dir / "tables").glob("[!.]*")
    return path


def flip(path: Path) -> None:
    """Change one bit of the last number."""
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    rewrite_in_place(path, bytes(content))


def scramble(path: Path) -> None:
    """Write other numbers, some beyond the corpus."""
    content = path.read_bytes()
    rewrite_in_place(path, content[:128] + np.random.default_rng(1).bytes(len(content) - 128))


def cut(path: Path) -> None:
    """Take the second half away."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Take everything away."""
    os.truncate(path, 0)


def remove_folder(path: Path) -> None:
    """Remove the table."""
    shutil.rmtree(path.parent)


HARMS: tuple[Callable[[Path], None], ...] = (flip, scramble, cut, empty, remove_folder)
