"""Measure how soon a server is ready, how soon a killed worker is replaced, and what workers take of memory.

    python -m scripts.start_cost [--before COMMIT] [--rounds 20]

Servers of this tree and of the commit take turns.

*ready* is from the command to the first response of `/readyz`, *CPU* that of all its processes until then.
*replaced* is the wait for a response after the only worker was killed, on a new connection. *loop* is the
longest wait of a loop over a loader (64 rows of 1,025 tokens) while the only worker is killed every second.
*MiB* is the proportional share (PSS) of all processes of a server together after 200 batches for each worker,
4 MiB of the corpus included, and in brackets what each worker has for itself (USS).
"""

from __future__ import annotations

import argparse
import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from corpus_client import CorpusLoader
from scripts.benchmarks.servers import checked_out
from scripts.processes import HOST, ROOT, claim_port, running

NUM_WORKERS = (1, 4, 8)
BATCHES = "/v1/batches?corpus=web&seq_len=1024&batch_size=64&step={}"
MIB = 2**20


def ask(port: int, target: str) -> int:
    """Return the status of a request over a connection of its own."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=30)) as connection:
        connection.request("GET", target)
        response = connection.getresponse()
        response.read()
        return response.status


def is_answered(port: int, target: str) -> bool:
    """Tell whether a request gets 200."""
    try:
        return ask(port, target) == 200
    except (OSError, http.client.HTTPException):
        return False


def wait(port: int, target: str) -> None:
    """Ask until the response is 200."""
    while not is_answered(port, target):
        time.sleep(0.002)


@contextmanager
def served(tree: Path, corpus: Path, num_workers: int) -> Iterator[tuple[psutil.Process, int, float, float]]:
    """Yield a server that is ready, its port, and the seconds and the seconds of CPU until then."""
    port = claim_port()
    with tempfile.TemporaryDirectory() as state_dir:
        command = [sys.executable, "-m", "corpus_server", "serve", f"web={corpus}", "--port", str(port)]
        command += ["--workers", str(num_workers), "--state-dir", state_dir, "--log-level", "warning"]
        began = time.monotonic()
        with running(command, tree=tree, ready=partial(is_answered, port, "/readyz")) as process:
            seconds = time.monotonic() - began
            server = psutil.Process(process.pid)
            cpu_seconds = 0.0
            for each in (server, *server.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # what is between a template and a worker ends at once
                    times = each.cpu_times()
                    cpu_seconds += times.user + times.system
            yield server, port, seconds, cpu_seconds


def workers_of(server: psutil.Process) -> list[psutil.Process]:
    """Return the workers of a server of any commit."""
    children = server.children()
    return [each for each in children if each.name() == "corpus-worker"] or children


def measure(tree: Path, corpus: Path, found: dict[str, list[float]]) -> None:
    """Start a server, kill its worker a second later, and wait for the next one."""
    with served(tree, corpus, 1) as (server, port, seconds, cpu):
        found["ready, s"].append(seconds)
        found["CPU, s"].append(cpu)
        time.sleep(1)
        began = time.monotonic()
        workers_of(server)[0].kill()
        wait(port, "/healthz")
        found["replaced, s"].append(time.monotonic() - began)


def longest_wait(tree: Path, corpus: Path, num_kills: int) -> float:
    """Return the longest wait for a batch while the only worker of a server is killed every second."""
    with served(tree, corpus, 1) as (server, port, *_):
        over = threading.Event()

        def kill() -> None:
            for _ in range(num_kills):
                time.sleep(1)
                for worker in workers_of(server):
                    worker.kill()
            over.set()

        url = f"http://{HOST}:{port}"
        longest = 0.0
        with CorpusLoader(url, corpus="web", seq_len=1024, global_batch_size=64, seed=1) as loader:
            batches = iter(loader)
            next(batches)
            killing = threading.Thread(target=kill)
            killing.start()
            while not over.is_set():
                began = time.monotonic()
                next(batches)
                longest = max(longest, time.monotonic() - began)
            killing.join()
        return longest


def memory(tree: Path, corpus: Path, num_workers: int) -> tuple[float, float]:
    """Return MiB of all processes of a server, and of each worker alone."""
    with served(tree, corpus, num_workers) as (server, port, *_):
        deadline = time.monotonic() + 60
        while len(workers_of(server)) < num_workers and time.monotonic() < deadline:
            time.sleep(0.1)
        for step in range(200 * num_workers):
            ask(port, BATCHES.format(step))
        processes = [server, *server.children(recursive=True)]
        shared = sum(each.memory_full_info().pss for each in processes)
        own = [each.memory_full_info().uss for each in workers_of(server)]
        return shared / MIB, statistics.median(own) / MIB


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="that commit's server beside this tree's")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "web.bin"
        np.random.default_rng(1).integers(0, 50_000, 2_000_000).astype("<u2").tofile(corpus)
        with checked_out(given.before) if given.before else nullcontext() as before:
            trees = {given.before: before} if before else {}
            trees |= {"this tree": ROOT}
            found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in trees}
            for _ in range(given.rounds):
                for name, tree in trees.items():
                    measure(tree, corpus, found[name])
            print(f"| {'median (worst)'} | {' | '.join(trees)} |\n|---|{'---|' * len(trees)}")
            for what in next(iter(found.values())):
                cells = [
                    f"{statistics.median(each[what]):.2f} ({max(each[what]):.2f})" for each in found.values()
                ]
                print(f"| {what} | {' | '.join(cells)} |")
            waits = [longest_wait(tree, corpus, given.rounds) for tree in trees.values()]
            print(f"| loop, s | {' | '.join(f'{each:.2f}' for each in waits)} |", flush=True)
            for num_workers in NUM_WORKERS:
                values = [memory(tree, corpus, num_workers) for tree in trees.values()]
                cells = [f"{total:.0f} ({own:.0f})" for total, own in values]
                print(f"| {num_workers} workers, MiB (each alone) | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
