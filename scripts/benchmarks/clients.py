"""Run clients as processes of their own: `python -m scripts.benchmarks.clients JOB`.

A process connects, prints `ready`, and then does a turn for each line that it reads: a `time.monotonic`,
a clock that all processes of a machine share. It prints what it found as JSON. Between turns it
takes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import torch

from corpus_client import CorpusLoader, Placement, Staging
from corpus_client.network.replicas import Exchange, Replicas
from corpus_client.network.transport import Buffer
from corpus_client.network.wire import ArrayRequest
from corpus_client.plan import iteration
from scripts.benchmarks.contender import Contender, Shape, check
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.lone import Lone
from scripts.benchmarks.ours import IN_FLIGHT, Ours, steps_per_request
from scripts.benchmarks.peers.bare import Bare
from scripts.benchmarks.servers import Address, Server
from scripts.processes import running

NUM_SLOTS = 4
NUM_SMALL = 64
PACKED: Mapping[str, Any] = {"rows": {"documents": {}}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Say what the clients of a process do.

    Args:
        kind: `ours` is `CorpusLoader(dtype=None)`, `bare` the bare TCP client with as many bytes in flight;
            both take batches until the time that a line says. `packed` is `ours` with rows of documents.
            `small` are 64 readers, each with a connection, that ask for a batch every `period_seconds` until
            then. `paced` are several loaders, a thread each, that take a batch every `period_seconds` from
            the time on that a line says.
        at: URL of our server; port of the bare one, and of that which `small` readers ask.
        path: of the corpus, with which the first batches are compared.
        rows, length: of a client's batch; the global batch of a paced one has `rows * world_size` rows.
        ranks: of the paced clients here.
        offsets: seconds after the start at which each one's first batch is due.
        num_batches: that each of them takes.
    """

    kind: Literal["ours", "packed", "small", "bare", "paced"]
    at: str
    path: str = ""
    rows: int
    length: int
    ranks: Sequence[int] = ()
    offsets: Sequence[float] = ()
    world_size: int = 1
    num_batches: int = 0
    period_seconds: float = 0.0


