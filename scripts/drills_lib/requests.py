"""Many requests on one connection, and what the worker that answers them holds meanwhile."""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil

from scripts.benchmarks.questions import memory_mib
from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import QUERY, Web
from tests.raw_http import RawConnection, get
from tests.serving import RunningServer

TOGETHER = 20
"""Requests that are sent at once: most of the time is the server's."""

NUM_SAMPLES = 20


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
    """Asks for steps and compares them with the file; `samples` are of the worker, `NUM_SAMPLES` in all."""

    def __init__(self, web: Web, server: RunningServer) -> None:
        self._web, self._server = web, server
        self._worker = psutil.Process(server.worker_pid)
        self.samples: list[Sample] = []
        self.num_right = self.num_wrong = 0

    def ask(self, num_requests: int, *, new_plan_every: int = 0) -> None:
        """Ask on one connection; one request of so many has a seed that no request had before."""
        with RawConnection(self._server) as connection:
            for first in range(0, num_requests, TOGETHER):
                numbers = range(first, first + TOGETHER)
                new = [number for number in numbers if new_plan_every and not number % new_plan_every]
                for number in numbers:
                    seed: dict[str, Any] = (
                        {"seed": number + 1} if number in new else {}
                    )  # changes no row here
                    connection.send(get("/v1/batches", **QUERY, **seed, step=number % 30_000))
                for number in numbers:
                    response = connection.read()
                    is_right = response.status == 200
                    is_right = is_right and response.body == self._web.right(number % 30_000).tobytes()
                    self.num_right += is_right
                    self.num_wrong += not is_right
                if first % (num_requests // NUM_SAMPLES) == 0:
                    held = (self._worker.num_fds(), self._worker.num_threads())
                    self.samples.append(Sample(memory_mib(self._server, "RssAnon"), *held))

    def tell(self, found: Found) -> None:
        """Note the figures: the second half of the samples must not grow."""
        first, half, last = (self.samples[k] for k in (0, len(self.samples) // 2, -1))
        found.figure("right", self.num_right)
        found.figure("wrong", self.num_wrong, most=0)
        found.figure("private MiB at the start", first.mib)
        found.figure("at half", half.mib)
        found.figure("at the end", last.mib, most=half.mib + 8)
        found.figure("descriptors more", last.descriptors - half.descriptors, most=0)
        found.figure("threads more", last.threads - half.threads, most=0)
