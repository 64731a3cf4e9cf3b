"""Measure plans that continue others: binding, finding a step, memory.

    nice python -m scripts.chains [--sources 8 64] [--stages 1 100 10000 100000]

In one process, without HTTP. Decisions are posted in parts of 256, as a client posts those that a server has
lost, then one by one. Then another worker, whose memory is empty, reads the chain from the store. Times are
CPU times. Stages have 20 steps of 512 rows, with weights of all sources drawn anew.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.known_plans import KnownPlans
from corpus_server.plan_store import PlanStore
from scripts.benchmarks.report import describe_machine

STEPS, ROWS, PART, REPEATS = 20, 512, 256, 30
COLUMNS = (
    "sources",
    "stages",
    "post in parts, ms a stage",
    "post one more, ms",
    "bind a lost one, s",
    "find a stage, us",
    "locate a step, us",
    "arrays, MB",
    "process grew by, MB",
    "state, MB",
)


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(folder: Path, num_sources: int, lengths: list[int]) -> None:
    """Print a line for each length of a chain."""
    names = [f"source-{number:02}" for number in range(num_sources)]
    for name in names:
        np.zeros(4096, dtype=np.uint16).tofile(folder / f"{name}.bin")
    draw, memory = np.random.default_rng(0), psutil.Process()

    def stages(first: int, count: int) -> list[dict[str, Any]]:
        weights = draw.integers(500, 2000, (count, num_sources)).tolist()
        return [
            {
                "from_step": STEPS * (first + k),
                "global_batch_size": ROWS,
                "mixture": dict(zip(names, each, strict=True)),
            }
            for k, each in enumerate(weights)
        ]

    specs = [CorpusSpec(name=name, path=folder / f"{name}.bin") for name in names]
    with Catalog.open(specs) as catalog, PlanStore(folder / f"state-{num_sources}") as store:
        known = KnownPlans(catalog, store)
        before = memory.memory_info().rss
        plan = known.keep_document(json.dumps({"seq_len": 64, "stages": stages(0, 1)}).encode()).plan

        def post(count: int) -> None:
            nonlocal plan
            link = {"parent": plan.id, "stages": stages(len(plan.stages), count)}
            plan = known.keep_document(json.dumps(link).encode()).plan

        for length in lengths:
            began, first = time.process_time(), len(plan.stages)
            while len(plan.stages) < length:
                post(min(PART, length - len(plan.stages)))
            in_parts = 1e3 * (time.process_time() - began) / max(1, len(plan.stages) - first)
            grown = memory.memory_info().rss - before
            one = median(cpu(lambda: post(1)) for _ in range(REPEATS))
            other = KnownPlans(catalog, store)
            lost = cpu(lambda: other.by_id(plan.id))  # noqa: B023 - called at once
            sampler = other.by_id(plan.id).sampler
            steps = draw.integers(0, STEPS * len(plan.stages), 1000).tolist()
            find = cpu(lambda: [sampler.timeline.number_at(step) for step in steps])  # noqa: B023
            sampler.locate(steps[0])  # makes the table of its block
            locate = median(cpu(lambda: sampler.locate(steps[0])) for _ in range(REPEATS))  # noqa: B023
            line = 5 * num_sources + 10
            cells = [
                f"{in_parts:.2f}" if len(plan.stages) - REPEATS > first else "",
                f"{1e3 * one:.2f}",
                f"{lost:.3f}",
                f"{1e3 * find:.2f}",
                f"{1e6 * locate:.0f}",
                f"{plan.log.num_bytes / 1e6:.1f}",
                f"{grown / 1e6:.0f}",
                f"{length * line / 1e6:.2f}",
            ]
            print(f"| {num_sources} | {length:,} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 100, 10_000, 99_900])
    args = parser.parse_args()
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine().items())
    print(machine, f"load {os.getloadavg()}")
    print(f"| {' | '.join(COLUMNS)} |\n|{'--:|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as name:
        for num_sources in args.sources:
            measure(Path(name), num_sources, args.stages)


if __name__ == "__main__":
    main()
