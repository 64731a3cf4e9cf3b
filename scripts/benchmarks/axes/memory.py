"""Measure the private memory of a server under more load than it answers, and of a loader against its budget.

Private memory is what `private` defines: USS without the pages of the corpus, which are page cache.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.benchmarks import corpus
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import resident_corpus
from scripts.benchmarks.drive import Load, drive
from scripts.benchmarks.expected import Expected
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.private import private_bytes, watched
from scripts.benchmarks.report import Options, Report, Table
from scripts.benchmarks.servers import Server, batches_path, serving
from scripts.processes import output_of

HELP = "private memory of a server under full load, and of a loader against its budget"

SERVER_MB, LOADER_SHARE = 150.0, 1.05
LOAD_SECONDS = 20  # times --seconds
MANY_STEPS = 31  # of 512 x 2,049: 65 MB, the largest answer that a server gives by default
PEAK, SHARE = "peak_megabytes", "growth_of_budget"
SERVER = {"start_megabytes": ("MB before", ".0f"), PEAK: ("MB at most", ".0f")}
LOADER = {"budget_megabytes": ("budget MB", ".1f"), SHARE: ("growth, of the budget", ".3f")}

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
from corpus_client import CorpusLoader, Staging
from scripts.benchmarks.private import anonymous_bytes, private_bytes
case = json.loads(sys.argv[1])
path, seconds, most = Path(case.pop("path")), case.pop("seconds"), 0
before = private_bytes(os.getpid(), leaving_out=[path])
of_files = before - anonymous_bytes(os.getpid())
root = path.parent if case.pop("source") == "indices" else None
staging = Staging(prefetch_bytes=case.pop("prefetch_bytes"), local_root=root)
with CorpusLoader(device="cpu", dtype=None, staging=staging, **case) as loader:
    began = time.perf_counter()
    for batch in loader:
        most = max(most, anonymous_bytes(os.getpid()))
        if time.perf_counter() - began > seconds:
            break
    most = max(most + of_files, private_bytes(os.getpid(), leaving_out=[path]))
print(most - before)
"""
"""Prints by how many bytes the private memory of a process grows while it iterates over a loader."""


def measure(options: Options) -> Report:
    """Measure the server, then loaders, with servers of their own."""
    path = resident_corpus(options)
    server = Rounds("server under full load: private memory", SERVER)
    answers = _measure_server(server, path, options)
    loader = Rounds("loader: growth of a process's private memory", LOADER)
    with serving({corpus.NAME: path}) as running:
        for source in ("batches", "indices"):
            _measure_loader(loader, source, running, path, options)
    rows = [[name, f"{num_answers:,}", f"{refused:,}"] for name, (num_answers, refused) in answers.items()]
    table = Table(title="answers meanwhile", columns=["load", "answers", "refused"], rows=rows)
    return Report(
        data={"server": server.summary(), "answers": answers, "loader": loader.summary()},
        tables=[server.table(), table, loader.table()],
        targets=[
            server.target("the process that answers", PEAK, "at most", SERVER_MB),
            *(loader.target(source, SHARE, "at most", LOADER_SHARE) for source in loader.values),
        ],
    )


def _measure_server(rounds: Rounds, path: Path, options: Options) -> dict[str, tuple[int, int]]:
    """Put one process under several loads at once; return how often each was answered and refused."""
    rows, count = (16, 4) if options.quick else (512, MANY_STEPS)
    with serving({corpus.NAME: path}) as server, ThreadPoolExecutor(8) as threads:
        start_bytes = private_bytes(server.pid, leaving_out=[path])
        loads = _loads(server, rows, count, options)
        with watched(server.pid, leaving_out=[path]) as peak:
            driven = dict(zip(loads, threads.map(drive, loads.values()), strict=True))
    if digests := driven["largest answers"].digests:  # a slow machine may finish none of 44 in time
        Expected(path, Shape(rows=rows, length=2049)).check(digests, count=count)
    Expected(path, Shape(rows=64, length=1025)).check(driven["small answers"].digests)
    figures = {"start_megabytes": start_bytes / 1e6, PEAK: peak.num_bytes / 1e6}
    rounds.add("the process that answers", figures)
    return {name: (each.num_answers, each.num_refused) for name, each in driven.items()}


def _loads(server: Server, rows: int, count: int, options: Options) -> dict[str, Load]:
    """Return 72 connections that ask without a pause, and 512 that ask now and then."""
    large = {"corpus": corpus.NAME, "seq_len": 2048, "batch_size": rows}
    small = {"corpus": corpus.NAME, "seq_len": 1024, "batch_size": 64}
    wanted: dict[str, tuple[int, float, str]] = {
        "largest answers": (44, 0.0, batches_path(**large, count=count, step="")),
        "small answers": (16, 0.0, batches_path(**small, step="")),
        "a new plan each time": (4, 0.0, batches_path(**small, step=0, seed="")),
        "small answers now and then": (512, 2.0, batches_path(**small, step="")),
        "JSON answers": (8, 0.0, batches_path(**small, count=8, format="json", step="")),
    }
    return {
        name: Load(
            port=server.port,
            path=path,
            connections=connections // (4 if options.quick else 1),
            pause_seconds=min(pause_seconds, 0.1) if options.quick else pause_seconds,
            seconds=options.seconds * LOAD_SECONDS,
            warm=False,
            answers=2 if options.quick else None,
        )
        for name, (connections, pause_seconds, path) in wanted.items()
    }


def _measure_loader(rounds: Rounds, source: str, server: Server, path: Path, options: Options) -> None:
    rows, budget, seconds = (16, 8 << 20, 0.2) if options.quick else (512, 256 << 20, 4 * options.seconds)
    case = {
        "urls": server.url,
        "corpus": corpus.NAME,
        "seq_len": 2048,
        "global_batch_size": rows,
        "source": source,
        "prefetch_bytes": budget,
        "path": str(path),
        "seconds": seconds,
    }
    growth = int(output_of(["-c", PROGRAM, json.dumps(case)]))
    rounds.add(source, {"budget_megabytes": budget / 1e6, SHARE: growth / budget})
