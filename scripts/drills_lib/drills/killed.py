"""A server's only worker is killed, alone and under a training loop; then template and supervisor of another.

`scripts.start_cost` has what is measured of workers, and compares commits.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections import defaultdict
from pathlib import Path

import psutil

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import seconds_of
from scripts.start_cost import longest_wait, measure
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, wait_until

ROWS = (8, 32, 57)
COUNT = "20 starts and kills; 20 kills under a loop; 5 templates, 5 supervisors"
SECONDS = 100
ORACLE = "every batch in order, with its checksum"
RULE = "a worker is back in 0.5 s; ready takes 1 s of CPU; a loop waits less than 0.5 s; no worker is left"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    corpus = write_raw(folder / "web.bin", some_tokens(2_000_000))
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(20):
        measure(RunningServer.tree, corpus, seconds)
    limits = {"ready, s": 10.0, "CPU, s": 1.0, "replaced, s": 0.5}
    for name, measured in seconds.items():
        found.figure(f"median {name}", statistics.median(measured))
        found.figure(f"worst {name}", max(measured), most=limits[name])
    found.figure("longest wait of the loop, s", longest_wait(RunningServer.tree, corpus, 20), most=0.5)
    _kill_the_others(found, RunningServer({"web": corpus}, folder / "others", workers=2))


def _kill_the_others(found: Found, server: RunningServer) -> None:
    replaced, ended = list[float](), list[float]()
    with server:
        for _ in range(5):
            for each in server.templates():
                each.kill()
            replaced.append(seconds_of(server.kill_worker))
        for _ in range(5):
            left = [psutil.Process(pid) for pid in server.worker_pids()] + server.templates()
            os.kill(server.pid, signal.SIGKILL)
            ended.append(seconds_of(lambda: wait_until(lambda: not any(map(_is_alive, left)))))  # noqa: B023
            server.restart()
    found.figure("replaced after its template was killed, worst s", max(replaced), most=5)
    found.figure("processes end after their supervisor, worst s", max(ended), most=2)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
