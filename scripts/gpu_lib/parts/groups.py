"""A sweep of what the loader's copies are made of: bytes of a group, and of all slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from corpus_client.tools.timing import Clock, size_name
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib import full_slots
from scripts.gpu_lib.run import Cell, Figures, Run

MIB = 1 << 20
BATCHES = (MIB, 4 * MIB, 16 * MIB, 256 << 10)
SLOTS = (64 * MIB, 256 * MIB)
GROUPS = (4 * MIB, 1 * MIB, 16 * MIB)


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each batch, slots and group."""
    swept = ((64 << 10,), SLOTS[:1], GROUPS[:2]) if run.quick else (BATCHES, SLOTS, GROUPS)
    for batch in swept[0]:
        for slots in swept[1]:
            for group in swept[2]:
                name = f"{size_name(batch)} a batch, {size_name(slots)} of slots, {size_name(group)} a group"
                measure = partial(sweep, run, batch, slots, group, 3 if run.quick else 8)
                yield Cell(name=name, seconds=3, measure=measure)


def sweep(run: Run, batch: int, slots: int, group: int, repeats: int) -> Figures:
    """Measure batches with these slots and groups."""
    found = full_slots.measure(Clock(run.device), [batch], repeats, slots_bytes=slots, group_bytes=group)
    return {"batch_bytes": batch, "slots_bytes": slots, "group_bytes": group, "measurements": found}


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each batch and each size of the slots."""
    groups = sorted({found["group_bytes"] for found in cells.values()})
    rows: dict[tuple[int, int], dict[int, str]] = {}
    for found in cells.values():
        stored, widened = found["measurements"]
        speeds = f"{stored['bytes_per_second'] / 1e9:.3g}, {widened['bytes_per_second'] / 1e9:.3g}"
        rows.setdefault((found["batch_bytes"], found["slots_bytes"]), {})[found["group_bytes"]] = speeds
    table = Table(
        title="GB/s by bytes of a group: as stored, widened",
        columns=["a batch", "slots", *map(size_name, groups)],
        rows=[
            [size_name(batch), size_name(slots), *(its.get(group, "") for group in groups)]
            for (batch, slots), its in sorted(rows.items())
        ],
    )
    return Report(data=dict(cells), tables=[table])
