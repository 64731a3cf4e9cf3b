"""Run workers that need a batch at fixed times: `python -m scripts.benchmarks.workers JOB`.

A process holds several workers, a thread each with a loader of its own. The parent reads `ready`, writes
the `time.monotonic` at which the first batch is due (one clock for all processes of a machine), and reads
what was measured as JSON. A loader's budget holds four batches, so it asks for one step at a time, each
when a batch was consumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch

from corpus_client import CorpusLoader, Placement, Staging
from corpus_client.network.replicas import Exchange, Replicas
from corpus_client.network.transport import Buffer
from corpus_client.network.wire import ArrayRequest
from corpus_client.plan import state
from scripts.benchmarks.corpus import NAME

NUM_SLOTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Say what the workers of a process do.

    Args:
        url: of the server, or of several replicas.
        ranks: of the workers here.
        offsets: seconds after the common start at which each one's first batch is due.
        rows, length: of each worker's batch; the global batch has `rows * world_size` rows.
        num_batches: that each worker takes, one every `period_seconds`.
    """

    url: str | list[str]
    ranks: list[int]
    offsets: list[float]
    world_size: int
    rows: int
    length: int
    num_batches: int
    period_seconds: float


class TimedReplicas(Replicas):
    """Record when each request was sent, and the time until its answer was complete and checked."""

    def __init__(self, into: list[tuple[float, float]], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._into = into
        self._sent: dict[int, float] = {}

    def begin(self, request: ArrayRequest) -> Exchange:
        sent = time.monotonic()
        exchange = super().begin(request)
        self._sent[id(exchange)] = sent
        return exchange

    def finish(self, exchange: Exchange, buffer: Buffer) -> None:
        super().finish(exchange, buffer)
        sent = self._sent.pop(id(exchange))
        self._into.append((sent, time.monotonic() - sent))


class Worker:
    """Take a batch of one rank whenever one is due.

    Attributes:
        requests: (when sent, seconds) of each.
        waits: seconds that each `next` took.
        num_late: how often no batch was there when one was due.
        last: (step, SHA-256 of the tokens) of the last batch.
    """

    def __init__(self, job: Job, rank: int, offset: float) -> None:
        self._job, self._offset = job, offset
        self.rank = rank
        self.requests: list[tuple[float, float]] = []
        self.waits: list[float] = []
        self.num_late = 0
        self.last = (-1, "")
        slot_bytes = -(-2 * job.rows * job.length // mmap.PAGESIZE) * mmap.PAGESIZE
        # The loader offers no hook for this, so requests are timed where it makes its connections.
        with mock.patch.object(state, "Replicas", partial(TimedReplicas, self.requests)):
            self.loader = CorpusLoader(
                job.url,
                corpus=NAME,
                seq_len=job.length - 1,
                global_batch_size=job.rows * job.world_size,
                device="cpu",
                dtype=None,
                staging=Staging(prefetch_bytes=NUM_SLOTS * slot_bytes),
                placement=Placement(rank=rank, world_size=job.world_size),
            )
        num_steps = self.loader.prepared.steps_per_request
        if num_steps != 1:
            raise RuntimeError(f"a request must ask for one step, not {num_steps}")
        next(self.loader)
        self.loader.seek(self.loader.step)  # hands the loader over to the worker's thread

    def run(self, start: float) -> None:
        """Take every batch when it is due, from `start` on (`time.monotonic`)."""
        for number in range(self._job.num_batches):
            due = start + self._offset + number * self._job.period_seconds
            time.sleep(max(0.0, due - time.monotonic()))
            self.num_late += self.loader.stats().ready_slots == 0
            asked = time.perf_counter()
            batch = next(self.loader)
            self.waits.append(time.perf_counter() - asked)
        self.last = (batch.step, hashlib.sha256(batch.tokens.numpy().tobytes()).hexdigest())

    def result(self, start: float) -> dict[str, Any]:
        """Close the loader; return what was measured since `start`, fit for JSON."""
        stats = self.loader.stats()
        self.loader.close()
        return {
            "rank": self.rank,
            "request_seconds": [seconds for sent, seconds in self.requests if sent >= start],
            "wait_seconds": self.waits,
            "late": self.num_late,
            "retries": stats.num_retries,
            "last": self.last,
        }


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    workers = [Worker(job, rank, offset) for rank, offset in zip(job.ranks, job.offsets, strict=True)]
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    cpu = time.process_time()
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.run(start), workers))
    each = (time.process_time() - cpu) / len(workers)
    print(json.dumps([{**worker.result(start), "cpu_seconds": each} for worker in workers]), flush=True)


if __name__ == "__main__":
    main()
