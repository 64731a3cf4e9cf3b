"""Processes that are killed under a training loop: rows 8 and 9 of the catalogue.

CORPUS_SOAK_SECONDS=60 kills a worker every second for so long.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np

from tests.conftest import ServedCorpus
from tests.contract.conftest import make_loader, take
from tests.serving import RunningServer

SOAK_SECONDS = float(os.environ.get("CORPUS_SOAK_SECONDS", "0"))
NUM_WORKERS = 4 if SOAK_SECONDS else 2
SEED = int(os.environ.get("CORPUS_FAULT_SEED", "1"))


def test_workers_killed_every_second_are_no_event_for_a_training_loop(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    """No error reaches the loop, no byte is wrong, every step comes in order."""
    chance = random.Random(SEED)
    over = threading.Event()
    with RunningServer({"web": corpora["web"].path}, tmp_path, workers=NUM_WORKERS) as server:

        def kill_workers() -> None:
            num_kills = 0
            while not over.wait(1.0):
                # On a busy machine a new worker takes seconds to import: in the suite, it gets them.
                replaced = server.log().count(" is ready\n") >= NUM_WORKERS + num_kills
                if (SOAK_SECONDS or replaced) and (pids := server.worker_pids()):
                    num_kills += 1
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(chance.choice(pids), signal.SIGKILL)

        killer = threading.Thread(target=kill_workers)
        killer.start()
        try:
            got, end = [], time.monotonic() + (SOAK_SECONDS or 4)
            with make_loader(server.url, prefetch_bytes=16_384) as loader:
                while time.monotonic() < end:
                    got += take(loader, 20)
                    time.sleep(0.01)
                retries = loader.stats().num_retries
        finally:
            over.set()
            killer.join()
        _check(got, server)
    print(f"{len(got)} steps, {retries} retries")


def test_a_server_that_is_killed_and_started_again_is_waited_for(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path) as server:
        with make_loader(server.url, prefetch_bytes=16_384) as loader:
            got = take(loader, 10)
            server.kill()
            starter = threading.Thread(target=server.start)
            starter.start()
            got += take(loader, 60)
            starter.join()
        _check(got, server)


def _check(got: list[tuple[int, np.ndarray]], server: RunningServer) -> None:
    with make_loader(server.url) as reference:
        for (step, tokens), (right_step, right) in zip(got, take(reference, len(got)), strict=True):
            assert step == right_step
            assert np.array_equal(tokens, right), f"wrong tokens in step {step}"
