"""Many requests on one connection, and what the worker that answers them holds meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import psutil
import xxhash

from scripts.benchmarks.questions import memory_mib
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import QUERY, SEQ_LEN, Web
from tests.raw_http import RawConnection, RawResponse, get
from tests.serving import RunningServer

TOGETHER = 20
"""Requests that are sent at once: most of the time is the server's."""

NUM_STEPS = 30_000
"""That are asked for, again and again: less than an epoch of every stride."""

NUM_SAMPLES = 30

SHOWN = 3
"""Responses that are told whole, of those that are wrong and of those that are refused."""


class Sample(NamedTuple):
    """What a worker held: private memory, open files, threads."""

    mib: float
    descriptors: int
    threads: int


GROWTH_RULE = (
    "a worker's private memory grows by less than 8 MiB in the second half; descriptors and threads by none"
)
"""When a drill that uses `Growth` passes."""


class Growth:
    """Asks for steps and compares them with the file; `samples` are of the worker, `NUM_SAMPLES` in all.

    Args:
        new_plan_every: one request of so many spells a plan that no request had before; 0: none.
    """

    def __init__(self, web: Web, server: RunningServer, *, new_plan_every: int = 0) -> None:
        self._web, self._server, self._new_plan_every = web, server, new_plan_every
        self._worker = psutil.Process(server.worker_pid)
        self.samples: list[Sample] = []
        self.num_right = 0
        self.wrong: list[str] = []
        self.refused: list[str] = []

    def ask(self, num_requests: int) -> None:
        """Ask on one connection."""
        with RawConnection(self._server) as connection:
            for first in range(0, num_requests, TOGETHER):
                numbers = range(first, first + TOGETHER)
                for number in numbers:
                    connection.send(get("/v1/batches", **self._query(number)))
                for number in numbers:
                    self._check(number, connection.read())
                if first >= len(self.samples) * num_requests / NUM_SAMPLES:
                    held = (self._worker.num_fds(), self._worker.num_threads())
                    self.samples.append(Sample(memory_mib(self._server, "RssAnon"), *held))

    def _query(self, number: int) -> dict[str, Any]:
        plan = {**QUERY, "seed": number, "stride": self._stride(number)} if self._is_new(number) else QUERY
        return {**plan, "step": number % NUM_STEPS}

    def _is_new(self, number: int) -> bool:
        return self._new_plan_every > 0 and number % self._new_plan_every == 0

    def _stride(self, number: int) -> int:
        """Return the stride of a request's plan: neighbouring new plans have other rows."""
        return 1 + number // self._new_plan_every % SEQ_LEN if self._is_new(number) else SEQ_LEN

    def _check(self, number: int, response: RawResponse) -> None:
        right = self._web.right(number % NUM_STEPS, self._stride(number)).tobytes()
        checksum = f"xxh3-64={xxhash.xxh3_64_hexdigest(right)}"
        if (response.status, response.body, response.headers.get("corpus-checksum")) == (
            200,
            right,
            checksum,
        ):
            self.num_right += 1
            return
        others = self.wrong if response.status == 200 else self.refused
        log = self._server.log()[-2000:] if len(others) < SHOWN else ""
        others.append(f"request {number}: {response}; it must begin with {right[:80]!r}; the log ends: {log}")

    def tell(self, found: Found) -> None:
        """Note the figures: the second half of the samples must not grow."""
        first, third, half, later, last = (
            self.samples[k] for k in (0, NUM_SAMPLES // 3, NUM_SAMPLES // 2, 2 * NUM_SAMPLES // 3, -1)
        )
        found.figure("right", self.num_right)
        found.figure("wrong", len(self.wrong), most=0)
        found.figure("refused", len(self.refused), most=0)
        found.failures += [*self.wrong[:SHOWN], *self.refused[:SHOWN]]
        found.figure("private MiB at the start", first.mib)
        found.figure("after a third", third.mib)
        found.figure("at half", half.mib)
        found.figure("after two thirds", later.mib)
        found.figure("at the end", last.mib, most=half.mib + 8)
        # What is open for a moment is in some samples and not in others.
        begun, ended = self.samples[: NUM_SAMPLES // 2], self.samples[2 * NUM_SAMPLES // 3 :]
        descriptors = min(each.descriptors for each in ended) - max(each.descriptors for each in begun)
        found.figure("descriptors more", descriptors, most=0)
        threads = min(each.threads for each in ended) - max(each.threads for each in begun)
        found.figure("threads more", threads, most=0)


def measure_growth(folder: Path, found: Found, num_requests: int, *, new_plan_every: int = 0) -> None:
    """Run a drill of many requests to one worker; see `Growth`."""
    web = Web(folder)
    with RunningServer({"web": web.path}, folder) as server:
        growth = Growth(web, server, new_plan_every=new_plan_every)
        growth.ask(num_requests)
        growth.tell(found)
