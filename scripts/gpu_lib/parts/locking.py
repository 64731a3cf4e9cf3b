"""What page-locking costs, by size."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from corpus_client.staging.ring import open_stager
from corpus_client.tools.machine import measurable_bytes
from corpus_client.tools.timing import seconds_name, size_name
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib.run import Cell, Figures, Run

SIZES, QUICK_SIZES = (1 << 30, 1 << 26, 1 << 20, 1 << 33), (1 << 20,)


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each size that is within a quarter of the free memory."""
    for size in QUICK_SIZES if run.quick else SIZES:
        if size <= measurable_bytes(run.device):
            yield Cell(name=size_name(size), seconds=3 + size / 2e9, measure=partial(lock, run.device, size))


def lock(device: torch.device, size: int) -> Figures:
    """Return seconds of the loader's way (a map that the runtime registers) and of torch's allocator."""
    stager = open_stager(device)
    began = time.perf_counter()
    memory = stager.host_memory(size)
    locked = time.perf_counter()
    is_pinned = memory.is_pinned() if device.type != "cpu" else False
    asked = time.perf_counter()
    del memory
    gc.collect()
    unlocked = time.perf_counter()
    stager.close()
    torch_memory = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    torch_memory[::4096] = 1
    by_torch = time.perf_counter() - unlocked
    return {
        "bytes": size,
        "is_pinned": is_pinned,
        "lock_seconds": locked - began,
        "unlock_seconds": unlocked - asked,
        "torch_seconds": by_torch,
    }


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each size."""
    ways = ("lock_seconds", "unlock_seconds", "torch_seconds")
    rows = [
        [size_name(found["bytes"]), *(seconds_name(found[way]) if way in found else "" for way in ways)]
        for found in sorted(cells.values(), key=lambda found: found["bytes"])
    ]
    columns = ["", "registered", "unlocked", "pinned by torch"]
    return Report(data=dict(cells), tables=[Table(title="page-locking", columns=columns, rows=rows)])
