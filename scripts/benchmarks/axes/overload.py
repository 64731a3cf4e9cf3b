"""Measure what ten times as many clients as a process answers at a time do to those that it answers.

As many clients of a server that answers hardly any of them show what refusing alone takes.

Each connection has one request in flight. A refused one waits as `Retry-After` says and asks again, all of
them in the same millisecond at first: the worst that clients without jitter do. Catalogue row 21: refusals
come within 50 ms, accepted requests take at most twice as long as without the others, memory is bounded.
"""

from __future__ import annotations

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import SHAPES, resident_corpus
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.drive import Load, drive
from scripts.benchmarks.expected import Expected
from scripts.benchmarks.measure import COLUMNS, P50, P99, Rounds
from scripts.benchmarks.private import private_bytes
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import batches_path, serving
from scripts.benchmarks.without import REFUSALS_FIRST

HELP = "ten times as many clients as are answered at a time: refusals, and what they do to the others"

LIMIT, QUICK_LIMIT = 64, 4  # of `max_concurrent_answers`
TIMES = 10
RETRY_SECONDS = 1.0  # of `Retry-After`
UNLOADED, LOADED, ALONE = "1 x", f"{TIMES} x", "as many refusals, 1 answer at a time"
IN_TURN = f"{TIMES} x, refusals not first"
REFUSED_P99, REFUSED, GROWTH = "refused_p99_ms", "refused", "growth_megabytes"
FIGURES = {
    P50: COLUMNS[P50],
    P99: COLUMNS[P99],
    REFUSED_P99: ("503 p99 ms", ".1f"),
    REFUSED: ("503s", ",.0f"),
    GROWTH: ("growth MB", ".1f"),
}
REFUSED_MS, SLOWER, GROWTH_MB = 50.0, 2.0, 50.0


def measure(options: Options) -> Report:
    """Measure as many clients as are answered, ten times as many, and refusals without anything else."""
    options = options.in_force()
    limit = QUICK_LIMIT if options.quick else LIMIT
    shape = Shape(rows=4, length=65) if options.quick else SHAPES[0]
    path = resident_corpus(options)
    expected = Expected(path, shape)
    rounds = Rounds(f"{shape}, at most {limit} answers at a time", FIGURES)
    query = batches_path(corpus=NAME, seq_len=shape.length - 1, batch_size=shape.rows, step="")
    # Answers at a time, and clients.
    loads = {
        UNLOADED: (limit, limit),
        LOADED: (limit, TIMES * limit),
        IN_TURN: (limit, TIMES * limit),
        ALONE: (1, (TIMES - 1) * limit + 1),
    }
    for _ in range(options.rounds):
        for name, (most, connections) in loads.items():
            arguments = ("--max-concurrent-answers", str(most))
            without = REFUSALS_FIRST.name if name == IN_TURN else None
            with serving({NAME: path}, arguments=arguments, without=without) as server:
                before = private_bytes(server.pid, leaving_out=[path])
                load = Load(
                    port=server.port,
                    path=query,
                    connections=connections,
                    seconds=max(options.seconds, 2 * RETRY_SECONDS) if not options.quick else 0.2,
                    warm=False,
                    retry_seconds=RETRY_SECONDS,
                )
                driven = drive(load)
                expected.check(driven.digests)
                growth = (private_bytes(server.pid, leaving_out=[path]) - before) / 1e6
                figures = {
                    P50: driven.p50_ms,
                    P99: driven.p99_ms,
                    REFUSED: driven.num_refused,
                    GROWTH: growth,
                }
                if driven.num_refused:
                    figures[REFUSED_P99] = driven.refused_p99_ms
                rounds.add(name, figures)
    targets = [
        rounds.target(LOADED, REFUSED_P99, "at most", REFUSED_MS),
        rounds.target(LOADED, P99, "at most", SLOWER, to=UNLOADED),
        rounds.target(LOADED, GROWTH, "at most", GROWTH_MB),
    ]
    ratios = rounds.ratio_table([(LOADED, UNLOADED), (LOADED, IN_TURN), (LOADED, ALONE)])
    return Report(data=rounds.summary(), tables=[rounds.table(), ratios], targets=targets)
