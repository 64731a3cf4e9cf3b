"""Each kind of process is stopped (SIGSTOP): a worker, all workers, template, supervisor, a whole replica."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from contextlib import suppress
from pathlib import Path

import psutil

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Loop, Web, seconds_of, train
from tests.serving import RunningServer

ROWS = (33, 57)
COUNT = "5 x one of 2 workers, 20 silent workers, template, supervisor, 3 x a replica"
SECONDS = 120
ORACLE = "the file"
RULE = "silence is found within 5 s; a loop waits less than 2 s; a stopped supervisor costs no worker"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    with RunningServer({"web": web.path}, folder, workers=2) as server:
        loop = train(web, server.url, lambda: _stop_workers(server, rounds=5))
        _tell(found, "one of two workers", loop)
        for each in server.templates():
            each.suspend()
        seconds = list[float]()
        loop = train(web, server.url, lambda: seconds.append(seconds_of(server.kill_worker)))
        found.figure("replaced beside a stopped template, s", seconds[0], most=5)
        _tell(found, "a stopped template", loop)
        pids = server.worker_pids()
        loop = train(web, server.url, lambda: _stopped_for(8.0, server.pid))
        _tell(found, "a stopped supervisor", loop)
        time.sleep(2)
        found.expect(server.worker_pids() == pids, "a supervisor that was stopped replaced its workers")
    with RunningServer({"web": web.path}, folder / "four", workers=4) as server:
        silent = [each for _ in range(5) for each in _silent_seconds(server)]
    found.figure("a silent worker is found, median s", statistics.median(silent))
    found.figure("worst s", max(silent), most=5)
    with (
        RunningServer({"web": web.path}, folder / "one") as one,
        RunningServer({"web": web.path}, folder / "other") as other,
    ):

        def stop_replicas() -> None:
            for server in (one, other, one):
                everything = [server.pid, *(each.pid for each in psutil.Process(server.pid).children())]
                _stopped_for(3.0, *everything)
                time.sleep(2)

        _tell(found, "a replica", train(web, [one.url, other.url], stop_replicas))


def _tell(found: Found, stopped: str, loop: Loop) -> None:
    found.figures.append(f"**{stopped}**")
    loop.tell(found, longest=2.0)


def _stopped_for(seconds: float, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in reversed(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _stop_workers(server: RunningServer, rounds: int) -> None:
    """Stop a worker, wait for its successor, and go on; the loop's connection is to either of the two."""
    for number in range(rounds):
        time.sleep(0.5)
        with server.replacing():
            os.kill(server.worker_pids()[number % 2], signal.SIGSTOP)


def _silent_seconds(server: RunningServer) -> list[float]:
    """Stop four workers at moments of their own; return how long each was silent before it was killed."""
    stopped, ended = dict[int, float](), dict[int, float]()
    with server.replacing(4):
        for pid in server.worker_pids():
            time.sleep(random.uniform(0, 0.5))
            os.kill(pid, signal.SIGSTOP)
            stopped[pid] = time.monotonic()
        while len(ended) < len(stopped):
            time.sleep(0.02)
            for pid in stopped.keys() - ended.keys():
                if not psutil.pid_exists(pid):
                    ended[pid] = time.monotonic()
    time.sleep(1)
    return [ended[pid] - stopped[pid] for pid in stopped]