class Clients:
    """Processes that do a turn when told to."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def turn(self, at: float, count: int | None = None) -> list[Any]:
        """Tell the first `count` processes a time; return what they found."""
        for process in self._processes[:count]:
            assert process.stdin is not None
            process.stdin.write(f"{at}\n".encode())
            process.stdin.flush()
        return [json.loads(_read(process)) for process in self._processes[:count]]


@contextmanager
def connected(jobs: Sequence[Job]) -> Iterator[Clients]:
    """Start a process for each job, all at once; the block begins when all are connected."""
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = []
        for job in jobs:
            words = [sys.executable, "-m", "scripts.benchmarks.clients", json.dumps(dataclasses.asdict(job))]
            processes.append(stack.enter_context(running(words, stdin=pipe, stdout=pipe)))
        for process in processes:
            _read(process)
        yield Clients(processes)


def _read(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a client of the bench ended with {process.wait(10)}; it says why above")
    return line


def connect(job: Job) -> Callable[[float], dict[str, float]]:
    """Return a turn that takes batches; the first ones are compared with the corpus."""
    shape, path = Shape(rows=job.rows, length=job.length), Path(job.path)
    contender: Contender
    if job.kind in ("ours", "packed"):
        fields = PACKED if job.kind == "packed" else {}
        contender = Ours("ours", Server(url=job.at, port=0, pids=[]), shape, path, **fields)
    else:
        address, steps = Address(job.at, [], path.stat().st_size // 2), steps_per_request(shape)
        contender = Bare("bare", address, shape, sending="piece", in_flight=IN_FLIGHT, steps=steps)
    if job.kind != "packed":  # whose rows are no windows
        check(contender, path, shape)

    def turn(stop: float) -> dict[str, float]:
        batches, cpu = 0, time.process_time()
        while time.monotonic() < stop:
            contender.next()
            batches += 1
        return {"batches": batches, "cpu": time.process_time() - cpu}

    return turn


def read_small(job: Job) -> Callable[[float], int]:
    """Return a turn of small readers, spread over their period; it returns how often they asked."""
    path = f"/v1/batches?corpus={NAME}&seq_len={job.length - 1}&batch_size={job.rows}&step={{step}}"
    readers = [Lone(int(job.at), [], path) for _ in range(NUM_SMALL)]

    def turn(stop: float) -> int:
        began = time.monotonic()

        def read(number: int) -> int:
            for count in itertools.count():
                due = began + (number / NUM_SMALL + count) * job.period_seconds
                if due >= stop:
                    return count
                time.sleep(max(0.0, due - time.monotonic()))
                readers[number].ask()
            return 0

        with ThreadPoolExecutor(NUM_SMALL) as pool:
            return sum(pool.map(read, range(NUM_SMALL)))

    return turn


class TimedReplicas(Replicas):
    """Record when each request was sent, and the time until its response was complete and checked."""

    into: ClassVar[list[tuple[float, float]]]  # of a subclass for each loader

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sent: dict[int, float] = {}

    def begin(self, request: ArrayRequest) -> Exchange:
        sent = time.monotonic()
        exchange = super().begin(request)
        self._sent[id(exchange)] = sent
        return exchange

    def finish(self, exchange: Exchange, buffer: Buffer) -> None:
        super().finish(exchange, buffer)
        sent = self._sent.pop(id(exchange))
        self.into.append((sent, time.monotonic() - sent))


class Paced:
    """Take a batch of one rank whenever one is due.

    Its budget holds four batches, so it asks for one step at a time, each when a batch was consumed.
    """

    def __init__(self, job: Job, rank: int, offset: float) -> None:
        self._job, self._offset, self._rank = job, offset, rank
        self._requests: list[tuple[float, float]] = []
        slot_bytes = -(-2 * job.rows * job.length // mmap.PAGESIZE) * mmap.PAGESIZE
        # The loader offers no hook for this, so requests are timed where it makes its connections.
        timed = type("TimedReplicas", (TimedReplicas,), {"into": self._requests})
        with mock.patch.object(iteration, "Replicas", timed):
            self._loader = CorpusLoader(
                job.at,
                corpus=NAME,
                seq_len=job.length - 1,
                global_batch_size=job.rows * job.world_size,
                device="cpu",
                dtype=None,
                staging=Staging(prefetch_bytes=NUM_SLOTS * slot_bytes),
                placement=Placement(rank=rank, world_size=job.world_size),
            )
        num_steps = self._loader.prepared.steps_per_request
        if num_steps != 1:
            raise RuntimeError(f"a request must ask for one step, not {num_steps}")
        next(self._loader)
        self._loader.seek(self._loader.step)  # hands the loader over to the client's thread

    def run(self, start: float) -> dict[str, Any]:
        """Take every batch when it is due, from `start` on.

        Returns: rank; seconds of each request and each `next`; how often no batch was there when one was due;
        retries; (step, SHA-256 of the tokens) of the last batch.
        """
        waits, late = [], 0
        for number in range(self._job.num_batches):
            due = start + self._offset + number * self._job.period_seconds
            time.sleep(max(0.0, due - time.monotonic()))
            late += self._loader.stats().ready_slots == 0
            asked = time.perf_counter()
            batch = next(self._loader)
            waits.append(time.perf_counter() - asked)
        last = (batch.step, hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest())
        retries = self._loader.stats().num_retries
        requests = [seconds for sent, seconds in self._requests if sent >= start]
        found = {"request_seconds": requests, "wait_seconds": waits, "late": late, "retries": retries}
        return {"rank": self._rank, "last": last, **found}

    def close(self) -> None:
        """Close the loader; while others run, it would take their core."""
        self._loader.close()


def pace(job: Job) -> Callable[[float], list[dict[str, Any]]]:
    """Return a turn of all paced clients of a job; there can be one only."""
    torch.set_num_threads(1)
    paced = [Paced(job, rank, offset) for rank, offset in zip(job.ranks, job.offsets, strict=True)]

    def turn(start: float) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(paced)) as pool:
            found = list(pool.map(lambda each: each.run(start), paced))
        for each in paced:
            each.close()
        return found

    return turn


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    begin: Mapping[str, Callable[[Job], Callable[[float], Any]]] = {"paced": pace, "small": read_small}
    turn = begin.get(job.kind, connect)(job)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(float(line))), flush=True)
    os._exit(0)  # the parent is done, and connections need no farewell


if __name__ == "__main__":
    main()
