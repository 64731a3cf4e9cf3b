"""Throughput against the number of connections that each have a request under way."""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from scripts.benchmarks import corpus
from scripts.benchmarks.drive import Driven, Load, drive
from scripts.benchmarks.expected import Expected, plan_of
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import Server, batches_path, serving

COUNTS = [1, 8, 64, 512]
SHAPES = [(64, 1025), (512, 2049)]
NUM_TOKENS = 10**9
LEAST_OF_BEST = 0.75


def measure(options: Options) -> Report:
    """One server, one client process, both on the cores that there are; one request per connection."""
    shapes, counts, num_tokens = SHAPES, COUNTS, NUM_TOKENS
    if options.smoke:
        shapes, counts, num_tokens = [(4, 65)], [1, 8], 10**6
    path = corpus.make(options.cache, num_tokens)
    corpus.warm(path)
    # By default 64 answers are under way at a time and the rest is refused: here all are to be answered.
    with serving({corpus.NAME: path}, arguments=("--max-concurrent-answers", str(counts[-1]))) as server:
        found = []
        for rows, length in shapes:
            expected = Expected(path, plan_of(rows, length - 1))
            runs: dict[int, list[Driven]] = {count: [] for count in counts}
            for _ in range(options.rounds):
                for count in counts:
                    driven = _drive(server, rows, length, count, options.seconds)
                    expected.check(driven.digests)
                    runs[count].append(driven)
            found.append(_shape(rows, length, runs))
    return _report(found, options)


def _drive(server: Server, rows: int, length: int, count: int, seconds: float) -> Driven:
    path = batches_path(corpus=corpus.NAME, seq_len=length - 1, batch_size=rows, step="")
    driven = drive(
        Load(ports=[server.port], path=path, connections=count, seconds=seconds, pids=[server.pid])
    )
    if driven.num_refused or len(driven.digests) != count:
        raise SystemExit(f"{driven.num_refused} requests of {count} connections were refused, none should be")
    return driven


def _shape(rows: int, length: int, runs: dict[int, list[Driven]]) -> dict[str, Any]:
    return {
        "shape": f"{rows} x {length}",
        "counts": [
            {
                "connections": count,
                "million_tokens_per_second": statistics.median(rates := [_rate(each) for each in driven]),
                "lowest": min(rates),
                "highest": max(rates),
                "cpu_seconds_per_billion_tokens": statistics.median(
                    each.cpu_seconds / each.num_bytes * 2e9 for each in driven
                ),
                "p50_ms": statistics.median(each.p50_ms for each in driven),
                "p99_ms": statistics.median(each.p99_ms for each in driven),
            }
            for count, driven in runs.items()
        ],
    }


def _rate(driven: Driven) -> float:
    return driven.num_bytes / 2 / driven.seconds / 1e6


def _report(found: list[dict[str, Any]], options: Options) -> Report:
    tables, targets = [], []
    for shape in found:
        best = max(each["million_tokens_per_second"] for each in shape["counts"])
        rows = [
            [
                str(each["connections"]),
                f"{each['million_tokens_per_second']:,.0f} ({each['lowest']:,.0f} - {each['highest']:,.0f})",
                f"{each['million_tokens_per_second'] / best:.2f}",
                f"{each['cpu_seconds_per_billion_tokens']:.2f}",
                f"{each['p50_ms']:.1f}",
                f"{each['p99_ms']:.1f}",
            ]
            for each in shape["counts"]
        ]
        title = f"connections: {shape['shape']}, one request under way on each, median of {options.rounds}"
        columns = ["connections", "M tokens/s", "of the best", "CPU s / 10^9", "p50 ms", "p99 ms"]
        tables.append(Table(title=title, columns=columns, rows=rows))
        targets += [
            Target(
                figure=f"{shape['shape']}: throughput of {each['connections']} connections, of the best",
                reached=each["million_tokens_per_second"] / best,
                bound="at least",
                wanted=LEAST_OF_BEST,
            )
            for each in shape["counts"]
        ]
    return Report(
        data={"connections": found},
        tables=tables,
        targets=targets,
        plots=[Plot(name="growth-connections", draw=lambda figure: _draw(figure, found))],
    )


def _draw(figure: Figure, found: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for number, shape in enumerate(found):
        counts = [each["connections"] for each in shape["counts"]]
        rates = [each["million_tokens_per_second"] for each in shape["counts"]]
        spread = [
            [rate - each["lowest"] for rate, each in zip(rates, shape["counts"], strict=True)],
            [each["highest"] - rate for rate, each in zip(rates, shape["counts"], strict=True)],
        ]
        axes.errorbar(
            counts, rates, yerr=spread, marker="o", capsize=3, color=f"C{number}", label=shape["shape"]
        )
        axes.axhline(LEAST_OF_BEST * max(rates), color=f"C{number}", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("connections, one request under way on each (dotted: 0.75 of the best)")
    axes.set_ylabel("million tokens/s")
    axes.legend(title="rows x window")
