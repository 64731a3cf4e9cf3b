"""Processes that train some steps and end: `python exits.py URL NUM_RUNS` prints how each way ended.

They are forked from this one, which has imported torch: a start costs 20 ms and not seconds. Three run at a
time, so that they share the cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from corpus_client import CorpusLoader

NUM_STEPS = 5
WAYS = ("returns", "closes", "exits", "raises", "drops")


def train(url: str, way: str) -> None:
    """Train, then end in this way."""
    loader = CorpusLoader(url, corpus="web", seq_len=16, global_batch_size=12, device="cpu")
    model = torch.nn.Sequential(torch.nn.Embedding(65536, 4), torch.nn.Linear(4, 64))
    for inputs, targets in loader:
        torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten() % 64).backward()
        if loader.step == NUM_STEPS:
            break
    if way == "closes":
        loader.close()
    elif way == "exits":
        sys.exit(3)
    elif way == "raises":
        raise RuntimeError("training failed")
    elif way == "returns":
        globals()["kept"] = loader  # alive until the interpreter clears its modules


def main(url: str, num_runs: int) -> Callable[[], None]:
    """Return what a forked process is to do; in this process, print what became of each."""
    running: dict[int, str] = {}
    for number in range(num_runs):
        way = WAYS[number % len(WAYS)]
        if (pid := os.fork()) == 0:
            return lambda: train(url, way)
        running[pid] = way
        if len(running) == 3 or number == num_runs - 1:
            while running:
                pid, status = os.wait()
                print(running.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
    return lambda: None


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Called here and not in `main`, so that a child ends as any program does: at the end of its script.
    main(sys.argv[1], int(sys.argv[2]))()
