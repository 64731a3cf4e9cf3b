"""Measure what `loader.record` costs a training loop on the CPU, whose steps take 5 ms.

    python -m scripts.recording_cost [ROUNDS]

Loops without a recorder, with one, and with one that writes files take turns, 1,000 steps each. A step is
5 ms of CPU time in matrix products. Every loop ends with `close`, so the files of each are written within
the figures: six times as often as in a run, where a part is written anew every 30 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from corpus_client import CorpusLoader
from scripts.processes import HOST, claim_port, is_ready, running

STEP_SECONDS, NUM_STEPS, SEQ_LEN = 0.005, 1000, 1024
SOURCES = [f"source-{number}" for number in range(8)]
WAYS = ("none", "means", "files")


def loop(url: str, rows: int, way: str, folder: Path) -> dict[str, float]:
    """Return microseconds of a step: inside `record` (CPU, wall), and of the process's CPU beyond 5 ms."""
    stage = {"from_step": 0, "global_batch_size": rows, "mixture": dict.fromkeys(SOURCES, 1)}
    options: dict[str, Any] = {"record_dir": folder} if way == "files" else {}
    loader = CorpusLoader(
        url, plan={"seq_len": SEQ_LEN, "stages": [stage]}, sources=True, device="cpu", **options
    )
    draw, matrix = torch.Generator().manual_seed(1), torch.rand(64, 64)
    cpu, wall = [], []
    next(loader)
    began = time.process_time()
    for _ in range(NUM_STEPS):
        batch = next(loader)
        until = time.thread_time() + STEP_SECONDS
        while time.thread_time() < until:
            torch.mm(matrix, matrix)
        losses = torch.rand(rows, generator=draw)
        before = time.thread_time(), time.perf_counter()
        if way != "none":
            loader.record(batch.step, losses)
        cpu.append(time.thread_time() - before[0])
        wall.append(time.perf_counter() - before[1])
    loader.close()
    spent = (time.process_time() - began) / NUM_STEPS - STEP_SECONDS
    micro = 1e6
    return {
        "record, CPU, mean": np.mean(cpu) * micro,
        "record, wall, median": median(wall) * micro,
        "record, wall, 99 %": float(np.quantile(wall, 0.99)) * micro,
        "process, CPU": spent * micro,
    }


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
            for rows in (8, 64, 512):
                found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
                for number in range(rounds):
                    for way in WAYS:
                        found[way].append(loop(url, rows, way, folder / f"{rows}-{number}"))
                for way, its in found.items():
                    cells = [f"{median(each[key] for each in its):.1f}" for key in its[0]]
                    if rows == 8 and way == "none":
                        print(f"| rows | losses | {' | '.join(its[0])} |\n|---|---|{'--:|' * len(cells)}")
                    print(f"| {rows} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
