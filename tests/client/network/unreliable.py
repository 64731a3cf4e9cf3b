"""Replicas that fail by a seed, and a run of the client's fetcher against them, in simulated time."""

from __future__ import annotations

import logging
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import xxhash

from corpus_client import errors
from corpus_client.network.control import BoundPlan
from corpus_client.network.options import Network
from corpus_client.network.replica import BACKOFF_LAST_SECONDS
from corpus_client.network.replicas import Replicas
from corpus_client.observe.recorder import Recorder
from corpus_client.plan.requests import StepRequests
from corpus_client.plan.schedule import StepRange
from corpus_client.staging.fetcher import FetchRange, FilledSlot, SlotQueues, fetch
from corpus_client.staging.slots import Slot
from tests.client.network.simulation import PORT, START_SECONDS, Socket, World, simulated

PLAN_ID = 64 * "a"
PLAN = BoundPlan(plan_id=PLAN_ID, document={}, dtype="uint16", shards=(), stages=(), eot_id=None)
STEP_BYTES = 8  # one row of a window of four uint16

TARGET = re.compile(
    rb"GET /v1/batches\?plan=(\w+)&step=(\d+)&count=(\d+)&rank=0&world_size=1&.* HTTP/1.1\r\n"
)

FAULTS = (
    *("cut", "reset", "hang-up", "flip", "checksum", "other-step", "other-plan", "pause", "hang"),
    *("late", "busy", "error", "unknown-plan", "nonsense", "close"),
)


def tokens_of(step: int) -> bytes:
    """Return the tokens of a step: its number, hashed."""
    return xxhash.xxh3_64_digest(step.to_bytes(8, "little"))


@dataclass
class Server:
    """One replica.

    Args:
        fault_share: of the requests that meet a fault of their own.
        faults: which ones.
        up_seconds, away_seconds: mean length of the times in which it works, and does not.
        away: what it does then: "refuse" connections and break what is open, swallow packets ("hole"), or
            accept and answer nothing ("hang").
        seconds: to answer.
        impostor: whether it comes back with another plan, once it was away.
    """

    world: World
    random: random.Random
    fault_share: float
    faults: tuple[str, ...]
    up_seconds: float
    away_seconds: float
    away: str
    seconds: float
    impostor: bool
    healed_at: float = inf
    knows_plan: bool = False
    num_faults: int = 0
    num_requests: int = 0
    away_times: list[tuple[float, float]] = field(default_factory=list)
    num_restarts: int = 0

    def away_time(self, now: float) -> tuple[float, float]:
        """Return when it is away: the time that this moment lies in, or the next one."""
        if self.up_seconds == inf:
            return inf, inf
        while not self.away_times or self.away_times[-1][1] <= now:
            last = self.away_times[-1][1] if self.away_times else START_SECONDS
            start = last + self.random.expovariate(1 / self.up_seconds)
            self.away_times.append((start, start + self.random.expovariate(1 / self.away_seconds)))
        number = bisect_right(self.away_times, now, key=lambda each: each[1])
        if number != self.num_restarts and self.away == "refuse":
            self.knows_plan = False
        self.num_restarts = number
        start, stop = self.away_times[number]
        stop = min(stop, self.healed_at)
        return (start, stop) if start < stop and now < stop else (inf, inf)

    def away_until(self, now: float) -> float:
        """Return when it works (again)."""
        start, stop = self.away_time(now)
        return now if now < start else stop

    def accepts_at(self, now: float) -> float | None:
        """See `Peer`."""
        back = self.away_until(now)
        if back <= now or self.away == "hang":
            return now
        return None if self.away == "refuse" else back

    def breaks_at(self, now: float) -> float:
        """See `Peer`."""
        return self.away_time(now)[0] if self.away == "refuse" else inf

    def post_plan(self) -> str:
        """Answer the control plane: the id of the plan."""
        self.knows_plan = True
        return 64 * "b" if self.impostor and self.num_restarts else PLAN_ID

    def response(self, request: bytes, begin: float) -> tuple[list[tuple[float, bytes]], float, bool]:
        """See `Peer`."""
        found = TARGET.match(request)
        assert found is not None, f"not a request for batches: {request!r}"
        assert request.endswith(b"\r\n\r\n"), f"cut: {request!r}"
        assert found[1] == PLAN_ID.encode()
        step, count = int(found[2]), int(found[3])
        self.num_requests += 1
        now = self.away_until(begin) + self.seconds
        fault = ""
        if self.random.random() < self.fault_share and now < self.healed_at:
            fault = self.random.choice(self.faults)
            self.num_faults += 1
        if fault == "unknown-plan" or not self.knows_plan:
            self.knows_plan = False
            return [(now, problem(404, "unknown-plan"))], inf, False
        match fault:
            case "busy":
                after = self.random.choice(("1", "3", "0", "Wed, 21 Oct 2026 07:28:00 GMT"))
                return [(now, problem(503, "overloaded", f"Retry-After: {after}\r\n"))], inf, False
            case "error":
                return [(now, problem(500, "internal-error"))], inf, False
            case "hang-up":
                return [], now, self.random.random() < 0.5
            case "hang":
                return [], inf, False
            case "nonsense":
                return [(now, b"SSH-2.0-OpenSSH_9.2\r\n")], now, False
            case "late":
                now += self.random.choice((0.05, 0.3, 2.0, 20.0))
            case "slow":
                now += 1.0
        first = step + (fault == "other-step")
        body = b"".join(map(tokens_of, range(first, first + count)))
        tail = xxhash.xxh3_64_digest(body)
        if fault == "flip":
            at = self.random.randrange(len(body))
            body = body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]
        elif fault == "checksum":
            tail = bytes(8)
        plan = 64 * "c" if fault == "other-plan" else PLAN_ID
        close = "Connection: close\r\n" if fault == "close" else ""
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) + 8}\r\nCorpus-Shape: {count},1,4\r\n"
            f"Corpus-Dtype: uint16\r\nCorpus-Plan: {plan}\r\nCorpus-Checksum: xxh3-64=tail\r\n{close}"
            f'ETag: "{plan}.batches.{first}.{count}.0.1.raw+tail"\r\n\r\n'
        )
        whole = head.encode() + body + tail
        if fault in ("cut", "reset", "pause"):
            part = self.random.randrange(len(whole))
            if fault == "pause":
                late = now + self.random.choice((0.5, 3.0, 40.0))
                return [(now, whole[:part]), (late, whole[part:])], inf, False
            return [(now, whole[:part])], now + 1e-6, fault == "reset"
        return [(now, whole)], now + 1e-6 if fault == "close" else inf, False


