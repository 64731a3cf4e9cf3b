"""The clock of a server jumps from 400 days ago to an hour ahead, and back; libfaketime moves it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
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
RULE = "no batch is wrong or late, every plan is kept, readiness stays 200"
JUMPS = ("-400d", "+1h", "-1d", "+0", "-30d", "+1h", "-400d", "+0")
LIBRARIES = ("/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/lib")


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    libraries = (Path(each) / "faketime" / "libfaketimeMT.so.1" for each in LIBRARIES)
    library = next((each for each in libraries if each.exists()), None)
    if library is None:
        raise Skipped("libfaketime is not installed")
    web, offset = Web(folder), folder / "offset"
    offset.write_text("+0")
    fake = {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1"}
    with (
        mock.patch.dict(os.environ, {**fake, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}),
        RunningServer({"web": web.path}, folder, workers=2) as server,
    ):
        seen, ids = [], set()

        def jump() -> None:
            for number, each in enumerate(JUMPS):
                offset.write_text(each)
                time.sleep(1)
                posted = server.post_plan(one_source("web", 16, 4, seed=number))
                found.expect(posted.status == 200, f"{each}: a plan got {posted.status} {posted.body!r}")
                with suppress(KeyError):
                    ids.add(posted.json()["id"])
                ready = server.get("/readyz")
                found.expect(ready.status == 200, f"{each}: readiness said {ready.status} {ready.body!r}")
                seen.append(str(ready.headers["Date"] or ""))
                time.sleep(2)

        loop = train(web, server.url, jump)
        listed = {each["id"] for each in server.get("/v1/plans?limit=100").json()["plans"]}
        pids = server.log().count(" ended with ")
        clock = server.log()
    found.figure("jumps", len(JUMPS))
    found.figure("plans kept", len(listed & ids), least=len(JUMPS))
    found.figure("workers lost", pids, most=0)
    found.expect(
        str(time.gmtime(time.time() - 400 * 86400).tm_year) in clock + "".join(seen),
        "the clock was not moved: no line of the log is of that year",
    )
    loop.tell(found, longest=1.0)
