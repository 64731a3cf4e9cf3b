"""Measure what one training process loses to its client: speed, memory, silent replicas.

A loader of this tree and, with `--before`, one of that commit take turns; both ask today's servers. Each
runs in a fresh process. *Delivery* asks as fast as it can. The other loops train for 10 ms a step, eight
batches ahead, so that what a fault costs shows at once, and 500 ahead, as by default. One of their two
replicas is black-holed (connecting hangs), slow (each request is 100 ms late) or frozen (SIGSTOP) from the
first second on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from scripts.benchmarks import corpus
from scripts.benchmarks.contest import BEFORE, NOW
from scripts.benchmarks.measure import CPU, DELIVERY, SPEED, Rounds
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, checked_out, serving
from scripts.processes import HOST, ROOT, running

HELP = "what a training loop loses to its client: speed, memory, silent replicas"

ROWS, SEQ_LEN = 64, 1024
NUM_TOKENS, QUICK_TOKENS = 10**7, 200_000
STEP_SECONDS, LATE_SECONDS = 0.01, 0.1
WAITED, LONGEST, MEMORY = "waited_ms", "longest_ms", "peak_mb"
WAITS = {WAITED: ("waited ms", ",.0f"), LONGEST: ("longest wait ms", ",.0f")}
LONGEST_MS = 1000.0  # what a silent replica may cost

PARTS = ("delivery", "faults")
FAULTS = ("slow", "none", "black-holed", "frozen")
SHORT = json.dumps({"prefetch_bytes": 8 * (ROWS * (SEQ_LEN + 1) * 2 + 4096)})
STAGING = {"8 batches ahead": (SHORT, FAULTS), "500 batches ahead, as by default": ("{}", ("slow", "frozen"))}
"""Arguments of `Staging`, as JSON, and what is measured with them."""

LOOP = """
import json, resource, sys, time
from corpus_client import CorpusLoader, Staging
urls, rows, seq_len, seconds, step_seconds, staging = json.loads(sys.argv[1])
loader = CorpusLoader(urls, corpus="bench", seq_len=seq_len, device="cpu", global_batch_size=rows,
                      staging=Staging(**json.loads(staging)))
next(loader)
print("ready", flush=True)
asked = began = time.perf_counter()
cpu, waits, tokens = time.process_time(), [0.0], 0
while asked < began + seconds:
    tokens += next(loader).inputs.numel()
    waits.append(time.perf_counter() - asked)
    time.sleep(step_seconds)
    asked = time.perf_counter()
print(json.dumps({"tokens": tokens, "seconds": asked - began, "cpu": time.process_time() - cpu,
                  "waited": sum(waits), "longest": max(waits),
                  "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)
"""


def measure(options: Options) -> Report:
    """Run every loop with the client of each tree, in turn."""
    parts = options.chosen(PARTS)
    path = corpus.make(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    delivery = Rounds(f"delivery, {ROWS} x {SEQ_LEN + 1:,}", {**DELIVERY, MEMORY: ("peak MB", ",.0f")})
    faults = {ahead: Rounds(f"steps of {STEP_SECONDS * 1e3:g} ms, {ahead}", WAITS) for ahead in STAGING}
    with ExitStack() as stack:
        trees = {NOW: ROOT}
        if options.before is not None:
            trees[BEFORE] = stack.enter_context(checked_out(options.before))
        servers = [stack.enter_context(serving({corpus.NAME: path})) for _ in range(2)]
        for number in range(options.rounds):
            for name, tree in list(trees.items())[:: 1 if number % 2 == 0 else -1]:
                if "delivery" in parts:
                    delivery.add(name, _delivered(servers[0], tree, options))
                for ahead, (staging, its) in STAGING.items() if "faults" in parts else ():
                    for fault in its[: 1 if options.quick else None]:
                        found = _faulty(servers, tree, fault, staging, options)
                        faults[ahead].add(f"{name}, {fault}", found)
    measured = [each for each in (delivery, *faults.values()) if each.values]
    tables = [each.table() for each in measured]
    targets = [
        rounds.target(name, LONGEST, "at most", LONGEST_MS)
        for rounds in faults.values()
        for name in rounds.values
        if name.startswith(NOW)
    ]
    if options.before is not None and delivery.values:
        tables.append(delivery.ratio_table([(NOW, BEFORE)]))
        targets.append(delivery.target(NOW, SPEED, "at least", 0.97, to=BEFORE))
    return Report(data={each.title: each.summary() for each in measured}, tables=tables, targets=targets)


def _delivered(server: Server, tree: Path, options: Options) -> dict[str, float]:
    with _loop(tree, [server.url], 2 * options.seconds) as process:
        found = _result(process)
    return {
        SPEED: found["tokens"] / found["seconds"] / 1e6,
        CPU: found["cpu"] / found["tokens"] * 1e9,
        MEMORY: found["peak_kib"] / 1e3,
    }


def _faulty(
    servers: list[Server], tree: Path, fault: str, staging: str, options: Options
) -> dict[str, float]:
    seconds = 1.5 if options.quick else 4 * options.seconds + 2
    with ExitStack() as stack:
        first, second = servers
        url = second.url
        if fault == "black-holed":
            url = stack.enter_context(_black_hole())
        elif fault == "slow":
            url = stack.enter_context(_slow(second.port))
        with _loop(tree, [first.url, url], seconds, staging, STEP_SECONDS) as process:
            if fault == "frozen":
                time.sleep(1.0)
                stack.callback(_signal, second, signal.SIGCONT)
                _signal(second, signal.SIGSTOP)
            found = _result(process)
    return {WAITED: found["waited"] * 1e3, LONGEST: found["longest"] * 1e3}


@contextmanager
def _loop(
    tree: Path, urls: list[str], seconds: float, staging: str = "{}", step_seconds: float = 0.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training loop with a tree's client."""
    given = json.dumps([urls, ROWS, SEQ_LEN, seconds, step_seconds, staging])
    with running([sys.executable, "-c", LOOP, given], stdout=subprocess.PIPE, tree=tree) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("a loop ended before its first batch; it says why above")
        yield process


def _result(process: subprocess.Popen[bytes]) -> dict[str, float]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def _signal(server: Server, number: signal.Signals) -> None:
    for pid in server.pids:
        os.kill(pid, number)


@contextmanager
def _black_hole() -> Iterator[str]:
    """Listen with a full backlog, so that connecting hangs as through a firewall that drops."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            peer = stack.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(listener.getsockname())
        yield f"http://{HOST}:{listener.getsockname()[1]}"


@contextmanager
def _slow(port: int) -> Iterator[str]:
    """Pass connections on to a port, each request 100 ms late."""

    def relay(source: socket.socket, target: socket.socket, late_seconds: float) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 18):
                time.sleep(late_seconds)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((HOST, port))
                for ways in ((client, server, LATE_SECONDS), (server, client, 0.0)):
                    threading.Thread(target=relay, args=ways, daemon=True).start()

    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://{HOST}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
