"""Measure what one small request costs on one kept connection, with nothing else under way: 8 x 129 tokens.

The client is a plain socket, so that the server decides the figures. Servers take turns, beside one that
answers constant bytes of the same size and headers, under uvicorn and by a bare event loop: what remains of a
request if the server does nothing. CPU is that of the server's processes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.contest import BEFORE, NOW, now_and_before, resident_corpus
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import Expected
from scripts.benchmarks.lone import Lone
from scripts.benchmarks.measure import CPU, P50, P99, Rounds
from scripts.benchmarks.peers.constant import LOOP, UVICORN
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import spawn_peer

HELP = "p50 and CPU of one request of 8 x 129 at a time, beside servers of constant bytes"

SHAPE = Shape(rows=8, length=129)
INLINE, HEALTH = ", plan inline", ", /healthz"
P50_MS = 0.3
COLUMNS = {P50: ("p50 ms", ".3f"), P99: ("p99 ms", ".3f"), CPU: ("server's CPU us / request", ",.0f")}


def measure(options: Options) -> Report:
    """Measure every server in turn."""
    path = resident_corpus(options)
    rounds = Rounds(f"one request of {SHAPE} at a time", COLUMNS)
    inline = f"corpus={NAME}&seq_len={SHAPE.length - 1}&batch_size={SHAPE.rows}"
    everybody: dict[str, Lone] = {}
    with ExitStack() as stack:

        def add(name: str, port: int, pids: Sequence[int], path: str) -> bytes:
            everybody[name] = Lone(port, pids, path)
            stack.callback(everybody[name].close)
            return everybody[name].ask()

        response = b""
        for name, server in stack.enter_context(now_and_before(replace(options, tls=False), path)).items():
            first = add(name + INLINE, server.port, server.pids, f"/v1/batches?{inline}&step={{step}}")
            if not first.endswith(Expected(path, SHAPE).batch(0, rank=0, world_size=1).tobytes()):
                raise RuntimeError(f"{name} must answer step 0 with its windows")
            add(name + HEALTH, server.port, server.pids, "/healthz")
            response = response or first
            plan = first.lower().partition(b"corpus-plan: ")[2].partition(b"\r\n")[0].decode()
            asks = f"/v1/batches?plan={plan}&step={{step}}&format=raw&checksum=tail"  # as loaders do
            add(name, server.port, server.pids, asks)
        file = stack.enter_context(tempfile.NamedTemporaryFile())
        Path(file.name).write_bytes(response)
        peer = stack.enter_context(spawn_peer("constant", Path(file.name)))
        for name, port in zip((UVICORN, LOOP), map(int, peer.at.split()), strict=True):
            add(name, port, peer.pids, "/v1/batches?step={step}")
        for each in everybody.values():
            each.turn(options.seconds)
        for number in range(options.rounds):
            for name in everybody if number % 2 == 0 else reversed(everybody):
                rounds.add(name, everybody[name].turn(options.seconds))
    pairs = [(name, NOW) for name in everybody if name not in (NOW, BEFORE)]
    pairs += [(NOW, BEFORE)] if BEFORE in everybody else []
    return Report(
        data={"shape": str(SHAPE), "contenders": rounds.summary()},
        tables=[rounds.table(), rounds.ratio_table(pairs)],
        targets=[rounds.target(NOW, P50, "at most", P50_MS)],
    )
