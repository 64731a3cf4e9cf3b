"""Measure what must not grow with the number of connections: throughput falls, memory rises.

One client process drives 1 to 512 connections with one request in flight on each. Then connections wait: idle
ones, and ones whose reader stalled in the middle of the largest answer. Kernel socket buffers do not count:
they are no memory of the process.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

from scripts.benchmarks import corpus
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import SHAPES, resident_corpus
from scripts.benchmarks.drive import Load, drive
from scripts.benchmarks.expected import Expected
from scripts.benchmarks.measure import CPU, P50, P99, SPEED, Rounds
from scripts.benchmarks.private import private_bytes
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, batches_path, serving

HELP = "throughput of 1 to 512 connections, memory of idle and stalled ones"

COUNTS, QUICK_COUNTS = (1, 8, 64, 512), (1, 8)
LEAST_OF_BEST = 0.75
CASES: list[tuple[int, int | None]] = [(2000, None), (56, 128), (56, 32768)]
"""Connections, and the `seq_len` of the answer in which they stall; None: they are idle."""
QUICK_CASES: list[tuple[int, int | None]] = [(20, None), (4, 2048)]
NUM_BEFORE = 8
EACH = "kilobytes_each"
WAITING = {"megabytes_before": ("MB before", ".1f"), EACH: ("kB each", ".1f")}
IDLE_BYTES = 64_000
STALLED_BYTES = (1 << 20) + IDLE_BYTES  # a piece of an answer, and what an idle connection takes
ANSWER_BYTES = 16 << 20  # 64 of them are all the bytes that a process has under way


def measure(options: Options) -> Report:
    """Measure throughput against connections, then the memory of waiting ones."""
    options = options.in_force()
    report = Report(data={}, tables=[])
    for shape in (Shape(rows=4, length=65),) if options.quick else SHAPES:
        rounds = _connections(shape, options)
        best = max(rounds.values, key=lambda name: rounds.spread(name, SPEED)["median"])
        for name in rounds.values:
            report.targets.append(rounds.target(name, SPEED, "at least", LEAST_OF_BEST, to=best))
        report.data[str(shape)] = rounds.summary()
        report.tables.append(rounds.table())
    waiting = Rounds("waiting connections: private memory of the server", WAITING)
    for connections, stalled in QUICK_CASES if options.quick else CASES:
        name = f"{connections:,} idle" if stalled is None else f"{connections} stalled, seq_len {stalled:,}"
        waiting.add(name, _waiting(connections, stalled, options))
        most = (IDLE_BYTES if stalled is None else STALLED_BYTES) / 1e3
        report.targets.append(waiting.target(name, EACH, "at most", most))
    report.data["waiting"] = waiting.summary()
    report.tables.append(waiting.table())
    return report


def _connections(shape: Shape, options: Options) -> Rounds:
    counts = QUICK_COUNTS if options.quick else COUNTS
    path = resident_corpus(options)
    expected = Expected(path, shape)
    query = batches_path(corpus=corpus.NAME, seq_len=shape.length - 1, batch_size=shape.rows, step="")
    rounds = Rounds(f"{shape}, one request in flight on each connection")
    # More connections than answers that a process admits by default; here all are answered.
    with serving({corpus.NAME: path}, arguments=("--max-concurrent-answers", str(counts[-1]))) as server:
        for _ in range(options.rounds):
            for count in counts:
                load = Load(
                    port=server.port,
                    path=query,
                    connections=count,
                    seconds=options.seconds,
                    pids=server.pids,
                )
                driven = drive(load)
                if driven.num_refused or len(driven.digests) != count:
                    raise SystemExit(f"{driven.num_refused} requests of {count} connections were refused")
                expected.check(driven.digests)
                num_tokens = driven.num_bytes / 2
                figures = {
                    SPEED: num_tokens / driven.seconds / 1e6,
                    CPU: driven.cpu_seconds / num_tokens * 1e9,
                    P50: driven.p50_ms,
                    P99: driven.p99_ms,
                }
                rounds.add(f"{count} connections", figures)
    return rounds


def _waiting(number: int, stalled: int | None, options: Options) -> dict[str, float]:
    """Return the private memory of a new server before connections come, and of each connection."""
    path = corpus.make(options.cache, 10**6 if options.quick else 10**8)
    with serving({corpus.NAME: path}) as server, ExitStack() as connections:
        _open(server, NUM_BEFORE, stalled, connections)  # threads and buffers that every use brings
        before = private_bytes(server.pid, leaving_out=[path])
        _open(server, number, stalled, connections)
        after = private_bytes(server.pid, leaving_out=[path])
    return {"megabytes_before": before / 1e6, EACH: (after - before) / number / 1e3}


def _open(server: Server, number: int, stalled: int | None, connections: ExitStack) -> None:
    """Open connections, ask for one answer on each, and read it, or only its head where it stalls.

    Args:
        stalled: `seq_len` of the largest answer; None: a small answer, read to its end.
    """
    seq_len = 2048 if stalled is None else stalled
    rows = 1 if stalled is None else ANSWER_BYTES // (2 * (seq_len + 1))
    query = {"corpus": corpus.NAME, "seq_len": seq_len, "batch_size": rows, "checksum": "false"}
    for step in range(number):
        connection = connections.enter_context(closing(server.connect()))
        # Small, so that the server and not the kernel holds the answer.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.request("GET", batches_path(**query, step=step))
        response = connections.enter_context(connection.getresponse())
        if response.status != 200:
            raise SystemExit(f"a request failed: {response.status}, {response.read(500)!r}")
        if stalled is None:
            response.read()
