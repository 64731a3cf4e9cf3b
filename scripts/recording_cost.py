"""Measure what `loader.record` costs a training loop on the CPU, whose steps take 5 ms.

    python -m scripts.recording_cost [ROUNDS]

Loops without a recorder, with one, and with one that writes files take turns, 200 steps each. A step is 5 ms
of CPU time in matrix products. The lower decile says what a call takes when nothing interrupts it; beside it
stands what `next(loader)` takes in the same loop, because a busy machine makes both slower alike.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corpus_client import CorpusLoader
from scripts.processes import HOST, claim_port, is_ready, running

STEP_SECONDS, NUM_STEPS, SEQ_LEN = 0.005, 200, 1024
SOURCES = [f"source-{number}" for number in range(8)]
WAYS = ("none", "means", "files")


def loop(url: str, rows: int, way: str, folder: Path) -> dict[str, list[float]]:
    """Return microseconds of each step's `next(loader)` and of its `record`."""
    stage = {"from_step": 0, "global_batch_size": rows, "mixture": dict.fromkeys(SOURCES, 1)}
    options: dict[str, Any] = {"record_dir": folder} if way == "files" else {}
    draw, matrix = torch.Generator().manual_seed(1), torch.rand(64, 64)
    found: dict[str, list[float]] = {"next": [], "record": []}
    with CorpusLoader(
        url, plan={"seq_len": SEQ_LEN, "stages": [stage]}, sources=True, device="cpu", **options
    ) as loader:
        next(loader)
        for _ in range(NUM_STEPS):
            losses = torch.rand(rows, generator=draw)
            asked = time.perf_counter()
            batch = next(loader)
            found["next"].append((time.perf_counter() - asked) * 1e6)
            until = time.thread_time() + STEP_SECONDS
            while time.thread_time() < until:
                torch.mm(matrix, matrix)
            began = time.perf_counter()
            if way != "none":
                loader.record(batch.step, losses)
            found["record"].append((time.perf_counter() - began) * 1e6)
    return found


def main() -> None:
    """Print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    port = claim_port()
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in SOURCES:
            np.random.default_rng(0).integers(0, 50_000, 2**20, np.uint16).tofile(folder / f"{source}.bin")
        served = [f"{source}={folder / source}.bin" for source in SOURCES]
        command = [sys.executable, "-m", "corpus_server", "serve", *served, "--port", str(port)]
        command += ["--state-dir", str(folder), "--log-level", "warning"]
        with running(command, ready=partial(is_ready, url)):
            print("| rows | losses | next(loader), 10 %, us | median | record, 10 %, us | median |")
            print("|---|---|--:|--:|--:|--:|")
            for rows in (8, 64, 512):
                found: dict[str, dict[str, list[float]]] = {way: {"next": [], "record": []} for way in WAYS}
                for number in range(rounds):
                    for way in WAYS:
                        for name, its in loop(url, rows, way, folder / f"{rows}-{number}").items():
                            found[way][name] += its
                for way in WAYS:
                    cells = [np.quantile(each, share) for each in found[way].values() for share in (0.1, 0.5)]
                    print(f"| {rows} | {way} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
