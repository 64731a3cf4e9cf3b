"""Responses to a client are cut, reset, corrupted, swallowed, delayed by 0.2 s or a second, at 8 places."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from corpus_client import Network
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web, train
from tests.faults.proxy import FaultProxy, Kind, NetworkFault
from tests.serving import RunningServer

ROWS = (18, 60)
COUNT = "48 responses"
SECONDS = 90
ORACLE = "the file"
RULE = "no batch is wrong, no error reaches the loop, each fault costs less than 4 s"
KINDS: tuple[Kind, ...] = ("cut", "reset", "flip", "hole", "latency", "late")
PLACES = (0, 1, 15, 200, 500, 700, 1200, 1500)
"""Bytes of a connection before the fault: in the head, at its end, in the array, in the checksum."""


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    network = Network(progress_seconds=2.0, deadline_seconds=20.0)
    longest, num_wrong, num_batches, num_again = 0.0, 0, 0, 0
    with RunningServer({"web": web.path}, folder) as server:
        for kind in KINDS:
            for place in PLACES:
                faults = iter([NetworkFault(kind, place)])
                with FaultProxy(server.port, partial(next, faults, None)) as proxy:
                    loop = train(web, proxy.url, lambda: time.sleep(0.3), network=network, warm_up=0)
                longest = max(longest, *loop.waits)
                num_wrong += loop.num_wrong
                num_batches += len(loop.waits)
                num_again += loop.num_retries + loop.num_hedged
    found.figure("batches", num_batches, least=48)
    found.figure("sent again", num_again, least=32)  # all but those that are delayed
    found.figure("wrong", num_wrong, most=0)
    found.figure("longest wait, s", longest, most=4)
