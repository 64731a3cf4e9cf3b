"""Measure whether 16 or 64 paced workers ever wait: each takes 16 x 1,025 tokens every 100 ms from a server.

The workers are `CorpusLoader`s, ranks of one plan, in four processes: 16 in one process would measure its
interpreter lock, 16 processes on a small machine their interpreters. Two cores are idle for most of the time
with 16 workers; with 64 in step all want a core at once. Each asks for one step at a time and may be three
ahead. A batch is late if it is not there when it is due. A batch is slow if `next` takes more than a tenth of
the period, even though the batch may be there: threads that wake at once take turns. Latency is of each
request, from before it is written until its response lies checked in the slot. Each round runs twice: with
all workers in step, as ranks of one job, and spread over the period, as independent jobs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.clients import Job, connected
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import BEFORE, NOW, now_and_before, resident_corpus
from scripts.benchmarks.expected import Expected
from scripts.benchmarks.measure import CPU, P50, P99, Rounds, cpu_seconds
from scripts.benchmarks.report import Options, Report, Target
from scripts.benchmarks.servers import Server

HELP = "16 and 64 workers, each asking for 16 x 1,025 every 100 ms: late batches, p50, p99"

SHAPE, QUICK_SHAPE = Shape(rows=16, length=1025), Shape(rows=2, length=1025)
PERIOD_SECONDS = 0.1
RUN_OF_SECONDS = 8.0  # times --seconds: 12 s by default for each clock, server and round
NUM_WORKERS, QUICK_NUM_WORKERS = (16, 64), (4,)
NUM_PROCESSES, QUICK_NUM_PROCESSES = 4, 2
SLOW_SECONDS = PERIOD_SECONDS / 10
P99_MS = 25.0  # of the fewest workers; more in step wait for a core
CLOCKS = {"in step": 0.0, "spread": PERIOD_SECONDS}  # seconds over which the first batches are due
LATE = "late"
COLUMNS = {
    LATE: ("late batches", ",.0f"),
    "slow": ("slow batches", ",.0f"),
    P50: ("request p50 ms", ".2f"),
    P99: ("p99 ms", ".2f"),
    "longest_ms": ("longest ms", ".1f"),
    "retries": ("retries", ",.0f"),
    CPU: ("server's CPU s / 10^9", ".2f"),
}


def measure(options: Options) -> Report:
    """Run 16 and then 64 workers against every server, with each kind of clock, in every round."""
    path = resident_corpus(options)
    report = Report(data={}, tables=[])
    report.notes.append(
        f"Slow: `next` took over {SLOW_SECONDS * 1e3:g} ms, whether or not the batch was there."
    )
    with now_and_before(options, path) as servers:
        for num_workers in QUICK_NUM_WORKERS if options.quick else NUM_WORKERS:
            _add(report, _run(num_workers, servers, path, options))
    return report


def _run(num_workers: int, servers: Mapping[str, Server], path: Path, options: Options) -> Rounds:
    shape = QUICK_SHAPE if options.quick else SHAPE
    seconds = 0.3 if options.quick else RUN_OF_SECONDS * options.seconds
    period = f"{PERIOD_SECONDS * 1e3:g} ms"
    rounds = Rounds(f"{num_workers} workers, {shape} every {period} for {seconds:g} s", COLUMNS)
    processes = QUICK_NUM_PROCESSES if options.quick else NUM_PROCESSES
    for number in range(options.rounds):
        for clock, over in CLOCKS.items():
            for name in list(servers) if number % 2 == 0 else reversed(list(servers)):
                server = servers[name]
                jobs = _jobs(server.url, shape, processes, num_workers // processes, seconds, over)
                cpu = cpu_seconds(server.pids) - cpu_seconds([])  # without this process's
                with connected(jobs) as clients:
                    start = time.monotonic() + 0.5  # by then every process has read it
                    results = [result for its in clients.turn(start) for result in its]
                cpu = cpu_seconds(server.pids) - cpu_seconds([]) - cpu
                check_last(results, jobs[0], path)
                num_tokens = jobs[0].num_batches * num_workers * shape.num_tokens
                rounds.add(f"{name}, {clock}", {**_figures(results), CPU: cpu / num_tokens * 1e9})
    return rounds


def _add(report: Report, rounds: Rounds) -> None:
    is_first = not report.tables
    report.data[rounds.title] = rounds.summary()
    report.tables.append(rounds.table())
    pairs = [(f"{NOW}, {clock}", f"{BEFORE}, {clock}") for clock in CLOCKS]
    for now, _ in pairs:
        figure = f"{rounds.title}: {now}: late batches"
        late = int(sum(rounds.values[now][LATE]))
        report.targets.append(Target(figure=figure, reached=late, bound="at most", wanted=0))
        if is_first:
            report.targets.append(rounds.target(now, P99, "at most", P99_MS))
    if pairs[0][1] in rounds.values:
        report.tables.append(rounds.ratio_table(pairs))


def check_last(results: Sequence[dict[str, Any]], job: Job, path: Path) -> None:
    """Compare every worker's last batch with the corpus.

    Raises:
        RuntimeError: a worker ended at another step, or with other tokens.
    """
    expected = Expected(path, Shape(rows=job.rows * job.world_size, length=job.length))
    for result in results:
        step, digest = result["last"]
        tokens = expected.batch(job.num_batches, rank=result["rank"], world_size=job.world_size)
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
            kind="paced",
            at=url,
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


def _figures(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    requests = np.concatenate([result["request_seconds"] for result in results]) * 1e3
    waits = np.concatenate([result["wait_seconds"] for result in results])
    p50, p99 = np.percentile(requests, [50, 99]).tolist()
    return {
        "requests": len(requests),
        "batches": len(waits),
        LATE: sum(result["late"] for result in results),
        "slow": int((waits > SLOW_SECONDS).sum()),
        P50: p50,
        P99: p99,
        "longest_ms": float(requests.max()),
        "retries": sum(result["retries"] for result in results),
    }
