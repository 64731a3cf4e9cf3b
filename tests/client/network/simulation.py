"""A simulated clock, threads and sockets, on which the client's network half runs unchanged.

The client modules get these in place of `time`, `threading`, `socket` and `selectors` (`simulated`). One
thread runs at a time: a thread that would wait gives its turn to the thread that is due next, and the clock
jumps to that moment. So hours pass in seconds, and one seed always gives the same run.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from corpus_client.network import pool, replicas, transport
from corpus_client.network.endpoint import Address, Endpoint
from corpus_client.staging import fetcher

PORT = 8000
START_SECONDS = 1000.0
ROUND_TRIP_SECONDS = 0.0002
SEND_SECONDS = 1e-4
LOOK_UP_SECONDS = 0.001
BETWEEN_LOOK_UPS_SECONDS = 0.05
"""So that a run of seconds sees hundreds."""
TICK_SECONDS = 1e-7
"""Seconds that asking for the time takes; without it, a loop that only asks for the time would never end."""


class Peer(Protocol):
    """What a simulated socket asks of the server at its other end."""

    def accepts_at(self, now: float) -> float | None:
        """Return when a connection asked for now is accepted; None: it is refused."""

    def breaks_at(self, now: float) -> float:
        """Return when a connection that is open now is reset."""

    def response(self, request: bytes, begin: float) -> tuple[list[tuple[float, bytes]], float, bool]:
        """Return what comes back and when, when the connection ends after it, and whether by a reset."""


class _Task:
    """A thread of the simulation; `entry` is its valid place in the queue of turns."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.entry = -1


class World:
    """The clock and the queue of turns.

    Attributes:
        peers: servers by address.
        listed: returns the addresses that a name has now; else those of all peers.
        num_open, most_open: sockets that are open, and the most that were.
        num_sockets: that were opened altogether.
        num_attempts: to connect, by address.
        num_threads: threads that were started and have not ended.
    """

    def __init__(self, seed: int) -> None:
        self.now = START_SECONDS
        self.random = random.Random(seed)
        self.peers: dict[str, Peer] = {}
        self.listed: Callable[[], Collection[str]] = lambda: self.peers
        self.num_open = self.most_open = self.num_sockets = self.num_threads = 0
        self.num_attempts: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, _Task]] = []
        self._main = self.running = _Task()
        self.failure: BaseException | None = None

    def monotonic(self) -> float:
        """Return the time."""
        self.now += TICK_SECONDS
        return self.now

    def look_up(self) -> list[Address]:
        """Return the addresses of the only name that there is."""
        self.wait_until(self.now + LOOK_UP_SECONDS)
        return [(socket.AF_INET, (address, PORT)) for address in self.listed()]

    def wait_until(self, when: float) -> None:
        """Let the others run until then, or until `wake` is called for this thread."""
        me = self.running
        self._queue(me, when)
        self._pass_on(me)

    def wake(self, task: _Task) -> None:
        """Let a waiting thread go on."""
        self._queue(task, self.now)

    def start(self, target: Callable[[], None]) -> None:
        """Run a function in a thread of the simulation."""
        task = _Task()

        def run() -> None:
            task.turn.acquire()
            try:
                target()
            except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
                self.failure = error
            self.num_threads -= 1
            self._pass_on(None)

        self.num_threads += 1
        self._queue(task, self.now)
        threading.Thread(target=run, daemon=True).start()

    def drain(self) -> None:
        """Wait until all threads have ended."""
        until = self.now + 1000.0
        while self.num_threads and self.now < until:
            self.wait_until(self.now + 0.1)
        assert not self.num_threads, f"{self.num_threads} threads go on for ever"

    def _queue(self, task: _Task, when: float) -> None:
        task.entry = next(self._numbers)
        heappush(self._due, (max(when, self.now), task.entry, task))

    def _pass_on(self, me: _Task | None) -> None:
        while True:
            when, entry, task = heappop(self._due)
            if task.entry == entry:
                break
        if when == inf and self.failure is None:
            self.failure = AssertionError("a deadlock: every thread waits for ever")
        if self.failure is not None:
            task = self._main
        else:
            self.now = max(self.now, when)
        if task is not me:
            self.running = task
            task.turn.release()
            if me is not None:
                me.turn.acquire()
        if self.failure is not None and me is self._main:
            raise self.failure


