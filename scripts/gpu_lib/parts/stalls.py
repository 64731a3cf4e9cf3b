"""How long a training step of a chosen length waits for its batch, by each way of feeding it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from corpus_client.tools import report as client_report
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib import overlap
from scripts.gpu_lib.run import Cell, Figures, Run, at_most

CELLS = ((5, 4_000_000), (1, 256_000), (20, 16_000_000), (5, 1_000_000), (5, 16_000_000), (1, 1_000_000))
"""(step's length in ms, bytes of a step as stored)."""

SEQ_LEN, QUICK_SEQ_LEN = 1024, 128
MAX_STALL_PERCENT = {0.005: 1.0, 0.0: 5.0}
"""By the length of a step from which on it holds, in seconds."""

OURS = {"corpus-loader": "(e) from a server", "full-slots": "(e') its device half"}


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each length of a step."""
    for milliseconds, num_bytes in ((1, 20_000),) if run.quick else CELLS:
        name = f"{milliseconds} ms, {num_bytes / 1e6:g} MB"
        yield Cell(name=name, seconds=15, measure=partial(measure, run, milliseconds / 1e3, num_bytes))


def measure(run: Run, step_seconds: float, num_bytes: int) -> Figures:
    """Feed steps in every way."""
    seq_len = QUICK_SEQ_LEN if run.quick else SEQ_LEN
    rows = max(1, num_bytes // (2 * (seq_len + 1)))
    plan: dict[str, Any] = {"corpus": run.corpus, "seq_len": seq_len, "global_batch_size": rows}
    feed = overlap.Feed(
        np.random.default_rng(0).integers(0, 50_257, overlap.POOL_TOKENS, np.uint16),
        rows=rows,
        window=seq_len + 1,
        device=run.device,
        open_loader=partial(client_report.open_loader, run.url, device=run.device, **plan),
    )
    return overlap.measure(feed, step_seconds, *((2, 1) if run.quick else (40, 2)))


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each cell; bound the stalls of the loader."""
    names = list(dict.fromkeys(each["name"] for found in cells.values() for each in found["outcomes"]))[:-1]
    rows: list[list[str]] = []
    stalls: dict[tuple[str, float], list[float]] = {}
    for found in cells.values():
        step = found["outcomes"][-1].get("seconds", {}).get("median")
        stall = {each["name"]: 100 * each["stall"]["median"] for each in found["outcomes"]}
        asked = found["asked_seconds"]
        cell = [f"{1e3 * asked:g}", f"{1e3 * step:.2f}" if step else "", f"{found['batch_bytes'] / 1e6:.2f}"]
        speed = f"{found['batch_bytes'] / (step or asked) / 1e9:.2f}"
        rows.append([*cell, speed, *(f"{stall[name]:+.1f}%" if name in stall else "" for name in names)])
        least = max(each for each in MAX_STALL_PERCENT if asked >= each)
        for name, what in OURS.items():
            if name in stall:
                stalls.setdefault((what, least), []).append(stall[name])
    targets = [
        at_most(f"stall of {what}, {_length(least)}", max(its), MAX_STALL_PERCENT[least], "%")
        for (what, least), its in stalls.items()
    ]
    columns = ["step asked ms", "(f) ms", "MB a step", "needs GB/s", *names]
    table = Table(title="stall against a batch that is there (f)", columns=columns, rows=rows)
    return Report(data=dict(cells), tables=[table], targets=targets)


def _length(least: float) -> str:
    return f"steps of {1e3 * least:g} ms and more" if least else "shorter steps"
