"""Simulate a job that trains in step, its loaders, and the replicas that they ask: seeded, event by event.

    rank --> worker process of a replica --> (disk, if cold) --> CPU --> link --> rank
             a slot, or 503                  one queue a        one queue   one queue
                                             replica            a process   a replica

A step begins when every rank has its batch and the step before is over: the slowest rank delays all. A loader
keeps four requests' worth of steps ahead, and asks for the next when a slot has become free.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scripts.scale_lib import measured

ROUND_TRIP_SECONDS = 200e-6  # between hosts of one data centre
SILENT, KILLED = "silent", "killed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Say what is trained.

    Args:
        ranks: each asks for rows of its own.
        step_seconds: from one step to the next while no batch is missing.
        batch_bytes: of one rank and step.
        steps_per_request: that a loader joins.
        spread_seconds: within which all ranks ask for what they need next.
        slots: of a loader, each for one request.
    """

    ranks: int = 10_000
    step_seconds: float = 1.0
    batch_bytes: int = measured.REQUEST_BYTES
    steps_per_request: int = 1
    spread_seconds: float = 0.010
    slots: int = measured.NUM_SLOTS

    @property
    def request_bytes(self) -> int:
        """Bytes of one response."""
        return self.batch_bytes * self.steps_per_request


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Say what serves it.

    Args:
        replicas: hosts.
        workers: processes of each, with a core of their own unless `cores` says otherwise.
        slots: responses that a process has in flight; more are refused.
        cpu_seconds: mean of one response; None: from the measured figures.
        link_bytes_per_second: of a replica; 25 Gbit/s.
        cores: that all processes of replicas and clients share; None: each has its own.
        client_seconds: CPU of a client for one response.
        clients: processes that the ranks are divided among.
    """

    replicas: int = 1
    workers: int = 8
    slots: int = measured.MAX_CONCURRENT_ANSWERS
    cpu_seconds: float | None = None
    link_bytes_per_second: float = 3.1e9
    cores: int | None = None
    client_seconds: float = 0.0
    clients: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Say what fails, from step `at_step` on.

    Args:
        lost: the first replica ends: `killed` (its host resets connections) or `silent` (its host is gone).
        cold: so many of the replicas, beginning with the first, read every window from disk.
        disk_factor: how many times slower the first replica's disk is.
    """

    at_step: int = 0
    lost: str | None = None
    cold: int = 0
    disk_factor: float = 1.0


@dataclass(slots=True)
class Outcome:
    """Say what was seen after the first steps.

    Args:
        latencies: seconds from sending a request to having its response, refusals included.
        stalls: seconds that the whole job waited for data, of each step.
        busy: share of the processes' time that they worked.
    """

    latencies: npt.NDArray[np.float64]
    stalls: npt.NDArray[np.float64]
    first_batch_seconds: float
    num_refused: int
    num_left: int
    busy: float

    def percentile(self, share: float) -> float:
        """Return a percentile of the latencies, in seconds."""
        return float(np.percentile(self.latencies, share))


class Host:
    """Cores that processes share: each works on one thing at a time, in order, and they take turns."""

    def __init__(self, cores: int, at: Callable[[float, Callable[..., None]], None]) -> None:
        self._at, self._free = at, cores
        self.queues: dict[object, deque[tuple[float, Callable[[float], None]]]] = {}
        self._ready: deque[object] = deque()

    def submit(self, now: float, process: object, seconds: float, then: Callable[[float], None]) -> None:
        """Let a process work for so long, then call `then` with the time."""
        queue = self.queues.setdefault(process, deque())
        queue.append((seconds, then))
        if len(queue) == 1:
            self._ready.append(process)
            self._start(now)

    def _start(self, now: float) -> None:
        while self._free and self._ready:
            self._free -= 1
            process = self._ready.popleft()
            seconds, _ = self.queues[process][0]
            self._at(now + seconds, lambda now, process=process: self._end(now, process))

    def _end(self, now: float, process: object) -> None:
        self._free += 1
        queue = self.queues[process]
        _, then = queue.popleft()
        if queue:
            self._ready.append(process)
        then(now)
        self._start(now)


@dataclass(slots=True, eq=False)
class _Request:
    """A rank's request number `number`; `sent_at` is that of the first attempt."""

    rank: int
    number: int
    sent_at: float
    done: bool = False
    moved: bool = False


@dataclass(slots=True)
class _Rank:
    """What a loader knows.

    Args:
        avoid_until: of each replica, after a failure.
        latency: of each replica, lately; 0: not known.
        homes: the worker process of each replica that accepted the connection.
    """

    avoid_until: list[float]
    latency: list[float]
    homes: list[int]
    order: list[int]
    num_on_wire: int = 0
    waiting: deque[int] = field(default_factory=deque)