class Condition:
    """`threading.Condition` where one thread runs at a time: the lock is always free."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[_Task] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        """Wake everybody."""
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `notify_all`."""
        me = self._world.running
        self._waiting.append(me)
        self._world.wait_until(inf if timeout is None else self._world.now + timeout)
        if me in self._waiting:
            self._waiting.remove(me)
            return False
        return True

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the predicate holds."""
        until = inf if timeout is None else self._world.now + timeout
        while not predicate() and self._world.now < until:
            self.wait(until - self._world.now)
        return predicate()


class Socket:
    """A TCP socket of the client, as far as the client uses it."""

    world: World  # set by `simulated`

    def __init__(self, *_: object) -> None:
        self._timeout: float = inf
        self._wait: float = inf  # SO_RCVTIMEO
        self._peer: Peer | None = None
        self._parts: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0  # when the response before is out
        self._ends_at, self._reset = inf, False
        self._shut = self._closed = False
        self.user: _Task | None = None
        self.world.num_sockets += 1
        self.world.num_open += 1
        self.world.most_open = max(self.world.most_open, self.world.num_open)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = inf if seconds is None else seconds

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        if (level, name) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            whole, micro = struct.unpack("ll", value)
            self._wait = whole + micro / 1e6

    def connect(self, address: tuple[str, int]) -> None:
        world = self.world
        peer = world.peers[address[0]]
        world.num_attempts[address[0]] += 1
        started, accepted = world.now, peer.accepts_at(world.now)
        until = started + self._timeout
        self._sleep(min(until, (started if accepted is None else accepted) + ROUND_TRIP_SECONDS))
        if self._shut:
            raise ConnectionAbortedError("shut down")
        if accepted is None or peer.accepts_at(world.now) is None:
            raise ConnectionRefusedError("refused")
        if world.now >= until:
            raise TimeoutError("timed out")
        self._peer = peer
        self._ends_at, self._reset = peer.breaks_at(world.now), True

    def sendall(self, data: bytes) -> None:
        self._sleep(self.world.now + SEND_SECONDS)
        if self._shut or self.world.now >= self._ends_at:
            raise BrokenPipeError("the other side has closed the connection")
        assert self._peer is not None
        begin = max(self.world.now, self._free_at)
        if begin >= self._ends_at:
            return  # the server reads no more of this connection
        parts, end, reset = self._peer.response(data, begin)
        if end < self._ends_at:
            self._ends_at, self._reset = end, reset
        self._parts += [part for part in parts if part[0] < self._ends_at]
        self._free_at = max([begin, *(when for when, _ in parts)])

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        world, size, num_bytes = self.world, size or len(buffer), 0
        until = world.now + (0 if flags & socket.MSG_DONTWAIT else min(self._timeout, self._wait))
        while True:
            while self._parts and self._parts[0][0] <= world.now and num_bytes < size:
                when, data = self._parts.popleft()
                taken = data[: size - num_bytes]
                buffer[num_bytes : num_bytes + len(taken)] = taken
                num_bytes += len(taken)
                if len(taken) < len(data):
                    self._parts.appendleft((when, data[len(taken) :]))
            if num_bytes == size or (num_bytes and not flags & socket.MSG_WAITALL):
                return num_bytes
            if self._shut or (world.now >= self._ends_at and not self._parts):
                if num_bytes or self._shut or not self._reset:
                    return num_bytes
                raise ConnectionResetError("reset by peer")
            if world.now >= until:
                if num_bytes:
                    return num_bytes
                raise BlockingIOError("timed out")
            self._sleep(min(until, self.changes_at()))

    def fileno(self) -> Socket:
        return self

    def changes_at(self) -> float:
        """Return when something can be read."""
        if self._shut:
            return self.world.now
        return min(self._ends_at, self._parts[0][0] if self._parts else inf)

    def shutdown(self, _: int) -> None:
        self._shut = True
        if self.user is not None:
            self.world.wake(self.user)

    def close(self) -> None:
        if self.user not in (None, self.world.running):
            # The kernel may give the number of a closed socket to the next one: the user would read that one.
            self.world.failure = AssertionError("a socket was closed under the thread that uses it")
        if not self._closed:
            self._closed = self._shut = True
            self.world.num_open -= 1

    def _sleep(self, until: float) -> None:
        self.user = self.world.running
        self.world.wait_until(until)
        self.user = None


class Selector:
    """`selectors.PollSelector` over simulated sockets."""

    def __init__(self) -> None:
        self._sockets: list[tuple[Socket, Any]] = []

    def __enter__(self) -> Selector:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def register(self, connection: Socket, _: int, data: Any) -> None:
        self._sockets.append((connection, data))

    def select(self, seconds: float) -> list[tuple[SimpleNamespace, int]]:
        world = Socket.world
        until = world.now + seconds
        while not (came := [data for each, data in self._sockets if each.changes_at() <= world.now]):
            if world.now >= until:
                return []
            for each, _ in self._sockets:
                each.user = world.running
            world.wait_until(min([until, *(each.changes_at() for each, _ in self._sockets)]))
            for each, _ in self._sockets:
                each.user = None
        return [(SimpleNamespace(data=data), 1) for data in came]


@contextmanager
def simulated(world: World, control_plane: Callable[..., Any]) -> Iterator[None]:
    """Put the world's clock, threads and sockets where the client's network half looks for the real ones."""
    Socket.world = world
    clock = SimpleNamespace(monotonic=world.monotonic)
    names = {name: getattr(socket, name) for name in dir(socket) if name.isupper() or "_" in name}
    sockets = SimpleNamespace(**{**names, "socket": Socket})

    def thread(target: Callable[[], None], **_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: world.start(target))

    threads = SimpleNamespace(Condition=lambda: Condition(world), Thread=thread)
    with pytest.MonkeyPatch.context() as patch:
        for module in (pool, replicas, transport):
            patch.setattr(module, "time", clock)
        for name, value in (
            ("socket", sockets),
            ("selectors", SimpleNamespace(PollSelector=Selector, SelectSelector=Selector, EVENT_READ=1)),
        ):
            patch.setattr(transport, name, value)
        patch.setattr(pool, "threading", threads)
        patch.setattr(fetcher, "threading", threads)
        patch.setattr(pool, "HttpClient", control_plane)
        patch.setattr(pool, "LOOKUP_SECONDS", BETWEEN_LOOK_UPS_SECONDS)
        patch.setattr(
            Endpoint, "resolve", lambda name: [replace(name, address=each) for each in world.look_up()]
        )
        yield
