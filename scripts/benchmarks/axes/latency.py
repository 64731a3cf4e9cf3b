"""Measure how long one request of 64 x 1,025 tokens takes on an idle server, one request at a time.

Ours is the client's transport on one open connection, without prefetching. The limit is a bare socket, asked
in the same way. Time runs from before the request is written until the last token lies in the consumer's
tensor. Where nginx is installed, one response is also taken from its cache, with the shipped configuration.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from scripts.benchmarks.contest import (
    NOW,
    compared,
    contest,
    now_and_before,
    resident_corpus,
    shapes_of,
    with_and_without_checksum,
)
from scripts.benchmarks.measure import LATENCY, P50, P99, Rounds
from scripts.benchmarks.ours import OneAtATime
from scripts.benchmarks.peers.bare import Bare
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import spawn_peer
from scripts.processes import HOST
from tests.docker.proxy import NGINX

HELP = "p50 and p99 of one request of 64 x 1,025 at a time, beside a bare socket"

LIMIT = "bare TCP gather"
CACHED = "ours, from nginx's cache"
P50_OF_LIMIT, P99_OF_P50 = 2.5, 3.0


def measure(options: Options) -> Report:
    """Measure every server in turn."""
    shape = shapes_of(options)[0]
    path = resident_corpus(options)
    rounds = Rounds(f"one request of {shape} at a time", LATENCY)
    with now_and_before(options, path) as servers, spawn_peer("bare", path) as peer:
        makers = with_and_without_checksum(OneAtATime, servers, shape, path)
        makers.append(partial(Bare, LIMIT, peer, shape, sending="gather", in_flight=1))
        with ExitStack() as stack:
            if NGINX.find() is not None and not options.tls:
                port = stack.enter_context(NGINX.running([servers[NOW].port] * 2))
                proxy = replace(servers[NOW], url=f"http://{HOST}:{port}", port=port)
                makers.append(partial(OneAtATime, CACHED, proxy, shape, path, same_step=True))
            contest(rounds, shape, path, options, makers)
    pairs = [(name, LIMIT) for name in rounds.values if name != LIMIT]
    most = P99_OF_P50 * rounds.spread(NOW, P50)["median"]
    targets = [rounds.target(NOW, P99, "at most", most)]
    if not options.tls:
        targets.append(rounds.target(NOW, P50, "at most", P50_OF_LIMIT, to=LIMIT))
    return Report(
        data={"shape": str(shape), "contenders": rounds.summary()},
        tables=[rounds.table(), rounds.ratio_table([*pairs, *compared(rounds)])],
        targets=targets,
    )
