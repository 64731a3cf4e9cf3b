"""Measure each optimisation of the server alone, off against on, on the figures that a user sees.

`without.py` lists the tricks and takes them away. Every trick has a server without it, and shares a server
with it ("as it is") with the others. In every round each figure is measured of all servers in turn. An
optimisation that brings less than 1.15 x on every figure does not earn its lines.

Paced is the p99 of 64 connections that each ask for 16 x 1,025 tokens every 50 ms, driven by one lean client:
workers with a torch of their own would cost half a minute for each server and round (axis `paced`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.benchmarks import corpus
from scripts.benchmarks.axes.cold import RATE, stream_cold
from scripts.benchmarks.contender import Shape, check
from scripts.benchmarks.contest import SHAPES, resident_corpus, shapes_of
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.drive import Load, drive
from scripts.benchmarks.expected import Expected, document_of
from scripts.benchmarks.measure import CPU, P50, P99, SPEED, Rounds, cell, measure_once
from scripts.benchmarks.ours import OneAtATime, Ours
from scripts.benchmarks.report import Options, Report, Table
from scripts.benchmarks.servers import Server, batches_path, serving
from scripts.benchmarks.without import TRICKS, Trick

HELP = "each optimisation of the server alone, off against on: throughput, latency, paced, cold, CPU"

EARNS = 1.15  # below this on every figure, an optimisation goes
NUM_COLD_TOKENS, QUICK_COLD_TOKENS = 2 * 10**9, 16 * 10**6
PACED = Shape(rows=16, length=1025)
PACED_CONNECTIONS, PERIOD_SECONDS = 64, 0.05
FIGURES = {
    "small_speed": ("64 x 1,025 M tokens/s", ",.0f"),
    "small_cpu": ("CPU s / 10^9", ".2f"),
    "large_speed": ("512 x 2,049 M tokens/s", ",.0f"),
    "large_cpu": ("CPU s / 10^9", ".2f"),
    "one_p50": ("one request p50 ms", ".3f"),
    "one_p99": ("p99 ms", ".3f"),
    "paced_p99": ("paced p99 ms", ".2f"),
    "cold": ("cold windows/s", ",.0f"),
}
LESS_IS_BETTER = ("small_cpu", "large_cpu", "one_p50", "one_p99", "paced_p99")


def sides(trick: Trick) -> tuple[str, str]:
    """Return the names of the server with a trick and of the one without it."""
    return "Unix socket, as it is" if trick.uds else "as it is", f"off: {trick.name}"


def measure(options: Options) -> Report:
    """Measure the servers of all tricks, or of those that `--only` names, figure by figure in every round."""
    options = options.in_force()
    tricks = _chosen(options)
    path = resident_corpus(options)
    cold = corpus.make(options.cache, QUICK_COLD_TOKENS if options.quick else NUM_COLD_TOKENS)
    rounds = Rounds("the servers", FIGURES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        arguments: dict[str, dict[str, Any]] = {}  # by the name of the server
        for trick in tricks:
            changes = {"without": trick.name if trick.patch else None, "settings": trick.settings}
            for name, its in zip(sides(trick), ({}, changes), strict=True):
                uds = folder / str(len(arguments)) if trick.uds else None
                arguments.setdefault(name, {**its, "uds": uds})
        servers = {name: stack.enter_context(serving({NAME: path}, **its)) for name, its in arguments.items()}
        for number in range(options.rounds):
            corpus.warm(path)
            turns = list(servers) if number % 2 == 0 else list(servers)[::-1]
            for probe in PROBES:
                for name in turns:
                    rounds.add(name, probe(servers[name], path, options))
            for name in turns:
                if arguments[name]["uds"] is None:
                    rounds.add(name, _cold(cold, arguments[name], options))
    return _report(tricks, rounds)


def _chosen(options: Options) -> Sequence[Trick]:
    known = {trick.name: trick for trick in TRICKS}
    if unknown := [name for name in options.only if name not in known]:
        raise SystemExit(f"--only must name tricks of {list(known)}, got {unknown}")
    if options.only:
        return [known[name] for name in options.only]
    # A quick run starts one server of each kind: patched, and changed by settings.
    return [TRICKS[0], TRICKS[-1]] if options.quick else TRICKS


def _delivery(name: str, number: int, server: Server, path: Path, options: Options) -> dict[str, float]:
    shape = shapes_of(options)[number]
    with closing(Ours("ours", server, shape, path)) as ours:
        check(ours, path, shape)
        found = measure_once(ours, shape, options.seconds)
    return {f"{name}_speed": found[SPEED], f"{name}_cpu": found[CPU]}


def _one_at_a_time(server: Server, path: Path, options: Options) -> dict[str, float]:
    shape = shapes_of(options)[0]
    with closing(OneAtATime("ours", server, shape, path)) as ours:
        check(ours, path, shape)
        found = measure_once(ours, shape, options.seconds)
    return {"one_p50": found[P50], "one_p99": found[P99]}


def _paced(server: Server, path: Path, options: Options) -> dict[str, float]:
    if not server.port:
        return {}  # the lean client speaks TCP
    plan = server.post_plan(document_of(PACED))
    driven = drive(
        Load(
            port=server.port,
            path=batches_path(plan=plan, checksum="false", step=""),
            connections=PACED_CONNECTIONS,
            pause_seconds=PERIOD_SECONDS,
            seconds=2 * options.seconds,
        )
    )
    Expected(path, PACED).check(driven.digests)
    return {"paced_p99": driven.p99_ms}


def _cold(path: Path, arguments: Mapping[str, Any], options: Options) -> dict[str, float]:
    most = path.stat().st_size // 4 // SHAPES[0].num_bytes
    return {"cold": stream_cold(path, SHAPES[0], max(0.1, options.seconds), most, **arguments)[RATE]}


PROBES = (partial(_delivery, "small", 0), partial(_delivery, "large", 1), _one_at_a_time, _paced)


def _report(tricks: Sequence[Trick], rounds: Rounds) -> Report:
    ratios = {trick.name: _gains(trick, rounds) for trick in tricks}
    rows = []
    for name, its in ratios.items():
        cells = [cell(its[figure], ".2f") if figure in its else "" for figure in FIGURES]
        earned_by = ", ".join(figure for figure, gain in its.items() if _earns(gain))
        rows.append([name, *cells, earned_by or "nothing"])
    headings = [heading for heading, _ in FIGURES.values()]
    gains = Table(
        title="on / off within a round, the other way round where less is better: above 1 the trick helps",
        columns=["trick", *headings, "earns its lines by"],
        rows=rows,
    )
    return Report(
        data={"servers": rounds.summary(), "gains": ratios},
        tables=[gains, rounds.table()],
        notes=[
            f"A trick earns its lines by a figure whose median is {EARNS} x or more and that it improves in "
            "every round."
        ],
    )


def _earns(gain: Mapping[str, float]) -> bool:
    return gain["median"] >= EARNS and gain["lowest"] > 1


def _gains(trick: Trick, rounds: Rounds) -> dict[str, dict[str, float]]:
    on, off = sides(trick)
    return {
        figure: rounds.ratio(off, on, figure) if figure in LESS_IS_BETTER else rounds.ratio(on, off, figure)
        for figure in FIGURES
        if figure in rounds.values[on]
    }
