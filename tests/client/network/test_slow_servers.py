"""Servers that are slow, silent or not there at all: what they cost a loader, and an exit."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from corpus_client import CorpusLoader, errors
from corpus_client.network import control, options, pool
from corpus_client.network.options import Network
from corpus_client.network.replicas import Replicas
from corpus_client.plan.document import make_plan
from corpus_client.plan.requests import StepRequests
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import Fault, ReferenceServer
from tests.serving import ROOT

MakeLoader = Callable[..., CorpusLoader]

PLAN = make_plan(corpus="web", seq_len=16, global_batch_size=12, seed=0, order="sequential", stride=None)


def assert_exact(loader: CorpusLoader, corpus: ReferenceCorpus, num_steps: int) -> float:
    """Return the longest wait for a batch."""
    longest = 0.0
    for expected_step in range(loader.step, loader.step + num_steps):
        started = time.monotonic()
        batch = next(loader)
        longest = max(longest, time.monotonic() - started)
        assert batch.step == expected_step
        assert np.array_equal(batch.tokens.numpy(), tokens_of_step(corpus, loader.plan, batch.step))
    return longest


class Reader:
    """The loader's fetcher without the loader: one step per request, two on the wire."""

    def __init__(self, urls: list[str], network: Network | None = None) -> None:
        with Replicas(urls, network) as replicas:
            plan = replicas.bind(PLAN)
        self.document = plan.document
        self.replicas = Replicas(urls, network, plan=plan)
        self._source = StepRequests(self.replicas, plan)
        self._view = memoryview(bytearray(12 * 17 * 2))
        self._next = self._source.begin(0, 1, (12, 17))
        self.step = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.replicas.close()

    def read(self, num_steps: int, corpus: ReferenceCorpus) -> list[float]:
        """Return how long each response was awaited; each is compared with the truth."""
        seconds = []
        for _ in range(num_steps):
            ticket, self._next = self._next, self._source.begin(self.step + 1, 1, (12, 17))
            started = time.monotonic()
            self._source.finish(ticket, self._view)
            seconds.append(time.monotonic() - started)
            expected = tokens_of_step(corpus, self.document, self.step)
            assert np.array_equal(np.frombuffer(self._view, np.uint16).reshape(12, 17), expected)
            self.step += 1
        return seconds


