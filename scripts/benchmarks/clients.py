"""Run one client as a process of its own: `python -m scripts.benchmarks.clients JOB`.

It connects, prints `ready`, and then reads turns, one a line: the `time.monotonic` at which the turn ends, a
clock that all processes of a machine share. It takes batches until then and prints `BATCHES CPU_SECONDS`.
Between turns it takes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scripts.benchmarks.contender import Contender, Shape, check
from scripts.benchmarks.ours import IN_FLIGHT, Ours, steps_per_request
from scripts.benchmarks.peers.bare import Bare
from scripts.benchmarks.servers import Address, Server
from scripts.processes import ROOT, running


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Say what a client connects to.

    Args:
        kind: `ours` is `CorpusLoader(dtype=None)`, `bare` the bare TCP client with as many bytes in flight.
        at: URL of our server, or port of the bare one.
        path: of the corpus, with which the first batches are compared.
    """

    kind: Literal["ours", "bare"]
    at: str
    path: str
    num_tokens: int
    rows: int
    length: int


class Clients:
    """Processes that take batches when told to."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def turn(self, count: int, seconds: float) -> tuple[int, float]:
        """Let the first `count` clients take batches; return how many they took, and their CPU seconds."""
        line = f"{time.monotonic() + seconds}\n".encode()
        for process in self._processes[:count]:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers = [_read(process).split() for process in self._processes[:count]]
        return sum(int(batches) for batches, _ in answers), sum(float(cpu) for _, cpu in answers)


@contextmanager
def connected(jobs: Sequence[Job]) -> Iterator[Clients]:
    """Start a client for each job, all at once; the block begins when all are connected."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                running(
                    [sys.executable, "-m", "scripts.benchmarks.clients", json.dumps(dataclasses.asdict(job))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for job in jobs
        ]
        for process in processes:
            if _read(process).strip() != "ready":
                raise RuntimeError("a client of the bench did not connect; it says why above")
        yield Clients(processes)


def _read(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode()


def connect(job: Job) -> Contender:
    """Connect as the job says; the first batches are compared with the corpus."""
    shape, path = Shape(rows=job.rows, length=job.length), Path(job.path)
    contender: Contender
    if job.kind == "ours":
        server = Server(url=job.at, port=0, pids=[], state_dir=ROOT)
        contender = Ours("ours", server, shape, path)
    else:
        contender = Bare(
            "bare",
            Address(job.at, [], job.num_tokens),
            shape,
            sending="piece",
            in_flight=IN_FLIGHT,
            steps=steps_per_request(shape),
        )
    check(contender, path, shape)
    return contender


def main() -> None:
    contender = connect(Job(**json.loads(sys.argv[1])))
    print("ready", flush=True)
    for line in sys.stdin:
        stop, batches, cpu = float(line), 0, time.process_time()
        while time.monotonic() < stop:
            contender.next()
            batches += 1
        print(batches, time.process_time() - cpu, flush=True)
    os._exit(0)  # the parent is done, and connections need no farewell


if __name__ == "__main__":
    main()
