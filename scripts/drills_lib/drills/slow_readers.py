"""Readers take large responses at 1 kB a second; others go on asking for batches."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.questions import memory_mib
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web, train
from tests.raw_http import RawConnection, get
from tests.serving import RunningServer, wait_until

ROWS = (22,)
COUNT = "200 readers of 5 MB, for 20 s"
SECONDS = 60
ORACLE = "the file, for the loop beside them"
RULE = "less than 1 MiB of the worker's memory for each; the loop's p99 is below 0.1 s"
NUM_READERS = 200
LARGE: dict[str, Any] = {"corpus": "web", "seq_len": 1024, "batch_size": 64, "step": 1, "count": 38}
"""A gigabyte of them in flight is the server's limit; each is of several pieces of 896 KiB."""


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer({"web": web.path}, folder))
        before = memory_mib(server, "RssAnon")
        readers = [
            stack.enter_context(RawConnection(server, receive_buffer=4096)) for _ in range(NUM_READERS)
        ]
        for each in readers:
            each.send(get("/v1/batches", **LARGE))
        peaks = []

        def read() -> None:
            wait_until(lambda: server.active_requests() >= NUM_READERS, "not all are answered", seconds=60)
            end = time.monotonic() + 20
            while time.monotonic() < end:
                began = time.monotonic()
                for each in readers:
                    with suppress(OSError):  # refused, or dropped
                        each.socket.recv(1000)
                peaks.append(memory_mib(server, "RssAnon"))
                time.sleep(max(0.0, began + 1 - time.monotonic()))
            found.figure("readers that are still answered", server.active_requests(), least=NUM_READERS)

        loop = train(web, server.url, read)
    found.figure("growth for a reader, MiB", (max(peaks) - before) / NUM_READERS, most=1)
    found.figure("p99 of the loop, ms", 1000 * float(np.percentile(loop.waits, 99)), most=100)
    loop.tell(found, longest=1.0)
