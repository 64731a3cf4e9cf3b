"""Compare the simulation with reality: 64 workers in step, on one and two replicas of this machine.

The servers and the workers share the machine's cores, so the simulated processes share as many. Their CPU
times are measured first, with workers that do not ask at the same moment. Then all ask in step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.benchmarks import corpus
from scripts.benchmarks.axes.paced import NUM_PROCESSES, PERIOD_SECONDS, SHAPE, WORKERS_EACH, run_jobs
from scripts.benchmarks.cpu import cpu_seconds
from scripts.benchmarks.report import Report, Table
from scripts.benchmarks.servers import Server, serving
from scripts.benchmarks.workers import Job as WorkersJob
from scripts.scale_lib.model import Cluster, Job, Outcome, Simulation

NUM_TOKENS = 10**8
FEW_SLOTS = 16
MANY_SLOTS = 64
CASES = ((1, MANY_SLOTS), (2, MANY_SLOTS), (1, FEW_SLOTS))
"""Replicas, and `max_concurrent_answers` of each: the last case refuses three of four in each step."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Say what a run of the workers showed.

    Args:
        milliseconds: of each request.
        server_cpu, client_cpu: seconds of all their processes per request.
    """

    milliseconds: np.ndarray
    server_cpu: float
    client_cpu: float
    num_retries: int


def measure(cache: Path, *, seconds: float, rounds: int, processes: int = NUM_PROCESSES) -> Report:
    """Run every case in every round, and simulate it with that round's CPU times."""
    path = corpus.make(cache, NUM_TOKENS)
    corpus.warm(path)
    rows, data = [], []
    for number in range(rounds):
        apart = _run(path, 1, MANY_SLOTS, seconds, processes, over=PERIOD_SECONDS)
        for replicas, slots in CASES:
            seen = _run(path, replicas, slots, seconds, processes, over=0.0)
            expected = predict(apart, replicas, slots, ranks=processes * WORKERS_EACH, clients=processes)
            measured_ms = [float(np.percentile(seen.milliseconds, share)) for share in (50, 99)]
            predicted_ms = [1e3 * expected.percentile(share) for share in (50, 99)]
            case = {"round": number + 1, "replicas": replicas, "slots": slots, "retries": seen.num_retries}
            data.append({**case, "measured_ms": measured_ms, "predicted_ms": predicted_ms})
            rows.append(
                [
                    *(str(number + 1), str(replicas), str(slots)),
                    *(f"{1e3 * cpu:.2f}" for cpu in (apart.server_cpu, apart.client_cpu)),
                    *(f"{each:.1f}" for each in (predicted_ms[0], measured_ms[0])),
                    *(f"{each:.1f}" for each in (predicted_ms[1], measured_ms[1])),
                    f"{predicted_ms[1] / measured_ms[1]:.2f}",
                    f"{seen.num_retries / len(seen.milliseconds):.1%}",
                ]
            )
    columns = [
        *("round", "replicas", "slots", "server ms / request", "client ms / request"),
        *("p50 predicted", "measured", "p99 predicted", "measured", "ratio", "retried"),
    ]
    title = f"{processes * WORKERS_EACH} workers in step, {SHAPE} every {PERIOD_SECONDS * 1e3:g} ms, in ms"
    return Report(data={"check": data}, tables=[Table(title=title, columns=columns, rows=rows)])


def predict(seen: Seen, replicas: int, slots: int, *, ranks: int, clients: int) -> Outcome:
    """Simulate the workers on cores that all processes share."""
    cluster = Cluster(
        replicas=replicas,
        workers=1,
        slots=slots,
        cpu_seconds=seen.server_cpu,
        client_seconds=seen.client_cpu,
        clients=clients,
        cores=os.cpu_count(),
        link_bytes_per_second=1e12,
    )
    job = Job(
        ranks=ranks, step_seconds=PERIOD_SECONDS, batch_bytes=2 * SHAPE.num_tokens, spread_seconds=0.001
    )
    return Simulation(job, cluster).run(100)


def _run(path: Path, replicas: int, slots: int, seconds: float, processes: int, *, over: float) -> Seen:
    """Let workers train on new replicas; `over`: seconds over which their clocks are spread."""
    with ExitStack() as stack:
        arguments = ("--max-concurrent-answers", str(slots))
        servers = [
            stack.enter_context(serving({corpus.NAME: path}, arguments=arguments)) for _ in range(replicas)
        ]
        jobs = _jobs([server.url for server in servers], seconds, processes, over)
        before = _cpu_of(servers)
        results = run_jobs(jobs)
        server_cpu = _cpu_of(servers) - before
    milliseconds = 1e3 * np.concatenate([result["request_seconds"] for result in results])
    return Seen(
        milliseconds=milliseconds,
        server_cpu=server_cpu / len(milliseconds),
        client_cpu=sum(result["cpu_seconds"] for result in results) / len(milliseconds),
        num_retries=sum(result["retries"] for result in results),
    )


def _cpu_of(servers: Sequence[Server]) -> float:
    return cpu_seconds([pid for server in servers for pid in server.pids]) - cpu_seconds([])


def _jobs(urls: list[str], seconds: float, processes: int, over: float) -> list[WorkersJob]:
    world_size = processes * WORKERS_EACH
    return [
        WorkersJob(
            url=urls,
            ranks=list(range(first, first + WORKERS_EACH)),
            offsets=[over * rank / world_size for rank in range(first, first + WORKERS_EACH)],
            world_size=world_size,
            rows=SHAPE.rows,
            length=SHAPE.length,
            num_batches=round(seconds / PERIOD_SECONDS),
            period_seconds=PERIOD_SECONDS,
        )
        for first in range(0, world_size, WORKERS_EACH)
    ]
