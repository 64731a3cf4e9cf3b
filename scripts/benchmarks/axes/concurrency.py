"""Whether 64 workers ever wait: each takes 16 x 1,025 tokens every 50 ms, for a minute, from one server.

The workers are `CorpusLoader`s, ranks of one plan, eight to a process: 64 in one process would measure its
interpreter lock, 64 processes on a small machine their interpreters. Each asks for one step at a time and
may be three ahead. A batch is late if it was not there when it was due. A slow one took `next` longer than a
tenth of the period, though it may have been there: 64 threads that wake at the same moment take turns on the
cores and, eight by eight, at an interpreter's lock. Latency is of each request, from before it is written
until its answer lies checked in the slot. Twice: all workers in step, as ranks of one job, and spread over
the period, as jobs of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts.benchmarks import corpus, plotting
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.expected import Expected, plan_of
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import serving
from scripts.benchmarks.workers import Job
from scripts.processes import running

HELP = "64 workers, each asking for 16 x 1,025 every 50 ms for a minute"

SHAPE, SMOKE_SHAPE = Shape(rows=16, length=1025), Shape(rows=2, length=1025)
NUM_TOKENS, SMOKE_TOKENS = 10**9, 200_000
PERIOD_SECONDS = 0.05
RUN_OF_SECONDS = 40.0
"""A minute at the usual `--seconds 1.5`."""
SMOKE_SECONDS = 1.0

NUM_PROCESSES, WORKERS_EACH = 8, 8
SLOW_SECONDS = PERIOD_SECONDS / 10
P99_MS = 25.0

CLOCKS = {"in step": 0.0, "spread": PERIOD_SECONDS}
"""Over how many seconds the workers' first batches are due."""


def measure(options: Options) -> Report:
    """Run the workers once for each kind of clock."""
    processes, each = (2, 2) if options.smoke else (NUM_PROCESSES, WORKERS_EACH)
    shape = SMOKE_SHAPE if options.smoke else SHAPE
    seconds = SMOKE_SECONDS if options.smoke else RUN_OF_SECONDS * options.seconds
    path = corpus.make(options.cache, SMOKE_TOKENS if options.smoke else NUM_TOKENS)
    corpus.warm(path)
    clocks = {}
    with serving({corpus.NAME: path}) as server:
        for name, over in CLOCKS.items():
            jobs = _jobs(server.url, shape, processes, each, seconds, over)
            results = run_jobs(jobs)
            check_last(results, jobs[0], path)
            clocks[name] = _figures(results)
    return report_of(
        {
            "shape": str(shape),
            "processes": processes,
            "workers_each": each,
            "seconds": seconds,
            "period_seconds": PERIOD_SECONDS,
            "slow_seconds": SLOW_SECONDS,
            "percentiles": plotting.PERCENTILES,
            "clocks": clocks,
        }
    )


def report_of(data: dict[str, Any]) -> Report:
    """Return the views of what was measured."""
    num_workers = data["processes"] * data["workers_each"]
    targets = []
    for clock, figures in data["clocks"].items():
        targets += [
            Target(
                figure=f"{num_workers} workers {clock}: late batches",
                reached=figures["late"],
                bound="at most",
                wanted=0,
            ),
            Target(
                figure=f"{num_workers} workers {clock}: p99 of a request",
                reached=figures["p99_ms"],
                bound="at most",
                wanted=P99_MS,
                unit="ms",
            ),
        ]
    return Report(
        data=data,
        tables=[_table(data, num_workers)],
        targets=targets,
        plots=[Plot(name="concurrency", draw=partial(_draw, data))],
        notes=[
            f"{data['processes']} processes hold {data['workers_each']} workers each. Late: no batch was "
            f"there when one was due. Slow: `next` took over {data['slow_seconds'] * 1e3:g} ms."
        ],
    )


