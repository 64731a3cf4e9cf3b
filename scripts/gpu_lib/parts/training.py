"""A real training loop: GPT-2 124M, bf16, compiled, fed in four ways, with and without `loss.item()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from corpus_client.tools.report import open_loader
from corpus_client.tools.timing import Clock, Spread
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib import overlap
from scripts.gpu_lib.gpt2 import GPT2_124M, TINY, Trainer
from scripts.gpu_lib.overlap import Batches, Feed
from scripts.gpu_lib.run import Cell, Figures, Run, at_most

ROWS, SEQ_LEN = (16, 64), 1024
QUICK_ROWS, QUICK_SEQ_LEN = (2,), 32
SECONDS, COMPILE_SECONDS = 4.0, 60.0
WARM_UP_STEPS = 5
WORKERS = 4
CONSTANT, LOADER = "constant", "CorpusLoader"
MAX_STALL_PERCENT = 1.0


def nanogpt(feed: Feed) -> Batches:
    """Do what nanoGPT's `get_batch` does: rows one by one to int64, pinned anew, copied without blocking."""
    data, block = feed.tokens, feed.window - 1
    while True:
        starts = torch.randint(len(data) - block, (feed.rows,)).tolist()
        x, y = (
            torch.stack(
                [torch.from_numpy(data[i + late : i + late + block].astype(np.int64)) for i in starts]
            )
            for late in (0, 1)
        )
        if feed.device.type != "cpu":
            x, y = x.pin_memory(), y.pin_memory()
        yield x.to(feed.device, non_blocking=True), y.to(feed.device, non_blocking=True)


WAYS: dict[str, Callable[[Feed], Batches]] = {
    CONSTANT: overlap.constant,
    LOADER: overlap.corpus_loader,
    "DataLoader": overlap.dataloader,
    "nanoGPT": nanogpt,
}


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each batch, way, and whether each step waits for its loss; a model for each batch."""
    seq_len = QUICK_SEQ_LEN if run.quick else SEQ_LEN
    for rows in QUICK_ROWS if run.quick else ROWS:
        trainer = cache(partial(Trainer, run.device, TINY if run.quick else GPT2_124M, seq_len))
        plan: dict[str, Any] = {"corpus": run.corpus, "seq_len": seq_len, "global_batch_size": rows}
        feed = Feed(
            np.random.default_rng(0).integers(0, 50_257, overlap.POOL_TOKENS, np.uint16),
            rows=rows,
            window=seq_len + 1,
            device=run.device,
            workers=1 if run.quick else WORKERS,
            open_loader=partial(open_loader, run.url, device=run.device, **plan),
        )
        seconds = 0.05 if run.quick else SECONDS
        for looks in (False, True):
            for name in WAYS:
                is_first = name == CONSTANT and not looks
                yield Cell(
                    name=f"{rows} x {seq_len}, {name}{', loss.item()' if looks else ''}",
                    seconds=COMPILE_SECONDS if is_first else 3 * SECONDS,
                    measure=partial(measure, trainer, feed, name, looks, seconds),
                )


def measure(make: Callable[[], Trainer], feed: Feed, name: str, looks: bool, seconds: float) -> Figures:
    """Train for some seconds.

    Returns: rows, seq_len, way, looks at each loss; num_parameters; first_batch_seconds since the way was
    begun; tokens_per_second; step and next, the spreads of a step's seconds and of the call for its batch.
    """
    trainer, clock = make(), Clock(feed.device)
    waits: list[float] = []
    ends = overlap.StepEnds(clock)
    began = time.perf_counter()
    with closing(WAYS[name](feed)) as batches:
        batch = next(batches)
        first = time.perf_counter() - began
        for _ in range(WARM_UP_STEPS):
            trainer(batch)
            batch = next(batches)
        clock.synchronize()
        stop = time.perf_counter() + seconds
        while len(ends) < 3 or time.perf_counter() < stop:
            asked = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - asked)
            loss = trainer(batch)
            if looks:
                loss.item()
            ends.note()
        steps = ends.seconds()
    return {
        "rows": feed.rows,
        "seq_len": feed.window - 1,
        "way": name,
        "looks": looks,
        "num_parameters": trainer.num_parameters,
        "first_batch_seconds": first,
        "tokens_per_second": feed.rows * (feed.window - 1) / float(np.mean(steps)),
        "step": asdict(Spread.of(steps)),
        "next": asdict(Spread.of(waits)),
    }


def stall(found: Figures, cells: Mapping[str, Figures]) -> float | None:
    """Return by how many percent a step is longer than that of a constant batch; None without one.

    Figures that were noted by hand may say `stall_percent` themselves.
    """
    if "stall_percent" in found:
        return float(found["stall_percent"])
    for each in cells.values():
        if each["way"] == CONSTANT and all(each[key] == found[key] for key in ("rows", "seq_len", "looks")):
            return 100 * float(each["tokens_per_second"] / found["tokens_per_second"] - 1)
    return None


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each cell, and bound the loader's stalls."""
    rows, targets = [], []
    for name, found in cells.items():
        waits = stall(found, cells)
        rows.append([
            name,
            f"{found['tokens_per_second'] / 1e3:,.0f}" if "tokens_per_second" in found else "",
            _milliseconds(found, "step", "median"),
            _milliseconds(found, "step", "p99"),
            _milliseconds(found, "next", "median"),
            "" if waits is None else f"{waits:+.1f}%",
            f"{found['first_batch_seconds']:.2f}" if "first_batch_seconds" in found else "",
        ])  # fmt: skip
        if found["way"] == LOADER and waits is not None:
            targets.append(at_most(f"stall of {name}", waits, MAX_STALL_PERCENT, "%"))
    columns = ["batch and way", "k tokens/s", "step p50 ms", "p99 ms", "next() ms", "stall", "first batch s"]
    table = Table(title="training GPT-2; stall against a constant batch", columns=columns, rows=rows)
    return Report(data=dict(cells), tables=[table], targets=targets)


def _milliseconds(found: Figures, what: str, which: str) -> str:
    return f"{1e3 * found[what][which]:.2f}" if which in found.get(what, {}) else ""
