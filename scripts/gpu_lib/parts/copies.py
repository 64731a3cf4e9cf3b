"""Copies by size, from every kind of memory, and the loader's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from corpus_client.tools import copies
from corpus_client.tools.timing import Clock, size_name
from scripts.benchmarks.report import Report, Table, Target
from scripts.gpu_lib import full_slots
from scripts.gpu_lib.run import Cell, Figures, Run, at_least, at_most

SIZES, QUICK_SIZES = tuple(1 << power for power in (26, 12, 20, 24, 28, 22, 16)), (1 << 16, 1 << 12)
BATCHES, QUICK_BATCHES = tuple(1 << power for power in (22, 12, 20, 24, 26)), (1 << 12,)

LARGE_BYTES = 4_000_000
"""Of a batch, from which on its copies should be as fast as the best."""

OF_BEST = 0.9
MAX_HELD_US = 100.0
PAGEABLE_BACK = "device to pageable"
PINNED = ("torch-pinned to device", "registered to device")


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each size of copies, then for each batch."""
    repeats = 3 if run.quick else 20
    for size in QUICK_SIZES if run.quick else SIZES:
        yield Cell(name=f"copy {size}", seconds=6, measure=partial(copies_of, run.device, size, repeats))
    for size in QUICK_BATCHES if run.quick else BATCHES:
        yield Cell(name=f"batch {size}", seconds=4, measure=partial(batches_of, run.device, size, repeats))


def copies_of(device: torch.device, size: int, repeats: int) -> Figures:
    """Measure what `corpus-client transfer` does, and the way back to pageable memory."""
    data = copies.measure(device, [size], repeats).data
    found = list(data["measurements"])
    if device.type != "cpu":
        there = torch.empty(size, dtype=torch.uint8, device=device)
        back = partial(copies.host_memory("pageable", size, device).copy_, there)
        found.append(Clock(device).measure(PAGEABLE_BACK, size, back, repeats))
    return {"measurements": found, "missing": list(data["missing"])}


def batches_of(device: torch.device, size: int, repeats: int) -> Figures:
    """Measure batches of a size one after the other, and the call for one when the device keeps up."""
    return {"measurements": full_slots.measure(Clock(device), [size], repeats)}


def best_copy(cells: Mapping[str, Figures]) -> float | None:
    """Return bytes per second of the fastest copy from page-locked memory; None without a GPU."""
    return max((each["bytes_per_second"] for each in _all(cells) if each["name"] in PINNED), default=None)


def _all(cells: Mapping[str, Figures]) -> list[dict[str, Any]]:
    return [each for found in cells.values() for each in found["measurements"]]


def report(cells: Mapping[str, Figures]) -> Report:
    """Show GB/s and the CPU's share by size; compare the loader's copies with the best of the same run."""
    tables, targets = [], []
    copied = {name: found for name, found in cells.items() if name.startswith("copy")}
    sent = {name: found for name, found in cells.items() if name.startswith("batch")}
    for title, its in (("copies", copied), ("the loader's batches", sent)):
        if its:
            tables.append(_table(title, _all(its)))
    best = best_copy(copied)
    if sent and best is not None:
        targets += batch_targets(_all(sent), best)
    missing = dict.fromkeys(line for found in cells.values() for line in found.get("missing", ()))
    return Report(
        data=dict(cells), tables=tables, targets=targets, notes=[f"Not measured: {line}" for line in missing]
    )


def batch_targets(batches: Sequence[Mapping[str, Any]], best: float) -> list[Target]:
    """Bound what a call holds the CPU, and ask that large batches are sent as fast as the best copy."""
    held = 1e6 * max(each["held"]["median"] for each in batches)
    targets = [at_most("CPU held by the call for a batch, median", held, MAX_HELD_US, "us")]
    large = [each for each in batches if each["bytes"] >= LARGE_BYTES and each["name"] == "as stored"]
    if large:
        slowest = min(each["bytes_per_second"] for each in large)
        figure = "batches of 4 MB and more as the loader sends them / best page-locked copy"
        targets.append(at_least(figure, slowest / best, OF_BEST))
    return targets


def _table(title: str, measurements: Sequence[Mapping[str, Any]]) -> Table:
    sizes = sorted({each["bytes"] for each in measurements})
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for each in measurements:
        by_name.setdefault(each["name"], {})[each["bytes"]] = each
    rows = [
        [name, *(_figures(found[size]) if size in found else "" for size in sizes)]
        for name, found in by_name.items()
    ]
    return Table(title=f"{title}: GB/s (us the CPU is held)", columns=["", *map(size_name, sizes)], rows=rows)


def _figures(found: Mapping[str, Any]) -> str:
    speed = f"{found['bytes_per_second'] / 1e9:.3g}" if "bytes_per_second" in found else ""
    held = f"({found['held']['median'] * 1e6:,.0f})" if "held" in found else ""
    return f"{speed} {held}".strip()
