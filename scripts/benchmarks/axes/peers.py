"""Measure our other ways to deliver, the peers and the habits of the field, at two shapes.

A change of the server is judged by `throughput`; this axis shows where the project stands in the field.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from scripts.benchmarks.contest import NOW, Maker, contest, resident_corpus, shapes_of
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.measure import DELIVERY, SPEED, Rounds
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.peers.flight import Flight
from scripts.benchmarks.peers.local import Gather, NanoGpt
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving, spawn_peer

HELP = "tokens per second of indices and Unix sockets, Arrow Flight, nanoGPT's idiom"

INDICES, UDS = "ours, indices", "ours, Unix socket"
FLIGHT, NANOGPT, GATHER = "Arrow Flight DoGet", "nanoGPT idiom, int64", "gather in process"
WANTED = ((NOW, FLIGHT, 1.0), (NOW, NANOGPT, 8.0), (INDICES, GATHER, 0.85))
"""Contender, the one that it is compared with, and the least ratio of their tokens per second."""


def measure(options: Options) -> Report:
    """Measure all contenders at both shapes."""
    path = resident_corpus(options)
    report = Report(data={}, tables=[])
    with ExitStack() as stack:
        enter = stack.enter_context
        folder = Path(enter(tempfile.TemporaryDirectory()))
        ours = enter(serving({NAME: path}))
        uds = enter(serving({NAME: path}, uds=folder / "socket"))
        peer = enter(spawn_peer("flight", path))
        for shape in shapes_of(options):
            makers: list[Maker] = [
                partial(Ours, NOW, ours, shape, path),
                partial(Ours, INDICES, ours, shape, path, local_root=path.parent),
                partial(Ours, UDS, uds, shape, path),
                partial(Flight, FLIGHT, peer, shape),
                partial(NanoGpt, NANOGPT, path, shape),
                partial(Gather, GATHER, path, shape),
            ]
            rounds = contest(Rounds(f"{shape} uint16", DELIVERY), shape, path, options, makers)
            pairs = [(of, to) for of, to, _ in WANTED]
            report.tables.extend([rounds.table(), rounds.ratio_table([*pairs, (UDS, NOW)])])
            report.targets.extend(
                rounds.target(of, SPEED, "at least", least, to=to) for of, to, least in WANTED
            )
            report.data[str(shape)] = rounds.summary()
    return report
