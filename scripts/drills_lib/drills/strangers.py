"""Four strangers ask for ever new tables of a large corpus, and leave; a loader of a small one begins."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from corpus_client import CorpusLoader
from scripts.drills_lib.drill import Found
from tests.corpora import write_megatron_lengths
from tests.raw_http import RawConnection, get
from tests.serving import RunningServer, wait_until

ROWS = (31, 56)
COUNT = "4 strangers for 20 s, 3 loaders of a small corpus"
SECONDS = 60
ORACLE = "the checksums, and the first batch of the same plan without strangers"
RULE = "a first batch within 2 s, no builder 1 s after the last stranger left, nothing half-made on disk"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    corpora = {}
    for name, number in (("many", 2_000_000), ("few", 20_000)):
        lengths = np.random.default_rng(0).integers(2, 48, number)
        corpora[name] = f"{write_megatron_lengths(folder / name, lengths, eot=9)},eot=9"
    over, asked = threading.Event(), list[int]()

    def ask(stranger: int) -> None:
        seq_len = 100 + 200 * stranger
        while not over.is_set():
            seq_len += 1
            with RawConnection(server) as connection:
                connection.send(
                    get("/v1/batches", corpus="many", seq_len=seq_len, batch_size=4, step=0, rows="documents")
                )
                over.wait(0.4)
            asked.append(seq_len)

    def first_batch(seq_len: int) -> float:
        began = time.monotonic()
        plan: dict[str, Any] = {
            "corpus": "few",
            "seq_len": seq_len,
            "global_batch_size": 8,
            "rows": "documents",
        }
        with CorpusLoader(server.url, **plan, device="cpu") as loader:
            next(loader)
        return time.monotonic() - began

    with RunningServer(corpora, folder) as server:
        found.figure("first batch alone, s", first_batch(1000))
        strangers = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
        for each in strangers:
            each.start()
        waits = []
        for number in range(3):
            time.sleep(4)
            waits.append(first_batch(1001 + number))
        time.sleep(4)
        over.set()
        for each in strangers:
            each.join()
        left = time.monotonic()
        worker = psutil.Process(server.worker_pid)
        wait_until(lambda: not worker.children(recursive=True), "builders go on", seconds=60)
        found.figure("tables asked for", len(asked), least=20)
        found.figure("first batch, worst of 3, s", max(waits), most=2)
        found.figure("builders end after, s", time.monotonic() - left, most=1)
        found.expect(server.stop() == 0, "SIGTERM did not end the server with 0")
        with suppress(FileNotFoundError):
            half = [
                each.name for each in (server.state_dir / "tables").iterdir() if each.name.startswith(".")
            ]
            found.expect(not half, f"half-made tables are left: {half}")
