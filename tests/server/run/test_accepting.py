"""How workers share the connections that come to one socket."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import uvloop

from corpus_server.run.accepting import Acceptor
from tests.conftest import ServedCorpus
from tests.serving import RunningServer, wait_until

WORKERS = 4
AT_ONCE = 16


class Sharing:
    """Acceptors in one event loop, as workers share a socket; each has some connections already.

    Attributes:
        taken: the acceptor of each new connection, in the order in which they were taken.
    """

    def __init__(self, stack: ExitStack, had: list[int]) -> None:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = listener.getsockname()
        self.taken: list[int] = []
        for number, count in enumerate(had):
            its = self._connections(number, count)
            acceptor = Acceptor(listener.dup(), self._protocol(number), None, its, shares=len(had) > 1)
            stack.callback(acceptor.close)

    def _connections(self, number: int, had: int) -> Callable[[], int]:
        return lambda: had + self.taken.count(number)

    def _protocol(self, number: int) -> Callable[[], asyncio.Protocol]:
        def connect() -> asyncio.Protocol:
            self.taken.append(number)
            return asyncio.Protocol()

        return connect

    async def open(self, stack: ExitStack, count: int) -> None:
        """Open connections at once; wait until all are taken."""
        wanted = len(self.taken) + count
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(self.address)
        while len(self.taken) < wanted:
            await asyncio.sleep(0.001)


def shared(had: list[int], count: int) -> list[int]:
    """Return the acceptors of connections that are opened at once."""

    async def run() -> list[int]:
        with ExitStack() as stack:
            sharing = Sharing(stack, had)
            await sharing.open(stack, count)
            return sharing.taken

    return uvloop.run(run())


def test_connections_that_come_at_once_are_spread_over_all_workers() -> None:
    counts = Counter(shared([0] * WORKERS, AT_ONCE))
    assert counts.keys() == set(range(WORKERS))
    assert max(counts.values()) <= AT_ONCE // WORKERS + 1


def test_the_worker_with_fewer_connections_takes_the_next_one() -> None:
    assert shared([0, 4], 1) == [0]
    assert shared([4, 0], 1) == [1]


def test_a_worker_of_many_connections_still_takes_all_that_wait() -> None:
    assert len(shared([300, 300], 100)) == 100


def test_a_worker_that_shares_with_nobody_takes_all_at_once() -> None:
    assert shared([1000], 50) == [0] * 50


def test_sixteen_connections_at_once_reach_all_workers_of_a_server(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    """A worker that the machine gives no time takes none: a few tries, of which one must be spread."""
    with RunningServer({"web": corpora["web"].path}, tmp_path, workers=WORKERS) as server:
        worst = []
        for _ in range(8):
            with ExitStack() as stack:
                clients = [stack.enter_context(socket.socket()) for _ in range(AT_ONCE)]
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", server.port))
                for client in clients:
                    client.setblocking(True)
                    client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert client.recv(9) == b"HTTP/1.1 "
                own = {client.getsockname()[1] for client in clients}
                worst.append(max(Counter(holders(server, own)).values()))
            if worst[-1] <= AT_ONCE // 2:
                return
        pytest.fail(f"one of {WORKERS} workers took {worst} of {AT_ONCE} connections")


def holders(server: RunningServer, ports: set[int]) -> list[int]:
    """Return the worker of each of the connections from these ports."""
    found = [
        pid
        for pid in server.worker_pids()
        for each in psutil.Process(pid).net_connections("tcp")
        if each.raddr and each.raddr.port in ports
    ]
    assert len(found) == len(ports)
    return found


def test_connections_wait_while_there_are_no_descriptors(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path) as server, socket.socket() as client:
        pid = server.worker_pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(lambda: "connections cannot be taken: Too many open files" in server.log())
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        assert server.log().count("connections cannot be taken") == 1
