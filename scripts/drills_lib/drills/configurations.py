"""A server is told to reload (SIGHUP) broken configurations, and then good ones, under a training loop."""

from __future__ import annotations

import os
import signal
import statistics
from functools import partial
from pathlib import Path

import psutil

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web, seconds_of, train
from tests.serving import RunningServer, wait_until

ROWS = (10, 11)
COUNT = "10 broken configurations, 100 reloads"
SECONDS = 150
ORACLE = "the file"
RULE = "no batch is wrong, no wait is above 1 s, each mistake is one line, the supervisor keeps no descriptor"
GOOD = '[corpora.web]\npath = "web.bin"\n'
BROKEN = (
    "[corpora.web\n",
    "",
    '[corpora.web]\npath = "none.bin"\n',
    f"[server]\ngather_threads = 0\n{GOOD}",
    f'[server]\ngather_threads = "many"\n{GOOD}',
    f"[server]\nwokers = 2\n{GOOD}",
    f'[server]\nhost = "::1"\n{GOOD}',
    f'[server]\ntokens = "none.toml"\n{GOOD}',
    f'{GOOD}dtype = "float32"\n',
    GOOD + "x" * 2**20,
)
NUM_RELOADS = 100
REFUSED = "nothing was changed, the old workers go on"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    with RunningServer({}, folder, workers=2, config=GOOD) as server:
        supervisor = psutil.Process(server.pid)
        path = folder / "corpus.toml"

        def reload() -> None:
            for text in BROKEN:
                path.write_text(text)
                pids, refused = server.worker_pids(), server.log().count(REFUSED)
                os.kill(server.pid, signal.SIGHUP)
                wait_until(partial(_more_refused, server, refused), server.log, seconds=60)
                found.expect(server.worker_pids() == pids, f"workers were replaced: {text[:40]!r}")
            path.write_text(GOOD)
            _reload(server)
            before, seconds = supervisor.num_fds(), list[float]()
            for number in range(NUM_RELOADS - 1):
                path.write_text(f"[server]\ngather_threads = {2 + number % 2}\n{GOOD}")
                seconds.append(seconds_of(partial(_reload, server)))
            found.figure("median s of a reload", statistics.median(seconds))
            found.figure("worst s", max(seconds))
            found.figure("descriptors more", supervisor.num_fds() - before, most=0)

        loop = train(web, server.url, reload)
        found.expect("Traceback" not in server.log(), "the log has a traceback")
        found.figure("workers at the end", len(server.worker_pids()), least=2, most=2)
    loop.tell(found, longest=1.0)


def _more_refused(server: RunningServer, refused: int) -> bool:
    return server.log().count(REFUSED) > refused


def _reload(server: RunningServer) -> None:
    before = set(server.worker_pids())
    with server.replacing(2):
        os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: not before & set(server.worker_pids()), "old workers stay", seconds=60)
