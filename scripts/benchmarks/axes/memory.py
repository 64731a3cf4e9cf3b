"""Private memory of a server under full load, and of a process with a loader against its budget.

Private memory is what is defined in `private`: USS without the pages of the corpus, which are page
cache. A loader's growth is the largest private memory while it iterates, less that before it was made
and less the widened batches that torch holds for the consumer: two, or none with `dtype=None`, where
they are views of the budget. For this torch's batches lie in mappings of their own, which go when they
are dropped. By default malloc keeps some of them for later, which no loader sees: it is shown besides.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from scripts.benchmarks import corpus
from scripts.benchmarks.drive import Driven, Load, drive
from scripts.benchmarks.expected import Expected, plan_of
from scripts.benchmarks.loader_memory import LoaderCase, measure_loader
from scripts.benchmarks.private import Watch, private_bytes
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import Server, batches_path, serving

HELP = "private memory of a server under full load, and of a loader against its budget"

SERVER_TARGET_BYTES = 150_000_000
LOADER_TARGET = 1.05
LOAD_SECONDS = 40
"""Times `seconds`: a minute by default."""

MANY_STEPS = 31
"""Of 512 x 2,049: 65 MB, the largest answer that a server gives by default."""


def measure(options: Options) -> Report:
    """Both halves, with servers of their own."""
    path = corpus.make(options.cache, 10**6 if options.smoke else 10**9)
    corpus.warm(path)
    loads = (True,) if options.smoke else (False, True)
    servers = [_server(path, options, json_too=json_too) for json_too in loads]
    loaders = _loaders(path, options)
    return Report(
        data={"server": servers, "loaders": loaders},
        tables=[_server_table(servers), _loader_table(loaders)],
        targets=[
            *map(_server_target, servers),
            *(_loader_target(each) for each in loaders if each["own_mappings"]),
        ],
        plots=[Plot(name="memory-server", draw=lambda figure: _draw(figure, servers))],
    )


def _server(path: Path, options: Options, *, json_too: bool) -> dict[str, Any]:
    """One process under several loads at once; more is asked for than it answers at a time."""
    with serving({corpus.NAME: path}) as server, ThreadPoolExecutor(8) as threads:
        start_bytes = private_bytes(server.pid, leaving_out=[path])
        loads = _loads(server, options, json_too=json_too)
        with Watch(server.pid, leaving_out=[path]) as watch:
            driven = dict(zip(loads, threads.map(drive, loads.values()), strict=True))
    steps = Expected(path, plan_of(_rows(options), 2048))
    if digests := driven["largest answers"].digests:  # on a slow machine none of 44 may be whole in time
        steps.check(digests, count=_count(options))
    Expected(path, plan_of(64, 1024)).check(driven["small answers"].digests)
    return {
        "load": "with JSON answers too" if json_too else "token answers",
        "start_bytes": start_bytes,
        "peak_bytes": watch.peak_bytes,
        "last_bytes": watch.samples[-1][1],
        "samples": watch.samples,
        "answers": {name: _answers(each) for name, each in driven.items()},
    }


def _rows(options: Options) -> int:
    return 16 if options.smoke else 512


def _count(options: Options) -> int:
    return 4 if options.smoke else MANY_STEPS


def _loads(server: Server, options: Options, *, json_too: bool) -> dict[str, Load]:
    """64 connections ask without a pause, as many as are answered at a time, and 512 now and then."""
    large = {"corpus": corpus.NAME, "seq_len": 2048, "batch_size": _rows(options)}
    small = {"corpus": corpus.NAME, "seq_len": 1024, "batch_size": 64}
    wanted: dict[str, tuple[int, float, str]] = {
        "largest answers": (44, 0.0, batches_path(**large, count=_count(options), step="")),
        "small answers": (16, 0.0, batches_path(**small, step="")),
        "a new plan each time": (4, 0.0, batches_path(**small, step=0, seed="")),
        "small answers now and then": (512, 2.0, batches_path(**small, step="")),
    }
    if json_too:
        # 8 x 64 x 1,025 tokens, half of what a text answer may hold.
        wanted["JSON answers"] = (8, 0.0, batches_path(**small, count=8, format="json", step=""))
    fewer = 4 if options.smoke else 1
    return {
        name: Load(
            ports=[server.port],
            path=path,
            connections=connections // fewer,
            pause_seconds=min(pause_seconds, 0.1) if options.smoke else pause_seconds,
            seconds=options.seconds * LOAD_SECONDS,
            warm=False,
            answers=2 if options.smoke else None,
        )
        for name, (connections, pause_seconds, path) in wanted.items()
    }


def _answers(driven: Driven) -> dict[str, int]:
    return {"num_answers": driven.num_answers, "num_refused": driven.num_refused}


def _loaders(path: Path, options: Options) -> list[dict[str, Any]]:
    with serving({corpus.NAME: path}) as server:
        common = LoaderCase(
            url=server.url,
            corpus=corpus.NAME,
            rows=_rows(options),
            seq_len=2048,
            path=str(path),
            prefetch_bytes=(8 if options.smoke else 256) << 20,
            seconds=options.seconds * (1 if options.smoke else 4),
        )
        cases = [
            common,
            replace(common, prefetch_bytes=32 << 20),
            replace(common, source="indices"),
            replace(common, dtype="int64"),
            replace(common, dtype="int64", own_mappings=False),
        ]
        if options.smoke:
            cases = [common, replace(common, source="indices", dtype="int64")]
        return [{**dataclasses.asdict(case), **dataclasses.asdict(measure_loader(case))} for case in cases]


def _loader_name(each: dict[str, Any]) -> str:
    kept = "" if each["own_mappings"] else ", malloc keeps what torch drops"
    return f"{each['source']}, {each['dtype']}{kept}"


def _server_table(servers: list[dict[str, Any]]) -> Table:
    rows = [
        [
            each["load"],
            f"{each['start_bytes'] / 1e6:.0f}",
            f"{each['peak_bytes'] / 1e6:.0f}",
            f"{each['last_bytes'] / 1e6:.0f}",
            ", ".join(
                f"{its['num_answers']:,} {name} ({its['num_refused']:,} refused)"
                for name, its in each["answers"].items()
            ),
        ]
        for each in servers
    ]
    return Table(
        title="server: private memory under more load than it answers at a time",
        columns=["load", "MB before", "MB at most", "MB at the end", "answers"],
        rows=rows,
    )


def _loader_table(loaders: list[dict[str, Any]]) -> Table:
    rows = [
        [
            _loader_name(each),
            f"{each['prefetch_bytes'] / 1e6:.1f}",
            f"{each['growth_bytes'] / 1e6:.1f}",
            f"{each['growth_bytes'] / each['prefetch_bytes']:.3f}",
            f"{each['batch_bytes'] / 1e6:.1f}",
            f"{each['before_bytes'] / 1e6:.0f}",
        ]
        for each in loaders
    ]
    return Table(
        title="loader: growth of a process's private memory against prefetch_bytes",
        columns=[
            "source, dtype",
            "budget MB",
            "growth MB",
            "of it",
            "besides, torch's batches MB",
            "before MB",
        ],
        rows=rows,
    )


def _server_target(each: dict[str, Any]) -> Target:
    return Target(
        figure=f"server under full load, {each['load']}: private memory",
        reached=each["peak_bytes"] / 1e6,
        bound="at most",
        wanted=SERVER_TARGET_BYTES / 1e6,
        unit="MB",
    )


def _loader_target(each: dict[str, Any]) -> Target:
    budget = f"{each['prefetch_bytes'] >> 20} MiB"
    return Target(
        figure=f"loader ({_loader_name(each)}): growth, of a budget of {budget}",
        reached=each["growth_bytes"] / each["prefetch_bytes"],
        bound="at most",
        wanted=LOADER_TARGET,
    )


def _draw(figure: Figure, servers: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for each in servers:
        seconds, num_bytes = zip(*each["samples"], strict=True)
        axes.plot(seconds, [value / 1e6 for value in num_bytes], label=each["load"])
    axes.axhline(SERVER_TARGET_BYTES / 1e6, color="grey", linestyle=":", label="at most")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds under load")
    axes.set_ylabel("private memory of the server, MB")
    axes.legend()
