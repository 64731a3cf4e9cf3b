"""Replays of a CUDA graph, whose tensors `next_into` fills."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from corpus_client.tools.report import open_loader
from corpus_client.tools.timing import Clock
from scripts.benchmarks.report import Report, Table
from scripts.gpu_lib.full_slots import Pair
from scripts.gpu_lib.overlap import WARM_UP_STEPS, StepEnds, TrainStep
from scripts.gpu_lib.run import Cell, Figures, Run, at_most

CELLS = ((0.001, 64), (0.005, 512))
"""(seconds of a step, rows of 1,024 tokens)."""

MAX_STALL_PERCENT = 5.0
STEPS, ROUNDS = 300, 3
AHEAD = 100
"""Replays that the loop queues before it waits: a graph runs far behind its loop."""


def cells(run: Run) -> Iterator[Cell]:
    """Yield a cell for each length of a step."""
    for seconds, rows in ((0.001, 4),) if run.quick else CELLS:
        name = f"{1e3 * seconds:g} ms, {rows} rows"
        yield Cell(name=name, seconds=12, measure=partial(measure, run, seconds, rows))


def measure(run: Run, seconds: float, rows: int) -> Figures:
    """Return seconds of a step whose tensors stay as they are, and of one whose tensors the loader fills."""
    seq_len, steps = (128, 3) if run.quick else (1024, STEPS)
    clock = Clock(run.device)
    static = (
        torch.zeros(rows, seq_len, dtype=torch.int64, device=run.device),
        torch.zeros(rows, seq_len, dtype=torch.int64, device=run.device),
    )
    replay = captured(TrainStep(clock, static, seconds), static, run)
    plan: dict[str, Any] = {"corpus": run.corpus, "seq_len": seq_len, "global_batch_size": rows}
    with open_loader(run.url, device=run.device, **plan) as loader:
        fills: dict[str, Callable[[], object]] = {
            "constant": lambda: None,
            "next_into": lambda: loader.next_into(*static),
        }
        rounds = [
            {name: _mean_step(fill, replay, clock, steps) for name, fill in fills.items()}
            for _ in range(1 if run.quick else ROUNDS)
        ]
    found = {f"{name}_seconds": statistics.median(its[name] for its in rounds) for name in fills}
    stalls = [its["next_into"] / its["constant"] - 1 for its in rounds]
    return {
        "asked_seconds": seconds,
        "rows": rows,
        "captured": run.is_cuda,
        **found,
        "stall": statistics.median(stalls),
    }


def captured(step: TrainStep, static: Pair, run: Run) -> Callable[[], object]:
    """Return the replay of a graph; on a device without graphs the step itself."""
    if not run.is_cuda:
        return partial(step, static)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static)
    return graph.replay


def _mean_step(
    fill: Callable[[], object], replay: Callable[[], object], clock: Clock, num_steps: int
) -> float:
    clock.synchronize()
    ends = StepEnds(clock, ahead=AHEAD)
    for _ in range(WARM_UP_STEPS + num_steps):
        fill()
        replay()
        ends.note()
    return statistics.fmean(ends.seconds()[WARM_UP_STEPS - 1 :])


def report(cells: Mapping[str, Figures]) -> Report:
    """Show a row for each cell, and bound the stalls."""
    rows = [
        [
            name,
            *(f"{1e3 * found[f'{way}_seconds']:.3f}" for way in ("constant", "next_into")),
            f"{100 * found['stall']:+.1f}%",
        ]
        for name, found in cells.items()
    ]
    table = Table(
        title="steps that are replayed", columns=["", "constant ms", "next_into ms", "stall"], rows=rows
    )
    targets = [
        at_most(f"stall of next_into, {name}", 100 * found["stall"], MAX_STALL_PERCENT, "%")
        for name, found in cells.items()
    ]
    notes = (
        []
        if all(found["captured"] for found in cells.values())
        else ["Not captured: this device has no graphs."]
    )
    return Report(data=dict(cells), tables=[table], targets=targets, notes=notes)
