"""What the server delivers on many cores; needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial

from scripts.benchmarks.axes import scaling
from scripts.benchmarks.contest import QUICK_SHAPES, SHAPES
from scripts.benchmarks.measure import CPU, DELIVERY, SPEED, Rounds
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib.run import Cell, Figures, Run

WORKERS, CLIENTS = (4, 8, 1), (1, 4, 8)


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each number of workers that leaves the clients a core."""
    cores = len(os.sched_getaffinity(0))
    for workers in (1,) if run.quick else WORKERS:
        if workers == 1 or 2 * workers <= cores:
            name = f"{workers} worker{'s'[: workers > 1]}"
            yield Cell(name=name, seconds=45, measure=partial(measure, run, workers))


def measure(run: Run, workers: int) -> Figures:
    """Do a round of the bench's axis `scaling` over the corpus of this run."""
    shape, clients = (QUICK_SHAPES[0], (1,)) if run.quick else (SHAPES[0], CLIENTS)
    rounds = Rounds(str(shape), DELIVERY)
    scaling.measure_workers(rounds, run.path, shape, workers, clients, 0.1 if run.quick else 1.5)
    found = rounds.summary()
    return {
        "workers": workers,
        "clients": {
            str(each): {
                kind: {
                    figure: its["median"]
                    for figure, its in found[scaling.name_of(kind, workers, each)].items()
                }
                for kind in (scaling.OURS, scaling.BARE)
            }
            for each in clients
        },
    }


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each number of workers and clients: M tokens/s, and the CPU's ratio."""
    rows = []
    for found in sorted(cells.values(), key=lambda found: found["workers"]):
        for clients, kinds in found["clients"].items():
            ours, bare = kinds[scaling.OURS], kinds[scaling.BARE]
            speeds = f"{ours[SPEED]:,.0f}", f"{bare[SPEED]:,.0f}"
            ratios = (
                f"{ours[figure] / bare[figure]:.2f}" if figure in ours else "" for figure in (SPEED, CPU)
            )
            rows.append([str(found["workers"]), clients, *speeds, *ratios])
    columns = ["workers", "clients", "M tokens/s", "bare TCP", "ratio", "ratio of CPU"]
    note = "Servers and clients share the cores of one machine."
    return Report(data=dict(cells), tables=[Table(title="scaling", columns=columns, rows=rows)], notes=[note])
