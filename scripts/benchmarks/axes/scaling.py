"""Measure one server with more and more worker processes, and more and more clients, beside bare TCP.

Clients are processes of their own, each with a loader (`dtype=None`, checksums verified). Bare TCP has as
many server processes as ours has workers, and each client talks to one of them.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from scripts.benchmarks.clients import Job, connected
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import QUICK_SHAPES, SHAPES, resident_corpus
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.measure import CPU, DELIVERY, SPEED, Rounds, cpu_seconds
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving, spawn_peer

HELP = "tokens/s and CPU of 1 to 8 workers and 1 to 16 client processes, beside bare TCP"

WORKERS, CLIENTS = (1, 2, 4, 8), (1, 2, 4, 8, 16)
QUICK_WORKERS, QUICK_CLIENTS = (2,), (1, 2)
SETTLE_SECONDS = 0.4  # each client consumes what it fetched before its turn
OURS, BARE = "ours", "bare TCP"


def measure(options: Options) -> Report:
    """Measure every number of workers with every number of clients."""
    workers = QUICK_WORKERS if options.quick else WORKERS
    clients = QUICK_CLIENTS if options.quick else CLIENTS
    shape = QUICK_SHAPES[0] if options.quick else SHAPES[0]
    path = resident_corpus(options)
    rounds = Rounds(f"{shape}, workers x clients", DELIVERY)
    for number in range(options.rounds):
        for num_workers in workers if number % 2 == 0 else reversed(workers):
            measure_workers(rounds, path, shape, num_workers, clients, options.seconds)
    pairs = [(name_of(OURS, w, c), name_of(BARE, w, c)) for w in workers for c in clients]
    report = Report(
        data={"cores": len(os.sched_getaffinity(0)), "shape": str(shape), "figures": rounds.summary()},
        tables=[rounds.table(), rounds.ratio_table(pairs)],
        notes=[f"Everything runs on the same {len(os.sched_getaffinity(0))} cores: servers and clients."],
    )
    report.targets.append(
        rounds.target(pairs[0][0], SPEED, "at least", 0.7, to=pairs[0][1])  # throughput has the strict one
    )
    return report


def measure_workers(
    rounds: Rounds, path: Path, shape: Shape, num_workers: int, clients: tuple[int, ...], seconds: float
) -> None:
    """Measure our server and bare ones, each with every number of clients."""
    with ExitStack() as stack:
        server = stack.enter_context(serving({NAME: path}, arguments=["--workers", str(num_workers)]))
        peers = [stack.enter_context(spawn_peer("bare", path)) for _ in range(num_workers)]

        def job(kind: Literal["ours", "bare"], at: str) -> Job:
            return Job(kind=kind, at=at, path=str(path), rows=shape.rows, length=shape.length)

        bare = [job("bare", peers[number % num_workers].at) for number in range(max(clients))]
        contenders = (
            (OURS, [job("ours", server.url)] * max(clients), server.pids),
            (BARE, bare, [pid for peer in peers for pid in peer.pids]),
        )
        for name, jobs, pids in contenders:
            with connected(jobs) as running:
                for count in clients:
                    running.turn(time.monotonic() + SETTLE_SECONDS, count)
                    before = cpu_seconds(pids) - cpu_seconds([])
                    found = running.turn(time.monotonic() + seconds, count)
                    cpu = cpu_seconds(pids) - cpu_seconds([]) - before + sum(each["cpu"] for each in found)
                    tokens = max(1, sum(each["batches"] for each in found)) * shape.num_tokens
                    figures = {SPEED: tokens / seconds / 1e6, CPU: cpu / tokens * 1e9}
                    rounds.add(name_of(name, num_workers, count), figures)


def name_of(kind: str, workers: int, clients: int) -> str:
    return f"{kind}, {workers} x {clients}"