class Simulation:
    """One job on one cluster."""

    def __init__(self, job: Job, cluster: Cluster, faults: Faults | None = None, *, seed: int = 1) -> None:
        self.job, self.cluster, self.faults = job, cluster, faults or Faults()
        self._rng = np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events = 0
        processes = cluster.replicas * cluster.workers
        self._host = None if cluster.cores is None else Host(cluster.cores, self._at)
        self._cpu_free, self._slots = [0.0] * processes, [0] * processes
        self._disk_free, self._link_free = [0.0] * cluster.replicas, [0.0] * cluster.replicas
        homes = self._rng.integers(0, cluster.workers, (job.ranks, cluster.replicas))
        homes += np.arange(cluster.replicas) * cluster.workers
        orders = self._rng.permuted(np.tile(np.arange(cluster.replicas), (job.ranks, 1)), axis=1)
        self._ranks = [
            _Rank([0.0] * cluster.replicas, [0.0] * cluster.replicas, home, order)
            for home, order in zip(homes.tolist(), orders.tolist(), strict=True)
        ]
        mean = cluster.cpu_seconds or measured.request_seconds(job.request_bytes)
        self._mean = mean
        self._draws: Iterator[float] = iter(())
        self._missing: dict[int, int] = {}  # ranks that lack a request's steps
        self._step, self._step_ends, self._lost = -1, 0.0, False
        self._latencies: list[list[float]] = [[]]  # of each step
        self._stalls: list[float] = []
        self._num_refused = self._num_left = 0
        self._worked = 0.0

    def run(self, steps: int, *, warm: int = 4) -> Outcome:
        """Train so many steps; the first `warm` of them do not count."""
        for number in range(self.job.slots):
            self._wave(0.0, number)
        now = first = 0.0
        while self._step < steps:
            now, _, function, arguments = heapq.heappop(self._events)
            function(now, *arguments)
            if self._step == 0 and not first:
                first = now
        latencies = [each for step in self._latencies[warm:] for each in step]
        if not latencies:  # every request was sent before: the steps were too few
            raise ValueError(f"no request was answered in steps {warm} to {steps}; simulate more")
        busy = self._worked / (now * len(self._cpu_free))
        return Outcome(
            np.array(latencies),
            np.array(self._stalls[warm:]),
            first,
            self._num_refused,
            self._num_left,
            busy,
        )

    # -- the job

    def _wave(self, now: float, number: int) -> None:
        """Let every rank ask for the steps of a request, now or when an earlier one is answered."""
        self._missing[number] = self.job.ranks
        delays = self._rng.uniform(0, self.job.spread_seconds, self.job.ranks).tolist()
        for rank, delay in enumerate(delays):
            self._at(now + delay, self._ask, rank, number)

    def _begin_step(self, now: float) -> None:
        if self._step >= 0:
            self._stalls.append(max(0.0, now - self._step_ends))
        self._step += 1
        self._step_ends = now + self.job.step_seconds
        self._latencies.append([])
        self._lost = self.faults.lost is not None and self._step >= self.faults.at_step
        number, first = divmod(self._step, self.job.steps_per_request)
        if first == 0 and number > 0:
            self._wave(now, number - 1 + self.job.slots)
        self._at(self._step_ends, self._next_step)

    def _next_step(self, now: float) -> None:
        """Begin the next step once its time has come and nobody lacks its batch."""
        if now >= self._step_ends and not self._missing[(self._step + 1) // self.job.steps_per_request]:
            self._begin_step(now)

    # -- loaders

    def _ask(self, now: float, rank: int, number: int) -> None:
        loader = self._ranks[rank]
        if loader.num_on_wire < measured.IN_FLIGHT:
            loader.num_on_wire += 1
            self._send(now, _Request(rank, number, now))
        else:
            loader.waiting.append(number)

    def _send(self, now: float, request: _Request, other_than: int = -1) -> None:
        """Send to the replica that answers soonest; those that failed come last, when their time is over."""
        loader = self._ranks[request.rank]
        best, at, latency = -1, np.inf, np.inf
        for replica in loader.order:
            free_at = max(now, loader.avoid_until[replica])
            if replica != other_than and (free_at, loader.latency[replica]) < (at, latency):
                best, at, latency = replica, free_at, loader.latency[replica]
        self._at(at + ROUND_TRIP_SECONDS / 2, self._arrive, request, best, at)

    def _fail(self, now: float, request: _Request, replica: int, seconds: float) -> None:
        """Leave a replica alone and ask again."""
        self._ranks[request.rank].avoid_until[replica] = now + seconds
        if not request.done:
            self._send(now, request)

    def _late(self, now: float, request: _Request, replica: int) -> None:
        """Ask another replica: this one was silent for too long."""
        if not request.done and not request.moved and self.cluster.replicas > 1:
            request.moved = True
            self._num_left += 1
            self._ranks[request.rank].avoid_until[replica] = now + measured.STALL_SECONDS
            self._send(now, request, other_than=replica)

    def _receive(self, now: float, request: _Request, replica: int, sent_at: float) -> None:
        loader = self._ranks[request.rank]
        loader.latency[replica] = now - sent_at
        if request.done:
            return
        request.done = True
        self._latencies[-1].append(now - request.sent_at)
        loader.num_on_wire -= 1
        if loader.waiting:
            self._ask(now, request.rank, loader.waiting.popleft())
        self._missing[request.number] -= 1
        if not self._missing[request.number]:
            if self._step < 0 and request.number == 0:
                self._begin_step(now)
            else:
                self._next_step(now)

    # -- replicas

    def _arrive(self, now: float, request: _Request, replica: int, sent_at: float) -> None:
        if replica == 0 and self._lost:
            self._lose(now, request, sent_at)
            return
        process = self._ranks[request.rank].homes[replica]
        if self._slots[process] >= self.cluster.slots:
            self._num_refused += 1
            self._at(now + ROUND_TRIP_SECONDS / 2, self._fail, request, replica, measured.RETRY_AFTER_SECONDS)
            return
        self._slots[process] += 1
        late_at = sent_at + measured.STALL_SECONDS
        if replica < self.faults.cold and self._step >= self.faults.at_step:
            factor = self.faults.disk_factor if replica == 0 else 1.0
            seconds = self.job.request_bytes * factor / measured.COLD_BYTES_PER_SECOND
            ready = self._disk_free[replica] = max(now, self._disk_free[replica]) + seconds
            if ready > late_at:
                self._at(late_at, self._late, request, replica)
            self._at(ready, self._work, request, replica, sent_at)
        else:
            self._work(now, request, replica, sent_at)

    def _lose(self, now: float, request: _Request, sent_at: float) -> None:
        """A request meets a replica that is gone."""
        if self.faults.lost == KILLED:
            # No new connection can be opened: the loader does not come back in the time that is simulated.
            self._at(now + ROUND_TRIP_SECONDS / 2, self._fail, request, 0, 1e9)
        else:
            self._at(max(now, sent_at + measured.STALL_SECONDS), self._fail, request, 0, 1e9)

    def _work(self, now: float, request: _Request, replica: int, sent_at: float) -> None:
        process = self._ranks[request.rank].homes[replica]
        seconds = self._draw()
        self._worked += seconds
        if self._host is not None:
            then = lambda now: self._transfer(now, request, replica, sent_at)  # noqa: E731
            self._host.submit(now, ("server", process), seconds, then)
            return
        done = self._cpu_free[process] = max(now, self._cpu_free[process]) + seconds
        if done > sent_at + measured.STALL_SECONDS:
            self._at(max(now, sent_at + measured.STALL_SECONDS), self._late, request, replica)
        self._at(done, self._transfer, request, replica, sent_at)

    def _transfer(self, now: float, request: _Request, replica: int, sent_at: float) -> None:
        self._slots[self._ranks[request.rank].homes[replica]] -= 1
        if replica == 0 and self._lost:
            self._lose(now, request, sent_at)
            return
        seconds = self.job.request_bytes / self.cluster.link_bytes_per_second
        sent = self._link_free[replica] = max(now, self._link_free[replica]) + seconds
        there = sent + ROUND_TRIP_SECONDS / 2
        if self._host is None:
            self._at(there + self.cluster.client_seconds, self._receive, request, replica, sent_at)
        else:
            then = lambda now: self._receive(now, request, replica, sent_at)  # noqa: E731
            client = ("client", request.rank % self.cluster.clients)
            self._host.submit(now, client, self.cluster.client_seconds, then)

    # -- the machinery

    def _draw(self) -> float:
        """Return the CPU time of the next response."""
        for seconds in self._draws:
            return seconds
        middle = np.log(self._mean) - measured.SPREAD**2 / 2  # so that the mean is right
        self._draws = iter(self._rng.lognormal(middle, measured.SPREAD, 10_000).tolist())
        return next(self._draws)

    def _at(self, time: float, function: Callable[..., None], *arguments: object) -> None:
        """Call a function with the time and the arguments, at that time."""
        self._num_events += 1  # breaks ties: functions cannot be compared
        heapq.heappush(self._events, (time, self._num_events, function, arguments))
