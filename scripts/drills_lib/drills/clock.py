"""The clock of a server jumps from 400 days ago to an hour ahead, and back."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from scripts.drills_lib.drill import Found, Skipped
from scripts.drills_lib.training import Web, train
from tests.reference import one_source
from tests.serving import RunningServer

ROWS = (29,)
COUNT = "8 jumps, 3 s after each"
SECONDS = 50
ORACLE = "the file, and the list of plans"
RULE = "no batch is wrong or late, every plan is kept, readiness stays 200, no worker is lost"
HOUR, DAY = 3600, 86_400
JUMPS = (-400 * DAY, HOUR, -DAY, 0, -30 * DAY, HOUR, -400 * DAY, 0)
SOURCE = Path(__file__).parents[1] / "clock.c"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    if (compiler := shutil.which("cc")) is None:
        raise Skipped("no C compiler (cc) is installed")
    library, offset = folder / "clock.so", folder / "offset"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    offset.write_bytes(bytes(8))
    web, ids = Web(folder), set[str]()
    environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}
    with (
        mock.patch.dict(os.environ, environment),
        RunningServer({"web": web.path}, folder, workers=2) as server,
    ):

        def move(seconds: int) -> None:
            with offset.open("r+b") as file:  # in place: it is mapped
                file.write(seconds.to_bytes(8, "little", signed=True))

        loop = train(web, server.url, lambda: _jump(server, move, ids, found))
        listed = {each["id"] for each in server.get("/v1/plans?limit=100").json()["plans"]}
        log = server.log()
    years = {time.gmtime(time.time() + seconds).tm_year for seconds in JUMPS}
    found.expect(all(f"{year}-" in log for year in years), f"the clock was not moved: the log lacks {years}")
    found.figure("plans kept", len(listed & ids), least=len(JUMPS))
    found.figure("workers lost", log.count(" ended with "), most=0)
    loop.tell(found, longest=1.0)


def _jump(server: RunningServer, move: Callable[[int], None], ids: set[str], found: Found) -> None:
    for number, seconds in enumerate(JUMPS):
        move(seconds)
        server.get("/nowhere")  # a line of the log
        time.sleep(1)
        posted = server.post_plan(one_source("web", 16, 4, seed=number))
        if posted.status == 200:
            ids.add(posted.json()["id"])
        found.expect(posted.status == 200, f"{seconds} s: a plan got {posted.status} {posted.body!r}")
        ready = server.get("/readyz")
        found.expect(ready.status == 200, f"{seconds} s: readiness said {ready.status} {ready.body!r}")
        time.sleep(2)