def check_last(results: Sequence[dict[str, Any]], job: Job, path: Path) -> None:
    """Compare every worker's last batch with the corpus.

    Raises:
        RuntimeError: a worker took another step than it should, or has other tokens.
    """
    expected = Expected(path, plan_of(job.rows * job.world_size, job.length - 1))
    for result in results:
        step, digest = result["last"]
        tokens = expected.batches(job.num_batches, rank=result["rank"], world_size=job.world_size)
        # Step 0 was taken before the start.
        if step != job.num_batches or hashlib.sha256(tokens.tobytes()).hexdigest() != digest:
            raise RuntimeError(
                f"worker {result['rank']} must end with the windows of step {job.num_batches}, got other "
                f"tokens at step {step}"
            )


def _jobs(url: str, shape: Shape, processes: int, each: int, seconds: float, over: float) -> list[Job]:
    world_size = processes * each
    return [
        Job(
            url=url,
            ranks=list(range(first, first + each)),
            offsets=[over * rank / world_size for rank in range(first, first + each)],
            world_size=world_size,
            rows=shape.rows,
            length=shape.length,
            num_batches=max(1, round(seconds / PERIOD_SECONDS)),
            period_seconds=PERIOD_SECONDS,
        )
        for first in range(0, world_size, each)
    ]


def run_jobs(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Start a process for each job, let them begin together, and return every worker's result."""
    with ExitStack() as stack:
        processes = []
        for job in jobs:
            words = [sys.executable, "-m", "scripts.benchmarks.workers", json.dumps(dataclasses.asdict(job))]
            context = running(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            processes.append(stack.enter_context(context))
        for process in processes:
            _read_line(process)
        start = time.monotonic() + 0.5  # everybody has read it by then
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{start}\n".encode())
            process.stdin.flush()
        return [result for process in processes for result in json.loads(_read_line(process))]


def _read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.wait(10)
        raise RuntimeError(f"a process of workers ended with {process.returncode}")
    return line


def _figures(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    requests = np.concatenate([result["request_seconds"] for result in results]) * 1e3
    waits = np.concatenate([result["wait_seconds"] for result in results]) * 1e3
    p50, p99 = np.percentile(requests, [50, 99]).tolist()
    return {
        "requests": len(requests),
        "batches": len(waits),
        "late": sum(result["late"] for result in results),
        "slow": int((waits > SLOW_SECONDS * 1e3).sum()),
        "longest_wait_ms": float(waits.max()),
        "p50_ms": p50,
        "p99_ms": p99,
        "longest_ms": float(requests.max()),
        "retries": sum(result["retries"] for result in results),
        "distribution_ms": np.percentile(requests, plotting.PERCENTILES).tolist(),
    }


def _table(data: dict[str, Any], num_workers: int) -> Table:
    return Table(
        title=f"{num_workers} workers, {data['shape']} every {data['period_seconds'] * 1e3:g} ms "
        f"for {data['seconds']:g} s",
        columns=[
            "clocks", "batches", "late", "slow", "longest wait ms",
            "requests", "p50 ms", "p99 ms", "longest ms", "retries",
        ],
        rows=[
            [
                clock,
                f"{its['batches']:,}",
                f"{its['late']:,}",
                f"{its['slow']:,}",
                f"{its['longest_wait_ms']:.1f}",
                f"{its['requests']:,}",
                f"{its['p50_ms']:.1f}",
                f"{its['p99_ms']:.1f}",
                f"{its['longest_ms']:.1f}",
                f"{its['retries']:,}",
            ]
            for clock, its in data["clocks"].items()
        ],
    )  # fmt: skip


def _draw(data: dict[str, Any], figure: Figure) -> None:
    panel = figure.subplots()
    for (clock, its), style in zip(data["clocks"].items(), ("-", "--"), strict=True):
        values, percentiles = its["distribution_ms"], data["percentiles"]
        plotting.latencies(panel, values, percentiles, label=f"clocks {clock}", role="ours", style=style)
    panel.axhline(P99_MS, color=plotting.COLOURS["limit"], linewidth=1.2, label=f"wanted p99: {P99_MS:g} ms")
    num_workers = data["processes"] * data["workers_each"]
    panel.set_title(
        f"Latency of requests: {num_workers} workers, {data['shape']} each "
        f"every {data['period_seconds'] * 1e3:g} ms",
        fontsize=14,
    )
    panel.set_ylabel("ms until the answer is there and checked")
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
