"""Measure what `loader.record` costs a training loop on the CPU, whose steps take 5 ms.

    python -m scripts.recording_cost [ROUNDS]

Loops without a recorder, with one, and with one that writes files take turns, 640 steps each. A step is 5 ms
of CPU time in matrix products, or no work at all. The lower decile says what a call takes when nothing
interrupts it; the mean of the CPU time includes what is done for 32 steps together. Beside them stands
what `next(loader)` takes in the same loop, because a busy machine makes both slower alike.
"""

from __future__ import annotations

import itertools
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

STEP_SECONDS, NUM_STEPS, SEQ_LEN = 0.005, 640, 1024
SOURCES = [f"source-{number}" for number in range(8)]
WAYS = ("none", "means", "files")
FIGURES = ("next", "record", "CPU")


def loop(url: str, rows: int, way: str, work: float, folder: Path) -> dict[str, list[float]]:
    """Return microseconds of each step's `next(loader)` and of its `record`, by the clock and of CPU."""
    stage = {"from_step": 0, "global_batch_size": rows, "mixture": dict.fromkeys(SOURCES, 1)}
    options: dict[str, Any] = {"record_dir": folder} if way == "files" else {}
    draw, matrix = torch.Generator().manual_seed(1), torch.rand(64, 64)
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    with CorpusLoader(
        url, plan={"seq_len": SEQ_LEN, "stages": [stage]}, sources=True, device="cpu", **options
    ) as loader:
        next(loader)
        for _ in range(NUM_STEPS):
            losses = torch.rand(rows, generator=draw)
            asked = time.perf_counter()
            batch = next(loader)
            found["next"].append((time.perf_counter() - asked) * 1e6)
            until = time.thread_time() + work
            while time.thread_time() < until:
                torch.mm(matrix, matrix)
            began, spent = time.perf_counter(), time.thread_time()
            if way != "none":
                loader.record(batch.step, losses)
            found["CPU"].append((time.thread_time() - spent) * 1e6)
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
            print("| step | rows | losses | next(loader), 10 %, us | record, 10 %, us | median | CPU, mean |")
            print("|--:|--:|---|--:|--:|--:|--:|")
            for work, rows in itertools.product((0, STEP_SECONDS), (8, 64, 512)):
                found: dict[str, dict[str, list[float]]] = {
                    way: {name: [] for name in FIGURES} for way in WAYS
                }
                for number, way in itertools.product(range(rounds), WAYS):
                    for name, its in loop(url, rows, way, work, folder / f"{rows}-{number}").items():
                        found[way][name] += its
                for way in WAYS:
                    asked, recorded, spent = found[way].values()
                    cells = [np.quantile(asked, 0.1), *np.quantile(recorded, (0.1, 0.5)), np.mean(spent)]
                    shown = " | ".join(f"{cell:.1f}" for cell in cells)
                    print(f"| {work * 1e3:g} ms | {rows} | {way} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
