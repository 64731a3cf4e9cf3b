"""Measure what `loader.record` costs a training loop on the CPU.

    python -m scripts.recording_cost [ROUNDS]

A step trains a small transformer. Its hundreds of torch calls each release the interpreter's lock, as
those of a loop that feeds a GPU do. One large matrix product instead would leave all other code out of the
caches, and a loop of small ones that one call in them. In each round blocks of 400 steps take turns, in
another order each time: without `record` (twice: what lies between the two is noise), with it, and with it
into files. Files are written every second instead of every 30 s, so that each block has its share.

*block* is the mean of a block's steps: the median over the blocks, and its 95 % interval. *step* says in the
same way how much longer a whole step takes than without `record`, beside a thread that writes. Both contain
what is done once a second. *CPU* is time of the loop's thread alone, without waits for the interpreter's
lock and for a core.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from corpus_client import CorpusLoader
from corpus_client.recording.files import RowWriter
from scripts.processes import HOST, claim_port, is_ready, running

NUM_STEPS, SEQ_LEN = 400, 1024
SOURCES = [f"source-{number}" for number in range(8)]
WAYS = ("none", "none again", "means", "files")


def training_step() -> Callable[[], None]:
    """Return what trains for about 5 ms."""
    layers = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(512, 64), *layers, nn.Linear(64, 512))
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.randint(512, (4, 33))

    def train() -> None:
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return train


def block(url: str, rows: int, way: str, train: Callable[[], None], folder: Path) -> npt.NDArray[np.float64]:
    """Return microseconds of each step: of `record` by the clock and of CPU, of the whole step."""
    stage = {"from_step": 0, "global_batch_size": rows, "mixture": dict.fromkeys(SOURCES, 1)}
    options: dict[str, Any] = {"record_dir": folder} if way == "files" else {}
    draw, found = torch.Generator().manual_seed(1), []
    with CorpusLoader(
        url, plan={"seq_len": SEQ_LEN, "stages": [stage]}, sources=True, device="cpu", **options
    ) as loader:
        next(loader)
        for _ in range(NUM_STEPS):
            losses = torch.rand(rows, generator=draw)
            began = time.perf_counter()
            batch = next(loader)
            train()
            asked, spent = time.perf_counter(), time.thread_time()
            if "none" not in way:
                loader.record(batch.step, losses)
            spent = time.thread_time() - spent
            ended = time.perf_counter()
            found.append((ended - asked, spent, ended - began))
    return np.array(found).T * 1e6


def shown(blocks: npt.NDArray[np.float64]) -> str:
    """Return the median of the blocks, and its interval by bootstrap."""
    drawn = np.median(np.random.default_rng(0).choice(blocks, (2000, len(blocks))), axis=1)
    return "{:.0f} ({:.0f} to {:.0f})".format(np.median(blocks), *np.quantile(drawn, (0.025, 0.975)))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    (RowWriter.__init__.__kwdefaults__ or {})["flush_seconds"] = 1.0
    port, train = claim_port(), training_step()
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in SOURCES:
            np.random.default_rng(0).integers(0, 50_000, 2**20, np.uint16).tofile(folder / f"{source}.bin")
        served = [f"{source}={folder / source}.bin" for source in SOURCES]
        command = [sys.executable, "-m", "corpus_server", "serve", *served, "--port", str(port)]
        command += ["--state-dir", str(folder), "--log-level", "warning"]
        with running(command, ready=partial(is_ready, url)):
            print("| rows | losses | step, ms | record, us: 10 % | median | mean | block | CPU | step |")
            print("|--:|---|--:|--:|--:|--:|--:|--:|--:|")
            for rows in (8, 64, 512):
                found = defaultdict[str, list[npt.NDArray[np.float64]]](list)
                for number in range(rounds):
                    for way in random.sample(WAYS, len(WAYS)):
                        found[way].append(block(url, rows, way, train, folder / f"{rows}-{number}"))
                for way in WAYS:
                    record, spent, steps = map(np.array, zip(*found[way], strict=True))
                    slower = steps.mean(1) - np.array([each[2].mean() for each in found["none"]])
                    cells = [f"{rows} | {way} | {np.median(steps) / 1e3:.1f}"]
                    cells += [f"{each:.1f}" for each in np.quantile(record, (0.1, 0.5))]
                    cells += [f"{record.mean():.1f}", *map(shown, (record.mean(1), spent.mean(1), slower))]
                    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