@pytest.mark.parametrize("name", ["no-such-host.invalid", f"{'x' * 64}.invalid"], ids=["unknown", "unfit"])
def test_a_host_name_that_does_not_exist_fails_by_name(name: str, make_loader: MakeLoader) -> None:
    started = time.monotonic()
    # Without any name service at all the look-up is tried three times, a second apart.
    with pytest.raises((errors.HostNotFound, errors.ConnectionFailed), match=f"the name|named '{name}'"):
        make_loader(f"http://{name}:8000", deadline_seconds=300)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_a_wrong_name_among_right_ones_fails_too(
    server: ReferenceServer, make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """However long after the first server's response the name service says that there is no such host."""
    resolve(monkeypatch, lambda: time.sleep(seconds) or [])
    with pytest.raises(errors.HostNotFound, match="named 'data'"):
        make_loader([server.url, "http://data"])


def test_a_black_holed_replica_delays_neither_the_constructor_nor_receipts(
    black_hole: str,
    server: ReferenceServer,
    corpus: ReferenceCorpus,
    make_loader: MakeLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting there takes a minute here, so that nobody who waits for it is taken for a busy machine."""
    monkeypatch.setattr(options, "CONNECT_SECONDS", 60.0)
    started = time.monotonic()
    loader = make_loader([black_hole, server.url], deadline_seconds=300)
    constructed = time.monotonic()
    assert constructed - started < 40
    assert assert_exact(loader, corpus, 50) < 40
    network = Network()
    with Replicas([black_hole, server.url], network) as replicas:
        plan = replicas.bind(PLAN)
    for _ in range(4):
        with Replicas([black_hole, server.url], network, plan=plan) as replicas:
            started = time.monotonic()
            replicas.ask(control.receipt(plan.plan_id, 7))
            assert time.monotonic() - started < 40


def test_a_name_with_a_black_holed_address_is_used_by_the_other(
    black_hole: str,
    server: ReferenceServer,
    corpus: ReferenceCorpus,
    monkeypatch: pytest.MonkeyPatch,
    make_loader: MakeLoader,
) -> None:
    monkeypatch.setattr(options, "CONNECT_SECONDS", 60.0)
    resolve(
        monkeypatch, lambda: [("127.0.0.1", int(black_hole.rpartition(":")[2])), ("127.0.0.1", server.port)]
    )
    started = time.monotonic()
    assert_exact(make_loader("http://data:1", deadline_seconds=300), corpus, 20)
    assert time.monotonic() - started < 40


def test_a_slow_replica_beside_a_fast_one_is_hardly_asked(corpus: ReferenceCorpus) -> None:
    """One request in two went there, and two replicas were a hundred times slower than the fast one alone."""
    with (
        ReferenceServer([corpus]) as fast,
        ReferenceServer([corpus], lambda: Fault("slow", 0.2)) as slow,
        Reader([slow.url, fast.url]) as reader,
    ):
        reader.read(20, corpus)  # until it is known which one is slow
        before = slow.num_arrays
        reader.read(600, corpus)
        assert slow.num_arrays - before < 60


class StoppableServer:
    """A server in a process of its own, for signals."""

    def __init__(self) -> None:
        code = (
            "from tests.client.conftest import make_corpus\n"
            "from tests.client.reference_server import ReferenceServer\n"
            "with ReferenceServer([make_corpus()]) as server:\n"
            "    print(server.url, flush=True)\n"
            "    while input():\n"
            "        print(*server.paths, flush=True)\n"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def steps(self) -> list[int]:
        """Return the steps that it was asked for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("steps\n")
        self._process.stdin.flush()
        return [int(step) for step in re.findall(r"[?&]step=(\d+)", self._process.stdout.readline())]

    def __enter__(self) -> StoppableServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)


def test_a_stopped_server_holds_the_loop_for_a_moment_and_is_used_again_later(
    corpus: ReferenceCorpus, server: ReferenceServer
) -> None:
    """SIGSTOP: connections stay, connecting works, nothing is answered. It holds the loop for a second."""
    network = Network(deadline_seconds=3000, progress_seconds=100)
    with StoppableServer() as hung, Reader([hung.url, server.url], network) as reader:
        while not hung.steps():
            reader.read(20, corpus)
        recorder = reader.replicas.recorder

        def num_again() -> int:
            """Return how many requests were sent again, because they failed or were late."""
            return recorder.num_retries + recorder.num_hedged

        before = num_again()
        hung.signal(signal.SIGSTOP)
        longest = 0.0
        while num_again() == before:  # until a request has met the stopped server
            longest = max(longest, *reader.read(20, corpus))
        print(f"longest wait {longest:.2f} s")
        assert longest < 30
        left_at, end = reader.step, time.monotonic() + 5
        while time.monotonic() < end:
            reader.read(20, corpus)
        needed_at = reader.step
        server.next_fault = lambda: Fault("error")  # from now on the other one is needed
        hung.signal(signal.SIGCONT)
        reader.read(20, corpus)
        tried = [step for step in hung.steps() if left_at < step < needed_at]
        assert tried == [], "it is tried again without a request that is awaited"


def test_a_response_that_stops_in_its_middle_is_asked_for_elsewhere(
    corpus: ReferenceCorpus, server: ReferenceServer
) -> None:
    """A second of silence while the other server works, and not all of `progress_seconds`."""
    network = Network(deadline_seconds=3000, progress_seconds=100)
    with ReferenceServer([corpus]) as other, Reader([server.url, other.url], network) as reader:
        reader.read(20, corpus)
        server.next_fault = lambda: Fault("pause", 100)
        longest = max(reader.read(40, corpus))
        print(f"longest wait {longest:.2f} s")
        assert longest < 30


def test_the_first_retry_is_logged_with_its_cause(
    server: ReferenceServer, corpus: ReferenceCorpus, caplog: pytest.LogCaptureFixture
) -> None:
    with Reader([server.url]) as reader:
        reader.read(5, corpus)
        faults = [Fault("error")]
        server.next_fault = lambda: faults.pop() if faults else None
        with caplog.at_level(logging.WARNING, "corpus_client"):
            reader.read(5, corpus)
    (said,) = [each.message for each in caplog.records if "in a row" in each.message]
    assert f"{server.url}: it broke; failure 1 in a row" in said


def resolve(monkeypatch: pytest.MonkeyPatch, addresses: Callable[[], list[tuple[str, int]]]) -> None:
    """Let the name `data` have these addresses; a test cannot change the machine's name service."""
    real: Any = socket.getaddrinfo

    def look_up(host: Any, *arguments: Any, flags: int = 0, **named: Any) -> Any:
        if host != "data" or flags & socket.AI_NUMERICHOST:
            return real(host, *arguments, flags=flags, **named)
        found = addresses()
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_each_address_of_a_name_is_a_replica_and_they_are_looked_up_again(
    corpus: ReferenceCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LOOKUP_SECONDS", 0.05)
    servers = [ReferenceServer([corpus]) for _ in range(3)]
    with servers[0], servers[1], servers[2]:
        found = [("127.0.0.1", each.port) for each in servers]
        addresses = found[:2]
        resolve(monkeypatch, lambda: addresses)
        with Reader(["http://data"]) as reader:
            while not all(each.num_arrays for each in servers[:2]):
                reader.read(5, corpus)
            assert servers[0].headers[-1]["Host"] == "data"
            addresses = found[2:]  # a service that moved
            time.sleep(0.1)
            deadline = time.monotonic() + 30
            while not servers[2].num_arrays and time.monotonic() < deadline:
                reader.read(5, corpus)
            time.sleep(0.2)
            reader.read(20, corpus)
            before = [each.num_arrays for each in servers[:2]]
            addresses = []  # a name service that fails: the last addresses stay
            time.sleep(0.1)
            reader.read(50, corpus)
            assert [each.num_arrays for each in servers[:2]] == before


@pytest.fixture
def silent() -> Iterator[ReferenceServer]:
    """Answers everything but batches."""
    with ReferenceServer([make_corpus()], lambda: Fault("hole")) as server:
        yield server


@pytest.mark.parametrize("where", ["response", "connect"])
def test_a_process_ends_promptly_after_an_exception(
    where: str, silent: ReferenceServer, black_hole: str
) -> None:
    """While the fetcher waits for a response, or for a connection: for a day, and it is not waited for."""
    code = f"""
import time, threading
from corpus_client import CorpusLoader, Network
from corpus_client.network import options
from corpus_client.staging import fetcher
options.CONNECT_SECONDS = fetcher.JOIN_SECONDS = DAY = 86_400.0
endless = Network(deadline_seconds=5 * DAY, progress_seconds=DAY)
loader = CorpusLoader(
    {silent.url!r}, corpus="web", seq_len=16, global_batch_size=12, device="cpu", network=endless
)
if {where!r} == "connect":
    connect = loader._connect
    loader._connect = type(connect)(connect.func, ({black_hole!r},), *connect.args[1:])
threading.Thread(target=lambda: next(loader), daemon=True).start()
time.sleep(0.5)
raise ValueError("the model's own mistake")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the model's own mistake" in done.stderr
    assert done.returncode == 1