def problem(status: int, slug: str, headers: str = "") -> bytes:
    """Return a problem document as a whole response."""
    body = f'{{"type": "{slug}", "detail": "simulated"}}'
    return (
        f"HTTP/1.1 {status} No\r\nContent-Type: application/problem+json\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n{body}"
    ).encode()


class Control:
    """The control plane of a simulated server; what is asked takes a round trip, or the connect timeout."""

    def __init__(self, endpoint: Any, network: Network) -> None:
        self.endpoint = endpoint
        self._timeout = network.connect_seconds

    def ask(self, _: object) -> str:
        """Make the plan known."""
        world: World = Socket.world
        server = world.peers[self.endpoint.address[1][0]]
        assert isinstance(server, Server)
        until, back = world.now + self._timeout, server.away_until(world.now)
        if back > world.now and server.away == "refuse":
            raise errors.ConnectionFailed(f"{self.endpoint.name}: refused")
        world.wait_until(min(until, back + 0.001))
        if back >= until:
            raise errors.NoProgress(f"{self.endpoint.name}: no response in time")
        return server.post_plan()

    def close(self) -> None:
        """Nothing is open."""


class TimedSource(StepRequests):
    """Notes how long each response was waited for, in simulated seconds."""

    world: World
    longest: float = 0.0
    last: float = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        receive = self.finish

        def finish(ticket: Any, view: memoryview) -> None:
            started = self.world.now
            try:
                receive(ticket, view)
            finally:
                self.last = self.world.now - started
                self.longest = max(self.longest, self.last)

        self.finish = finish  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run did, in simulated seconds."""

    num_batches: int
    num_faults: int
    num_requests: int
    num_retries: int
    num_hedged: int
    num_errors: int
    num_connections: int
    seconds: float
    longest_seconds: float


def draw_servers(world: World, draw: random.Random) -> list[Server]:
    """Return one to four replicas; the first of several may be one that never fails."""
    servers = []
    for number in range(draw.randint(1, 4)):
        faulty = draw.random() < 0.8
        server = Server(
            world=world,
            random=random.Random(draw.random()),
            fault_share=draw.choice((0.001, 0.02, 0.2, 0.9)) if faulty else 0.0,
            faults=tuple(draw.sample(FAULTS, draw.randint(1, len(FAULTS)))),
            up_seconds=draw.choice((1.0, 30.0, 600.0)) if draw.random() < 0.5 else inf,
            away_seconds=draw.choice((0.1, 5.0, 60.0)),
            away=draw.choice(("refuse", "hole", "hang")),
            seconds=draw.choice((0.0005, 0.005, 0.05)),
            impostor=number > 0 and draw.random() < 0.1,
        )
        world.peers[f"10.0.0.{number + 1}"] = server
        servers.append(server)
    return servers


def run(seed: int, num_batches: int, change: Callable[[Run], None] = lambda _: None) -> Report:
    """Fetch so many batches from replicas that fail; the last fifth comes after all of them were healed.

    Args:
        change: is called with what was drawn, before it begins.

    Raises:
        AssertionError: a promise was broken; the message begins with the seed.
    """
    world = World(seed)
    log = logging.getLogger("corpus_client")
    state, log.disabled = random.getstate(), True  # a million lines of failures that were asked for
    random.seed(seed)  # the client's own jitter
    try:
        with simulated(world, Control):
            drawn = Run(world, seed, num_batches)
            change(drawn)
            return drawn.report()
    except BaseException as error:
        raise AssertionError(
            f"seed {seed}, {num_batches} batches, at {world.now:.3f} s: {error!r}"
        ) from error
    finally:
        random.setstate(state)
        log.disabled = False


class Run:
    """One run: a training loop in this thread, the fetcher in another."""

    def __init__(self, world: World, seed: int, num_batches: int) -> None:
        draw = world.random
        self.world = world
        self.servers = draw_servers(world, draw)
        self.network = Network(
            deadline_seconds=draw.choice((2.0, 20.0, 120.0)),
            progress_seconds=draw.choice((1.0, 30.0)),
            in_flight=draw.randint(1, 4),
        )
        self.steps_per_slot = draw.choice((1, 2, 8))
        self.step_seconds = draw.choice((0.0, 0.0, 0.001, 0.02))  # of the training loop
        self.by_name = draw.random() < 0.5  # instead of by the address of each
        self.num_listings = 0
        world.listed = self._listed
        self.num_batches = num_batches
        self.step = self.num_errors = self.num_retries = self.num_hedged = 0
        self.longest = 0.0
        self.healed = False

    def report(self) -> Report:
        """Run until every batch came."""
        started = self.world.now
        while self.step < self.num_batches:
            self._fetch_until_error()
            self.world.drain()
            assert self.world.num_open == 0, f"{self.world.num_open} sockets stay open"
        self._check_attempts(self.world.now - started)
        return Report(
            num_batches=self.step,
            num_faults=sum(each.num_faults for each in self.servers),
            num_requests=sum(each.num_requests for each in self.servers),
            num_retries=self.num_retries,
            num_hedged=self.num_hedged,
            num_errors=self.num_errors,
            num_connections=self.world.num_sockets,
            seconds=self.world.now - started,
            longest_seconds=self.longest,
        )

    def _fetch_until_error(self) -> None:
        world, network = self.world, self.network
        hosts = ["corpus"] if self.by_name else world.peers
        replicas = Replicas([f"http://{host}:{PORT}" for host in hosts], network, plan=PLAN)
        filler = TimedSource(replicas, PLAN)
        filler.world = world
        slot_bytes = self.steps_per_slot * STEP_BYTES
        storages = [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(network.in_flight + 2)]
        slots = [Slot(view=memoryview(storage.numpy().data), storage=storage) for storage in storages]
        queues = SlotQueues(slots, filler, Recorder())
        steps = FetchRange(
            step_ranges=(StepRange(start_step=0, stop_step=None, shape=(1, 4)),),
            dtype=torch.uint16,
            start_step=self.step,
            end_step=self.num_batches,
            slot_bytes=slot_bytes,
            in_flight=network.in_flight,
        )
        world.start(lambda: fetch(queues, steps))
        limit = network.deadline_seconds
        try:
            while queues.await_ready(None) and (filled := queues.take_ready()) is not None:
                self._take(filled)
                queues.put_free(filled.slot)
            queues.check_end()
        except errors.DeadlineExceeded:
            assert filler.last >= 0.95 * limit, f"gave up after {filler.last:.2f} s of {limit:g}"
            assert not self.healed or self.world.now < self.servers[0].healed_at + 1.1 * limit
            self.num_errors += 1
        finally:
            self.longest = max(self.longest, filler.longest)
            self.num_retries += replicas.recorder.num_retries
            self.num_hedged += replicas.recorder.num_hedged
            queues.stop()
        assert filler.longest <= 1.1 * limit + 0.1, f"waited for {filler.longest:.2f} s, not {limit:g}"
        assert world.most_open <= (network.in_flight + 1) * len(self.servers), f"{world.most_open} sockets"

    def _listed(self) -> Collection[str]:
        """Return what the name stands for: replicas come and go, the first is always there."""
        self.num_listings += 1
        first, *others = self.world.peers
        return [first, *(each for each in others if self.healed or self.world.random.random() < 0.5)]

    def _take(self, filled: FilledSlot) -> None:
        """Check a slot as the training loop would use it."""
        assert filled.start_step == self.step, f"step {filled.start_step} came for {self.step}"
        got = bytes(filled.slot.view[: filled.num_steps * STEP_BYTES])
        right = b"".join(map(tokens_of, range(self.step, self.step + filled.num_steps)))
        assert got == right, f"wrong tokens in steps {self.step} to {self.step + filled.num_steps - 1}"
        self.step += filled.num_steps
        if self.step_seconds:
            self.world.wait_until(self.world.now + self.step_seconds * filled.num_steps)
        if not self.healed and self.step >= 0.8 * self.num_batches:
            self.healed = True
            for server in self.servers:
                server.healed_at = self.world.now

    def _check_attempts(self, seconds: float) -> None:
        """Connections are asked for after faults, and else only as often as back-off allows."""
        num_faults = sum(each.num_faults + each.num_restarts for each in self.servers)
        for address, attempts in self.world.num_attempts.items():
            # A request that failed elsewhere may need a second connection here.
            reasons = num_faults + self.num_listings + 8 * (1 + self.num_errors)
            allowed = 4 * reasons + 2 * seconds / BACKOFF_LAST_SECONDS
            assert attempts <= allowed, (
                f"{address} was connected to {attempts} times in {seconds:.0f} s, with {num_faults} faults"
            )
