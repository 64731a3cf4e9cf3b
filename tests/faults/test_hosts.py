"""Replicas and a training loop on hosts of their own: a host that the network loses, and gets back.

CORPUS_SOAK_SECONDS=60 lets the loop take so long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from scripts.processes import running
from tests.corpora import some_tokens, write_raw
from tests.faults.hosts import Hosts, server_on, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no network namespaces here: {why_not()}")

WORKER = """
import sys
from corpus_client import ArrayLoader
options = dict(corpus="web", seq_len=64, global_batch_size=8, order="sequential")
with ArrayLoader(sys.argv[1].split(","), **options) as loader:
    for batch in loader:
        print(batch.step, batch.tokens.tobytes().hex(), flush=True)
        sys.stdin.readline()  # until the test says so
"""
STEPS = 3000  # of which a request asks for 256
PAUSE_SECONDS = float(os.environ.get("CORPUS_SOAK_SECONDS", "0")) / STEPS


def test_a_replica_that_the_network_loses_and_gets_back_changes_no_batch(tmp_path: Path) -> None:
    """Packets vanish: nobody is told anything. The loop goes on with the other replica."""
    tokens = some_tokens(STEPS * 8 * 64 + 1)
    path = write_raw(tmp_path / "web.bin", tokens)
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3))
        urls = [stack.enter_context(server_on(hosts, n, path, tmp_path / f"{n}")) for n in (0, 1)]
        command = hosts.command(2, [sys.executable, "-c", WORKER, ",".join(urls)])
        worker = stack.enter_context(running(command, stdin=pipe, stdout=pipe))
        assert worker.stdin is not None
        assert worker.stdout is not None
        for expected in range(STEPS):
            time.sleep(PAUSE_SECONDS)
            match expected:
                case 700:
                    hosts.link(0, "down")
                case 1400:
                    hosts.link(0, "up")
                    hosts.link(1, "down")
                case 2100:
                    hosts.link(1, "up")
            step, got = worker.stdout.readline().split()
            assert int(step) == expected
            starts = (8 * expected + np.arange(8)) * 64
            right = np.concatenate([tokens[start : start + 65] for start in starts])
            assert bytes.fromhex(got.decode()) == right.astype("<u2").tobytes()
            worker.stdin.write(b"\n")
            worker.stdin.flush()
