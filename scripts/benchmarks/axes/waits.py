"""Measure what one training process loses to its client: speed, memory, silent replicas, signals.

A loader of this tree and, with `--before`, one of that commit take turns; both ask today's servers. Each
runs in a fresh process. *Delivery* asks as fast as it can. The other loops train for 10 ms a step, eight
batches ahead, so that what a fault costs shows at once, and 500 ahead, as by default. One of their two
replicas is black-holed (connecting hangs), slow (each request is 100 ms late) or frozen (SIGSTOP) from the
first second on. For *signals* the only server is frozen or gone, and the loop waits: how long until it ends?
Its SIGTERM handler is that of `client/examples/train.py` in the same commit.
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
from typing import Any

from scripts.benchmarks import corpus
from scripts.benchmarks.checkout import checked_out
from scripts.benchmarks.contest import BEFORE, NOW
from scripts.benchmarks.measure import CPU, DELIVERY, SPEED, Rounds
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, serving
from scripts.processes import HOST, ROOT, running

HELP = "what a training loop loses to its client: speed, memory, silent replicas, signals"

ROWS, SEQ_LEN = 64, 1024
NUM_TOKENS, QUICK_TOKENS = 10**7, 200_000
STEP_SECONDS, LATE_SECONDS = 0.01, 0.1
SHORT = json.dumps({"prefetch_bytes": 8 * (ROWS * (SEQ_LEN + 1) * 2 + 4096)})
WAITED, LONGEST, MEMORY, ENDED = "waited_ms", "longest_ms", "peak_mb", "ended_seconds"
PATIENCE_SECONDS = 12.0
"""For a loop that a signal should end; longer counts as this long."""

PARTS = ("delivery", "faults", "signals")
FAULTS = ("slow", "none", "black-holed", "frozen")
SILENT = ("slow", "frozen")  # measured with the default ring, too
SIGNALS = [(number, away) for number in (signal.SIGINT, signal.SIGTERM) for away in ("gone", "frozen")]

LOOP = """
import json, resource, signal, sys, time
from corpus_client import CorpusLoader, Staging
given = json.loads(sys.argv[1])
signals = []
loader = CorpusLoader(given["urls"], corpus="bench", seq_len=given["seq_len"], device="cpu",
                      global_batch_size=given["rows"], staging=Staging(**given["staging"]))

def note(number, frame):
    signals.append(number)
    if getattr(loader, "waiting", False):
        raise SystemExit(128 + number)

signal.signal(signal.SIGTERM, note)
next(loader)
print("ready", flush=True)
began, cpu, waits, tokens = time.perf_counter(), time.process_time(), [0.0], 0
end = began + given["seconds"]
try:
    asked = began
    while asked < end and not signals:
        tokens += next(loader).inputs.numel()
        waits.append(time.perf_counter() - asked)
        time.sleep(given["step_seconds"])
        asked = time.perf_counter()
finally:
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"tokens": tokens, "seconds": seconds, "cpu": cpu, "waited": sum(waits),
                      "longest": max(waits), "peak_kib": peak}), flush=True)
"""


def measure(options: Options) -> Report:
    """Run every loop with the client of each tree, in turn."""
    parts = options.only or PARTS
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--only must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    path = corpus.make(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    delivery = Rounds("delivery, 64 x 1,025", {**DELIVERY, MEMORY: ("peak MB", ",.0f")})
    columns = {WAITED: ("waited ms", ",.0f"), LONGEST: ("longest wait ms", ",.0f")}
    faults = {
        staging: Rounds(f"steps of 10 ms, {ahead}", columns)
        for staging, ahead in ((SHORT, "8 batches ahead"), ("{}", "500 batches ahead, as by default"))
    }
    ends = Rounds("a loop that waits for a server", {ENDED: ("ended after s", ".2f")})
    with ExitStack() as stack:
        trees = {NOW: ROOT}
        if options.before is not None:
            trees[BEFORE] = stack.enter_context(checked_out(options.before))
        servers = [stack.enter_context(serving({corpus.NAME: path})) for _ in range(2)]
        for number in range(options.rounds):
            for name, tree in list(trees.items())[:: 1 if number % 2 == 0 else -1]:
                if "delivery" in parts:
                    delivery.add(name, _delivered(servers[0], tree, options))
                for fault in FAULTS[: 1 if options.quick else None] if "faults" in parts else ():
                    for staging, its in list(faults.items())[: 2 if fault in SILENT else 1]:
                        its.add(f"{name}, {fault}", _faulty(servers, tree, fault, staging, options))
                for sent, away in SIGNALS[: 1 if options.quick else None] if "signals" in parts else ():
                    ends.add(f"{name}, {sent.name}, {away}", {ENDED: _ended(path, tree, sent, away)})
    measured = [each for each in (delivery, *faults.values(), ends) if each.values]
    tables = [each.table() for each in measured]
    targets = [ends.target(name, ENDED, "at most", 1.0) for name in ends.values if name.startswith(NOW)]
    if options.before is not None and "delivery" in parts:
        tables.append(delivery.ratio_table([(NOW, BEFORE)]))
        targets.append(delivery.target(NOW, SPEED, "at least", 0.97, to=BEFORE))
    data = {each.title: each.summary() for each in measured}
    return Report(data=data, tables=tables, targets=targets)


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
                stack.callback(_freeze, second, signal.SIGCONT)
                _freeze(second)
            found = _result(process)
    return {WAITED: found["waited"] * 1e3, LONGEST: found["longest"] * 1e3}


def _ended(path: Path, tree: Path, sent: signal.Signals, away: str) -> float:
    """Return how long a waiting loop goes on after a signal."""
    with (
        serving({corpus.NAME: path}) as server,
        _loop(tree, [server.url], 1e6, SHORT, STEP_SECONDS) as process,
    ):
        _freeze(server, signal.SIGSTOP if away == "frozen" else signal.SIGKILL)
        time.sleep(1.5)  # it waits by now
        began = time.monotonic()
        process.send_signal(sent)
        found: list[Any] = []
        reader = threading.Thread(target=lambda: found.append(_result(process)), daemon=True)
        reader.start()
        reader.join(PATIENCE_SECONDS)
        seconds = time.monotonic() - began
        process.kill()
        reader.join()
        _freeze(server, signal.SIGCONT)
    return seconds


@contextmanager
def _loop(
    tree: Path, urls: list[str], seconds: float, staging: str = "{}", step_seconds: float = 0.0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training loop with a tree's client; staging: arguments of `Staging`, as JSON."""
    given = {"urls": urls, "rows": ROWS, "seq_len": SEQ_LEN, "seconds": seconds}
    given["staging"] = json.loads(staging)
    command = [sys.executable, "-c", LOOP, json.dumps({**given, "step_seconds": step_seconds})]
    with running(command, stdout=subprocess.PIPE, tree=tree) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("a loop ended before its first batch; it says why above")
        yield process


def _result(process: subprocess.Popen[bytes]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    return dict(json.loads(line)) if line else {}


def _freeze(server: Server, number: signal.Signals = signal.SIGSTOP) -> None:
    for pid in server.pids:
        with suppress(ProcessLookupError):
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
