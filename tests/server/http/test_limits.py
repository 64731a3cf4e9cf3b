"""Large responses through small memory, stalled readers, and more requests than there is room for."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import xxhash

from corpus_server.admission.load import STALLED_SECONDS
from corpus_server.read.reading import PIECE_BYTES
from tests.conftest import ServedCorpus
from tests.reference import batch, one_source
from tests.serving import Response, RunningServer, host_and_port, wait_until

SEND_TIMEOUT_SECONDS = 1.5
MAX_RESPONSES = 3
CONFIG = f"[server]\nmax_concurrent_responses = {MAX_RESPONSES}\nsend_timeout_seconds = "
LARGE = {"corpus": "big", "seq_len": 1024, "batch_size": 64, "seed": 3, "step": 10, "count": 150}
LARGE_TARGET = "/v1/batches?" + "&".join(f"{name}={value}" for name, value in LARGE.items())


@pytest.fixture(scope="module")
def tight(big: ServedCorpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with three responses at a time, and little patience."""
    config = f"{CONFIG}{SEND_TIMEOUT_SECONDS}"
    with RunningServer({"big": big.path}, tmp_path_factory.mktemp("tight"), config=config) as running:
        yield running


@pytest.fixture(scope="module")
def patient(big: ServedCorpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with three responses at a time that drops no stalled reader while a test runs."""
    folder = tmp_path_factory.mktemp("patient")
    with RunningServer({"big": big.path}, folder, config=f"{CONFIG}600") as running:
        yield running


@pytest.mark.parametrize("memory", ["roomy", "tight"])
def test_a_large_response_is_the_small_ones_joined(
    memory: str, big: ServedCorpus, request: pytest.FixtureRequest
) -> None:
    """150 steps at once, 20 MB in pieces, against the steps one by one and the reference."""
    server: RunningServer = request.getfixturevalue(memory)
    response = server.get("/v1/batches", **LARGE)
    assert int(response.headers["Content-Length"]) == len(response.body) == 150 * 64 * 1025 * 2 > PIECE_BYTES
    assert response.headers["Corpus-Checksum"] == f"xxh3-64={xxhash.xxh3_64(response.body).hexdigest()}"
    assert server.get("/v1/batches", **LARGE, checksum="false").body == response.body
    size = 64 * 1025 * 2
    for k in (0, 1, 57, 149):
        small = server.get("/v1/batches", **{**LARGE, "step": 10 + k, "count": 1})
        assert small.body == response.body[k * size : (k + 1) * size]
    plan = one_source("big", 1024, 64, seed=3)
    assert (response.array()[57] == batch(plan, big.shards, 67)[0]).all()


@pytest.mark.parametrize("memory", ["roomy", "tight"])
def test_a_large_range_is_the_files_joined(
    memory: str, big: ServedCorpus, request: pytest.FixtureRequest
) -> None:
    server: RunningServer = request.getfixturevalue(memory)
    response = server.get("/v1/corpora/big/tokens", start=1, count=big.tokens.size - 1, format="npy")
    assert response.body[128:] == big.tokens[1:].tobytes()
    assert response.headers["Corpus-Checksum"] == f"xxh3-64={xxhash.xxh3_64(response.body).hexdigest()}"


@contextlib.contextmanager
def stalled_readers(server: RunningServer, count: int) -> Iterator[list[socket.socket]]:
    """Yield connections that asked for a large response, saw its head, and read no further."""
    with contextlib.ExitStack() as opened:
        connections = []
        for _ in range(count):
            connection = opened.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(20)
            connection.connect(host_and_port(server.url))
            connection.sendall(f"GET {LARGE_TARGET} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            connections.append(connection)
        for connection in connections:
            assert connection.recv(12) == b"HTTP/1.1 200"
        yield connections


def read_to_end(connection: socket.socket) -> int:
    """Return how many bytes come before the connection ends, however it ends."""
    size = 0
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            size += len(part)
    return size


def small(server: RunningServer) -> Response:
    return server.get("/v1/batches", **{**LARGE, "count": 1})


def test_a_reader_that_takes_little_is_not_dropped(tight: RunningServer) -> None:
    """In a time-out it takes less than the third of its buffer after which the kernel asks for more.

    Nothing follows from a reading that a busy machine held up for too long: it is begun anew.
    """
    pause = math.inf
    while pause > SEND_TIMEOUT_SECONDS / 2:
        before = tight.log().count("dropped")
        with stalled_readers(tight, 1) as (slow,):
            times = [time.monotonic()]
            with contextlib.suppress(ConnectionError):
                while times[-1] < times[0] + 3 * SEND_TIMEOUT_SECONDS and slow.recv(4096):
                    time.sleep(0.05)
                    times.append(time.monotonic())
            times.append(time.monotonic())
            pause = max(later - earlier for earlier, later in pairwise(times))
    assert tight.log().count("dropped") == before


def test_a_stalled_reader_is_dropped_and_others_go_on(tight: RunningServer) -> None:
    expected = small(tight).body
    dropped = "dropped a reader that took nothing for 1.5 s: 127.0.0.1:"
    before = tight.log().count(dropped)
    with stalled_readers(tight, 1) as (stalled,):
        while tight.log().count(dropped) == before:
            response = small(tight)
            assert (response.status, response.body) == (200, expected)
            time.sleep(0.02)
        assert read_to_end(stalled) < 150 * 64 * 1025 * 2
    lines = tight.log().splitlines()
    assert len([line for line in lines if dropped in line]) == before + 1
    assert not [line for line in lines if "unexpected=" in line or "ASGI" in line]
    assert tight.get("/v1/batches", **LARGE).status == 200


def while_all_slots_are_taken(server: RunningServer, ask: Callable[[], Response]) -> Response:
    """Ask beside stalled readers; anew where a busy machine took so long that they may have been dropped."""
    took = math.inf
    while took > STALLED_SECONDS:
        server.wait_until_idle()
        began = time.monotonic()
        with stalled_readers(server, MAX_RESPONSES):
            response = ask()
            took = time.monotonic() - began
    return response


def test_answers_above_the_limit_are_told_to_come_back(patient: RunningServer) -> None:
    """Catalogue row 21, the refusal, which waits for no room; descriptions are still answered, and room comes
    back."""

    def ask() -> Response:
        refused = small(patient)
        assert patient.get("/v1/corpora/big").status == 200
        assert patient.get("/healthz").status == 200
        return refused

    refused = while_all_slots_are_taken(patient, ask)
    assert (refused.status, refused.json()["type"]) == (503, "overloaded")
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["remedy"]
    wait_until(lambda: small(patient).status == 200, "readers that left still count as responses")
    assert [patient.get("/v1/batches", **LARGE).status for _ in range(2 * MAX_RESPONSES)] == [200] * 6


def test_json_and_text_responses_count_too(patient: RunningServer) -> None:
    """They cost the most memory and time of all."""
    response = while_all_slots_are_taken(
        patient, lambda: patient.get("/v1/batches", **{**LARGE, "count": 1}, format="json")
    )
    assert (response.status, response.json().get("type")) == (503, "overloaded")


def test_stalled_readers_cost_little_memory(big: ServedCorpus, tmp_path: Path) -> None:
    """Catalogue row 22 in short: each further reader of 20 MB costs little more than a piece.

    The least of three servers counts: heaps of threads grow by up to 2 MB at any time, and keep it.
    """
    most = 30 * (PIECE_BYTES + 2**17)
    for number in range(3):
        with RunningServer({"big": big.path}, tmp_path / str(number)) as server:
            small(server)
            process = psutil.Process(server.worker_pid)
            with stalled_readers(server, 20):
                before = process.memory_full_info().uss  # the threads' heaps have grown by now
                with stalled_readers(server, 30):
                    further = process.memory_full_info().uss - before
                    assert small(server).status == 200
        if further < most:
            return
    pytest.fail(f"30 further readers took {further:,} bytes, at most {most:,} were expected")


def test_a_reader_that_goes_away_frees_its_place(patient: RunningServer) -> None:
    """At once, not only when its time is over."""
    patient.wait_until_idle()
    for _ in range(4):
        with stalled_readers(patient, MAX_RESPONSES):
            assert patient.active_requests() == MAX_RESPONSES
        patient.wait_until_idle()


@pytest.mark.parametrize("large", ["checksum=true", "checksum=tail", "format=json&count=30"])
def test_a_small_response_does_not_wait_for_large_ones(roomy: RunningServer, large: str) -> None:
    """Twelve strangers' responses of 200,000 rows, each a tenth of a second of work, for four threads."""
    finished: list[int] = []
    target = f"/v1/batches?corpus=big&seq_len=16&batch_size=1024&step=0&{large}"
    target += "" if "count" in large else "&count=200"

    def ask(_: int) -> None:
        with socket.create_connection(host_and_port(roomy.url), 300) as connection:
            asked.release()
            connection.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            status = connection.recv(12)
            while connection.recv(1 << 20):
                pass
            assert status == b"HTTP/1.1 200"
            finished.append(1)

    asked = threading.Semaphore(0)
    with ThreadPoolExecutor(12) as strangers:
        answers = [strangers.submit(ask, number) for number in range(12)]
        for _ in answers:
            asked.acquire()
        before = [len(finished)]
        for step in range(3):
            assert roomy.get("/v1/batches", corpus="big", seq_len=16, batch_size=4, step=step).status == 200
            before.append(len(finished))
        for answer in answers:
            answer.result()
    assert before[-1] < 6, before


def test_a_response_above_the_limit_of_the_server_is_refused(tmp_path: Path, big: ServedCorpus) -> None:
    with RunningServer({"big": big.path}, tmp_path, arguments=["--max-response-bytes", "131200"]) as server:
        exact = {"corpus": "big", "seq_len": 1024, "batch_size": 64, "step": 0}
        assert len(server.get("/v1/batches", **exact).body) == 131_200
        refused = server.get("/v1/batches", **{**exact, "seq_len": 1025}).json()
        assert (refused["type"], refused["received"]) == ("response-too-large", 131_328)
        assert server.get("/v1/corpora/big/tokens", count=65_600).status == 200
        assert server.get("/v1/corpora/big/tokens", count=65_601).status == 422
