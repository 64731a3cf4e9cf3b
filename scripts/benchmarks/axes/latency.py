"""How long one request takes on an idle server: 64 x 1,025 tokens, one request at a time.

Ours is the client's transport on one open connection, a step in each request and no prefetching; the
limit is a bare socket to a server that gathers, asked in the same way. Latency is from before the request is
written until the last token lies in the consumer's tensor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts.benchmarks import corpus, plotting
from scripts.benchmarks.contender import Contender, Shape, check
from scripts.benchmarks.measure import Series, paired_ratios, spread
from scripts.benchmarks.measure import measure as measure_series
from scripts.benchmarks.ours import OneAtATime
from scripts.benchmarks.peers.bare import Bare
from scripts.benchmarks.peers.naive import Naive
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import serving, spawn_peer

HELP = "one request of 64 x 1,025 at a time, beside a bare socket"

SHAPE, SMOKE_SHAPE = Shape(rows=64, length=1025), Shape(rows=4, length=17)
NUM_TOKENS, SMOKE_TOKENS = 10**9, 200_000

OURS, UNCHECKED, UDS = "ours", "ours, verify=False", "ours, Unix socket"
LIMIT, UNIX_LIMIT, NAIVE = "bare TCP + gather", "bare Unix socket + gather", "naive FastAPI + httpx"
P50_OF_LIMIT, P99_OF_P50 = 2.5, 3.0


def measure(options: Options) -> Report:
    """Measure everybody in turn."""
    options = options.in_force()
    shape = SMOKE_SHAPE if options.smoke else SHAPE
    path = corpus.make(options.cache, SMOKE_TOKENS if options.smoke else NUM_TOKENS)
    corpus.warm(path)
    with _contenders(path, shape) as everybody:
        for contender in everybody:
            check(contender, path, shape)
        series = measure_series(everybody, shape, rounds=options.rounds, seconds=options.seconds)
    data = {
        "shape": str(shape),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "contenders": {name: _figures(its, series[LIMIT]) for name, its in series.items()},
        "percentiles": plotting.PERCENTILES,
    }
    return report_of(data)


def report_of(data: dict[str, Any]) -> Report:
    """Return the views of what was measured."""
    ours = data["contenders"][OURS]
    return Report(
        data=data,
        tables=[_table(data)],
        targets=[
            Target(
                figure=f"p50, {OURS} / {LIMIT}",
                reached=ours["p50_of_limit"]["median"],
                bound="at most",
                wanted=P50_OF_LIMIT,
            ),
            Target(
                figure=f"{OURS}: p99 / its own p50",
                reached=ours["p99_of_p50"]["median"],
                bound="at most",
                wanted=P99_OF_P50,
            ),
        ],
        plots=[Plot(name="latency", draw=partial(_draw, data))],
    )


@contextmanager
def _contenders(path: Path, shape: Shape) -> Iterator[list[Contender]]:
    num_tokens = path.stat().st_size // 2
    with ExitStack() as stack:
        enter = stack.enter_context
        folder = Path(enter(tempfile.TemporaryDirectory()))
        ours = enter(serving({corpus.NAME: path})).address
        over_unix = enter(serving({corpus.NAME: path}, uds=folder / "socket")).address
        them: list[Contender] = [
            OneAtATime(OURS, *ours, shape, path),
            OneAtATime(UNCHECKED, *ours, shape, path, verify=False),
            OneAtATime(UDS, *over_unix, shape, path),
        ]
        for name, transport in ((LIMIT, "tcp"), (UNIX_LIMIT, "unix")):
            peer = enter(spawn_peer("bare", path, transport, "gather"))
            them.append(Bare(name, *peer, shape, num_tokens, in_flight=1))
        them.append(Naive(NAIVE, *enter(spawn_peer("naive", path)), shape, num_tokens))
        for contender in them:
            enter(closing(contender))
        yield them


def _figures(its: Series, limit: Series) -> dict[str, Any]:
    """Percentiles of every round and their ratios; the distribution is over all rounds."""
    p50, p99 = _percentiles_ms(its, 50), _percentiles_ms(its, 99)
    return {
        "p50_ms": spread(p50),
        "p99_ms": spread(p99),
        "p50_of_limit": paired_ratios(p50, _percentiles_ms(limit, 50)),
        "p99_of_p50": paired_ratios(p99, p50),
        "distribution_ms": (
            np.percentile(np.concatenate(its.batch_seconds), plotting.PERCENTILES) * 1e3
        ).tolist(),
    }


def _percentiles_ms(its: Series, percentile: float) -> list[float]:
    return [float(np.percentile(seconds, percentile)) * 1e3 for seconds in its.batch_seconds]


def _table(data: dict[str, Any]) -> Table:
    digits = {"p50_ms": 3, "p99_ms": 3, "p50_of_limit": 2, "p99_of_p50": 2}
    return Table(
        title=f"one request of {data['shape']} at a time, median (spread) of {data['rounds']} rounds",
        columns=["contender", "p50 ms", "p99 ms", "p50 / bare TCP's", "p99 / own p50"],
        rows=[
            [name, *(_cell(its[figure], count) for figure, count in digits.items())]
            for name, its in data["contenders"].items()
        ],
    )


def _cell(figures: Mapping[str, float], digits: int) -> str:
    low, high = figures["lowest"], figures["highest"]
    return f"{figures['median']:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def _draw(data: dict[str, Any], figure: Figure) -> None:
    styles = {OURS: "-", UNCHECKED: "--", UDS: ":", LIMIT: "-", UNIX_LIMIT: ":", NAIVE: "-"}
    panel = figure.subplots()
    for name, its in data["contenders"].items():
        role: plotting.Role = "ours" if name.startswith(OURS) else "peer" if name == NAIVE else "limit"
        plotting.latencies(
            panel, its["distribution_ms"], data["percentiles"], label=name, role=role, style=styles[name]
        )
    panel.set_title(f"Latency of one request of {data['shape']} uint16 tokens, unloaded", fontsize=14)
    panel.set_ylabel("ms until the last token is there")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
