"""One response in twenty begins a second late: hedged requests are few, and nothing is wrong."""

from __future__ import annotations

import time
from pathlib import Path

from corpus_client.network.replicas import HEDGE_SHARE, MAX_HEDGES
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web, train
from tests.faults.proxy import FaultProxy, Schedule
from tests.serving import RunningServer

ROWS = (33,)
COUNT = "30 s of a loop"
SECONDS = 40
ORACLE = "the file"
RULE = "at most 2 % of the requests are sent again, after the first few; no wait is above 2.5 s"
RESPONSE_BYTES = 3700  # of three steps, with the head


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    with RunningServer({"web": web.path}, folder) as server:
        faults = Schedule(1, ["late"], mean_bytes=20 * RESPONSE_BYTES, most=10**6)
        with FaultProxy(server.port, faults) as slow:
            loop = train(web, slow.url, lambda: time.sleep(30))
        lines = server.get("/metrics").body.decode().splitlines()
    counted = [line for line in lines if line.startswith("corpus_requests_total") and "/v1/batches" in line]
    num_requests = sum(int(float(line.split()[-1])) for line in counted)
    more = loop.num_hedged + loop.num_retries
    found.figure("requests", num_requests, least=300)
    found.figure("late", faults.num_drawn - 1, least=10)
    found.figure("hedged", loop.num_hedged, least=1)
    found.figure("more requests", more, most=HEDGE_SHARE * num_requests + MAX_HEDGES)
    loop.tell(found, longest=2.5)
