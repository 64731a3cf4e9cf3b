"""Measure delivered tokens per second, their CPU, and the latency of one request over TLS.

The limit is the same server and client without TLS. With `--before`, the server of another commit takes
part, too. Encryption takes most of the CPU here: a change of the server shows less than on plain connections.
"""

from __future__ import annotations

from functools import partial

from scripts.benchmarks.contest import (
    BEFORE,
    NOW,
    contest,
    now_and_before,
    resident_corpus,
    shapes_of,
)
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.measure import CPU, DELIVERY, P50, P99, SPEED, Rounds
from scripts.benchmarks.ours import OneAtATime, Ours
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving, trusted_certificate

HELP = "tokens per second, CPU and latency over TLS, beside the same without TLS"

PLAIN = "ours, without TLS"
OF_BEFORE = 0.97
OF_PLAIN = 6.0
"""CPU or time over TLS, at most so many times that without: encryption takes most of it."""
LATENCY = {P50: ("p50 ms", ".3f"), P99: ("p99 ms", ".3f"), CPU: ("CPU s / 10^9", ".2f")}


def measure(options: Options) -> Report:
    """Measure a loader at both shapes, then one small request at a time."""
    options = options.in_force()
    path = resident_corpus(options)
    report = Report(data={}, tables=[])
    with (
        trusted_certificate() as certificate,
        now_and_before(options, path, certificate) as servers,
        serving({NAME: path}) as plain,
    ):
        everyone = {**servers, PLAIN: plain}
        for shape in shapes_of(options):
            makers = [partial(Ours, name, server, shape, path) for name, server in everyone.items()]
            rounds = contest(Rounds(f"{shape} uint16 over TLS", DELIVERY), shape, path, options, makers)
            _add(report, rounds, SPEED, CPU)
        shape = shapes_of(options)[0]
        lone = [partial(OneAtATime, name, server, shape, path) for name, server in everyone.items()]
        title = f"one request of {shape} at a time over TLS"
        _add(report, contest(Rounds(title, LATENCY), shape, path, options, lone), None, P50)
    return report


def _add(report: Report, rounds: Rounds, at_least: str | None, at_most: str) -> None:
    report.data[rounds.title] = rounds.summary()
    pairs = [(NOW, PLAIN)]
    report.targets.append(rounds.target(NOW, at_most, "at most", OF_PLAIN, to=PLAIN))
    if BEFORE in rounds.values:
        pairs.append((NOW, BEFORE))
        if at_least is not None:
            report.targets.append(rounds.target(NOW, at_least, "at least", OF_BEFORE, to=BEFORE))
        report.targets.append(rounds.target(NOW, at_most, "at most", 1 / OF_BEFORE, to=BEFORE))
    report.tables.extend([rounds.table(), rounds.ratio_table(pairs)])
