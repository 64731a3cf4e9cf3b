"""Measure delivered tokens per second and their CPU beside the limit and, with `--before`, another commit.

One client, today's, drives every server of ours. All contenders deliver sampled windows of the same corpus of
10^9 uint16 tokens, which lies in the page cache, into a torch tensor of this process. The limit is the
strongest bare TCP server of each round; see `peers/bare.py`. With `--tls` ours encrypts, the limit does not.
"""

from __future__ import annotations

from scripts.benchmarks.contest import (
    BEFORE,
    NOW,
    UNCHECKED,
    compared,
    contest,
    now_and_before,
    resident_corpus,
    shapes_of,
    with_and_without_checksum,
)
from scripts.benchmarks.measure import CPU, DELIVERY, SPEED, Rounds
from scripts.benchmarks.ours import IN_FLIGHT, Ours, steps_per_request
from scripts.benchmarks.peers import bare
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import spawn_peer

HELP = "tokens per second and CPU per token at two shapes, beside the strongest bare TCP server"

LIMIT = "strongest bare TCP"
OF_LIMIT = (0.92, 0.85)  # of the limit's throughput, at each shape
OF_BEFORE = 0.97


def measure(options: Options) -> Report:
    """Measure all contenders at both shapes."""
    path = resident_corpus(options)
    report = Report(data={}, tables=[])
    with now_and_before(options, path) as servers, spawn_peer("bare", path) as peer:
        for shape, of_limit in zip(shapes_of(options), OF_LIMIT, strict=True):
            makers = with_and_without_checksum(Ours, servers, shape, path)
            makers += bare.makers(peer, shape, steps_per_request(shape), IN_FLIGHT)
            rounds = contest(Rounds(f"{shape} uint16", DELIVERY), shape, path, options, makers)
            limits = [name for name in rounds.values if name.startswith("bare")]
            winners = rounds.add_strongest(LIMIT, limits)
            won = ", ".join(f"{name} ({count})" for name, count in winners.items())
            report.notes.append(
                f"{shape}: the strongest bare TCP server, with the rounds that it won: {won}."
            )
            report.data[str(shape)] = {"contenders": rounds.summary(), "limit": winners}
            # The strongest of each round has luck on its side; the one with the best median has less of it.
            best = max(limits, key=lambda name: rounds.spread(name, SPEED)["median"])
            pairs = [(NOW, LIMIT), (NOW, best), (NOW + UNCHECKED, LIMIT), *compared(rounds)]
            report.tables.extend([rounds.table(), rounds.ratio_table(pairs)])
            if not options.tls:
                report.targets.append(rounds.target(NOW, SPEED, "at least", of_limit, to=LIMIT))
            for of, to in compared(rounds):
                if to.startswith(BEFORE):
                    report.targets.append(rounds.target(of, SPEED, "at least", OF_BEFORE, to=to))
                    report.targets.append(rounds.target(of, CPU, "at most", 1 / OF_BEFORE, to=to))
    return report
