"""Tokens per second onto the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from corpus_client.tools import measured
from corpus_client.tools.report import open_loader
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib.run import Cell, Figures, Run

SHAPES, QUICK_SHAPES = ((64, 1024), (512, 2048)), ((8, 128),)


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each shape and type."""
    for rows, seq_len in QUICK_SHAPES if run.quick else SHAPES:
        for stored in (True, False):
            name = f"{rows} x {seq_len + 1} {'as stored' if stored else 'int64'}"
            yield Cell(name=name, seconds=5, measure=partial(measure, run, rows, seq_len, stored))


def measure(run: Run, rows: int, seq_len: int, stored: bool) -> Figures:
    """Do what `corpus-client bench` does."""
    options: dict[str, Any] = {
        "corpus": run.corpus,
        "seq_len": seq_len,
        "global_batch_size": rows,
        "device": run.device,
    }
    with open_loader(run.url, dtype=None if stored else torch.int64, **options) as loader:
        found = measured.measure(loader, 0.2 if run.quick else 3.0).as_json()
    return {"rows": rows, "seq_len": seq_len, "stored": stored, **found}


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each cell."""
    rows = []
    for name, found in cells.items():
        waits = found.get("wait", {})
        waited = (f"{waits[which] * 1e3:.3f}" if which in waits else "" for which in ("median", "p99"))
        rows.append([name, f"{found['tokens_per_second'] / 1e6:,.0f}", *waited])
    columns = ["batch", "M tokens/s", "wait p50 ms", "p99 ms"]
    return Report(data=dict(cells), tables=[Table(title="delivered", columns=columns, rows=rows)])
