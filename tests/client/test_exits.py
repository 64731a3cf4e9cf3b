"""Processes that use a loader end when they are told to, with their own exit code, in whatever way they end.

CORPUS_EXITS=100 runs the long form; keep the cores busy beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.client.exits import WAYS
from tests.client.reference_server import Fault, ReferenceServer
from tests.serving import environment

NUM_RUNS = int(os.environ.get("CORPUS_EXITS", "10"))
EXIT_CODES = {"exits": 3, "raises": 1}


@pytest.mark.timeout(600 + 60 * NUM_RUNS)
def test_every_process_ends_cleanly(server: ReferenceServer) -> None:
    """Answers are slow, so the fetcher is in the middle of a request when the training loop ends."""
    server.next_fault = lambda: Fault("slow", 0.02)
    script = Path(__file__).with_name("exits.py")
    done = subprocess.run(
        [sys.executable, str(script), server.url, str(NUM_RUNS)],
        env=environment(PYTHONFAULTHANDLER="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    ways = [WAYS[number % len(WAYS)] for number in range(NUM_RUNS)]
    assert Counter(done.stdout.splitlines()) == Counter(f"{way} {EXIT_CODES.get(way, 0)}" for way in ways)
    lines = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
    assert lines == ["RuntimeError: training failed"] * ways.count("raises")
