"""Drive many keep-alive connections from one lean client, in a process of its own.

One thread, epoll, and one buffer that all bodies are received into: 40 microseconds of Python an answer.
Threads would cost a wake-up each, and asyncio copies every body; either would take the cores from the server.
Each connection's first answer is hashed, so that the axis can compare it with the corpus.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import select
import socket
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import xxhash

from scripts.benchmarks.cpu import cpu_seconds
from scripts.processes import HOST, output_of

_BUFFER_BYTES = 1 << 20
_TURN_SECONDS = 0.05
_ACCEPT_SECONDS = 0.2  # until the server has taken up a thousand connections; requests are timed, not those


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Say what to ask for.

    Args:
        port: of the server.
        path: of a request, without the number of the step at its end.
        connections: each has one request in flight; connection k of n asks for steps k, k + n, k + 2n...
        seconds: how long the clock runs at least.
        warm: start the clock when every connection has had an answer, and stop it when each has had another,
            so that no connection's wait is left out; otherwise start at once and stop in time.
        pause_seconds: between an answer and the next request of its connection.
        answers: of each connection, instead of `seconds`.
        pids: processes whose CPU time is counted.
    """

    port: int
    path: str
    connections: int
    seconds: float = 1.0
    warm: bool = True
    pause_seconds: float = 0.0
    answers: int | None = None
    pids: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Driven:
    """Say what came.

    Args:
        seconds, num_bytes, cpu_seconds: while the clock ran; CPU of the client and `pids`.
        num_answers: complete answers of status 200, from the beginning.
        num_refused: answers of status 503; their requests are repeated.
        p50_ms, p99_ms: of complete answers while the clock ran.
        digests: (step, hash of the body) of every connection's first answer.
    """

    seconds: float
    num_bytes: int
    cpu_seconds: float
    num_answers: int
    num_refused: int
    p50_ms: float
    p99_ms: float
    digests: list[tuple[int, str]]


def drive(load: Load) -> Driven:
    """Run the client over a load and return what it saw."""
    given = json.dumps(dataclasses.asdict(load)).encode()
    seen = json.loads(output_of(["-m", "scripts.benchmarks.drive"], stdin=given))
    return Driven(**{**seen, "digests": [(step, digest) for step, digest in seen["digests"]]})


class _Connection:
    """Hold one connection and the answer that it waits for."""

    def __init__(self, port: int, path: str, step: int) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.step = step
        self.num_answers = 0
        self.digest: xxhash.xxh3_64 | None = xxhash.xxh3_64()
        self._path = path
        self._head = b""
        self._left: int | None = None
        self._status = 0
        self._asked_at = 0.0

    def ask(self) -> None:
        """Send the request; a few hundred bytes always fit an idle connection's buffer."""
        self._asked_at = time.perf_counter()
        self.socket.send(f"GET {self._path}{self.step} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())

    def receive(self, buffer: memoryview) -> tuple[int, int, float]:
        """Receive: (body bytes, status or 0 while the answer is incomplete, seconds since the request)."""
        received = self.socket.recv_into(buffer)
        if not received:
            raise SystemExit(f"the server closed a connection that waited for step {self.step}")
        body = buffer[:received]
        if self._left is None:
            self._head += bytes(body)
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return 0, 0, 0.0
            self._begin(head)
            body = memoryview(rest)
        assert self._left is not None
        self._left -= len(body)
        if self.digest is not None and self._status == 200:
            self.digest.update(body)
        if self._left:
            return len(body), 0, 0.0
        self._left = None
        return len(body), self._status, time.perf_counter() - self._asked_at

    def _begin(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self._status = int(lines[0].split()[1])
        fields = dict(line.lower().split(": ", 1) for line in lines[1:])
        self._left, self._head = int(fields["content-length"]), b""
        if self._status not in (200, 503):
            raise SystemExit(f"step {self.step} was answered with {lines[0]}")


class _Client:
    """Drive all connections of a load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._epoll = select.epoll()
        self._all = [_Connection(load.port, load.path, step) for step in range(load.connections)]
        self._by_fd = {each.socket.fileno(): each for each in self._all}
        for fd in self._by_fd:
            self._epoll.register(fd, select.EPOLLIN)
        # (when to ask again, a tie breaker, connection)
        self._waiting: list[tuple[float, int, _Connection]] = []
        self._numbers = itertools.count()
        self._digests: list[tuple[int, str]] = []
        self._seconds: list[float] = []
        self._num_bytes = self._num_answers = self._num_refused = 0
        self._busy = load.connections

    def run(self) -> Driven:
        """Ask until the time is over or every connection has its answers."""
        load = self._load
        time.sleep(_ACCEPT_SECONDS)
        for each in self._all:
            each.ask()
        if load.warm and load.answers is None:
            while any(each.num_answers == 0 for each in self._all):
                self._turn()
        self._num_bytes, self._seconds = 0, []
        cpu, began = cpu_seconds(load.pids), time.perf_counter()
        while time.perf_counter() - began < load.seconds if load.answers is None else self._busy:
            self._turn()
        if load.warm and load.answers is None:
            while any(each.num_answers < 2 for each in self._all):
                self._turn()
        seconds, cpu = time.perf_counter() - began, cpu_seconds(load.pids) - cpu
        p50, p99 = np.percentile(self._seconds or [float("nan")], [50, 99]).tolist()
        return Driven(
            seconds=seconds,
            num_bytes=self._num_bytes,
            cpu_seconds=cpu,
            num_answers=self._num_answers,
            num_refused=self._num_refused,
            p50_ms=p50 * 1e3,
            p99_ms=p99 * 1e3,
            digests=self._digests,
        )

    def _turn(self) -> None:
        """Receive from every connection that has something, or wait a moment."""
        for fd, _ in self._epoll.poll(_TURN_SECONDS):
            each = self._by_fd[fd]
            num_bytes, status, seconds = each.receive(self._buffer)
            if status != 503:
                self._num_bytes += num_bytes
            if status == 200:
                self._answered(each, seconds)
            elif status == 503:
                self._num_refused += 1
                self._ask_later(each, _TURN_SECONDS)
        while self._waiting and self._waiting[0][0] <= time.perf_counter():
            heapq.heappop(self._waiting)[2].ask()

    def _answered(self, each: _Connection, seconds: float) -> None:
        self._num_answers += 1
        self._seconds.append(seconds)
        if each.digest is not None:
            self._digests.append((each.step, each.digest.hexdigest()))
        each.num_answers += 1
        each.step += self._load.connections
        each.digest = None
        if each.num_answers == self._load.answers:
            self._busy -= 1
        elif self._load.pause_seconds:
            self._ask_later(each, self._load.pause_seconds)
        else:
            each.ask()

    def _ask_later(self, each: _Connection, seconds: float) -> None:
        heapq.heappush(self._waiting, (time.perf_counter() + seconds, next(self._numbers), each))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_Client(Load(**json.load(sys.stdin))).run())))
