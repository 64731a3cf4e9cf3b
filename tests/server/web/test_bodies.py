"""Bodies, heads and parameters far beyond what makes sense: refused, within little memory."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from corpus_server.admission.load import MAX_BODY_BYTES as MAX_PLAN_BYTES
from corpus_server.http.connection import MAX_DROPPED_BYTES
from tests.conftest import ServedCorpus
from tests.reference import one_source
from tests.serving import RunningServer, ask, check_problem, host_and_port, wait_until

MIB = 2**20
GROWTH_BYTES = 50 * MIB
# How much of an endless request may have left before its refusal is read: what the server drops of it, and
# two sockets' buffers. That it keeps none of it is what `growth` watches.
REFUSED_BYTES = MAX_DROPPED_BYTES + 32 * MIB
PLAN = one_source("web", 16, 12)


@pytest.fixture(scope="module")
def alone(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of one process, so that its memory is measured."""
    with RunningServer({"web": corpora["web"].path}, tmp_path_factory.mktemp("alone")) as running:
        assert running.post_plan(PLAN).status == 200
        yield running


@pytest.fixture
def growth(alone: RunningServer) -> Iterator[list[int]]:
    """Watches memory while a test runs, and afterwards that it grew little and the process lives."""
    process = psutil.Process(alone.worker_pid)
    started = process.memory_info().rss
    peaks = [started]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peaks[0] = max(peaks[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield peaks
    stop.set()
    watcher.join()
    assert peaks[0] - started < GROWTH_BYTES
    assert process.is_running()
    assert alone.get("/healthz").status == 200


def exchange(connection: socket.socket, head: str, body: Iterator[bytes]) -> tuple[bytes, int]:
    """Send a request, in the background, until it is answered; return the response and the bytes sent."""
    sent = 0
    answered = threading.Event()

    def send() -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            connection.sendall(head.encode())
            for part in body:
                if answered.is_set():
                    return
                connection.sendall(part)
                sent += len(part)

    sender = threading.Thread(target=send)
    sender.start()
    response = connection.recv(65536)
    while b"}" not in response and (part := connection.recv(65536)):
        response += part
    answered.set()
    sender.join(20)
    return response, sent


def chunks(size: int) -> Iterator[bytes]:
    while True:
        yield b"%x\r\n" % size + b" " * size + b"\r\n"


@pytest.mark.parametrize("framing", ["announced", "chunked"])
def test_a_body_of_a_gigabyte_is_refused_early(alone: RunningServer, growth: list[int], framing: str) -> None:
    """Catalogue row 24: by what is announced before any of it is kept, else when the limit is reached."""
    how = "Content-Length: 1073741824" if framing == "announced" else "Transfer-Encoding: chunked"
    parts = iter([b" " * 65536] * 16384) if framing == "announced" else chunks(65536)
    with socket.create_connection(host_and_port(alone.url), timeout=20) as connection:
        head = f"POST /v1/plans HTTP/1.1\r\nHost: x\r\n{how}\r\n\r\n"
        response, sent = exchange(connection, head, parts)
    assert response.startswith(b"HTTP/1.1 413 ")
    document = json.loads(response.partition(b"\r\n\r\n")[2])
    assert (document["type"], document["status"]) == ("body-too-large", 413)
    assert f"at most {MAX_PLAN_BYTES} bytes" in document["detail"]
    assert sent < (REFUSED_BYTES if framing == "announced" else MAX_PLAN_BYTES + REFUSED_BYTES)


def test_a_client_that_asks_first_sends_nothing(alone: RunningServer) -> None:
    """`Expect: 100-continue`, as curl does."""
    with socket.create_connection(host_and_port(alone.url), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_the_limit_is_exact(alone: RunningServer) -> None:
    """White space around a good plan: at the limit it is taken, one byte more is refused."""
    plan = json.dumps(PLAN).encode()
    full = plan.ljust(MAX_PLAN_BYTES)
    assert alone.get("/v1/plans", method="POST", body=full).status == 200
    refused = alone.get("/v1/plans", method="POST", body=full + b" ")
    check_problem(refused, 413, "body-too-large")


def test_a_connection_goes_on_after_a_refused_body(alone: RunningServer, growth: list[int]) -> None:
    """The client has sent all of it, reads the refusal, and asks something else."""
    with contextlib.closing(alone.connect()) as connection:
        for _ in range(3):
            refused = ask(connection, "/v1/plans", method="POST", body=bytes(40 * MIB))
            check_problem(refused, 413, "body-too-large")
            assert ask(connection, "/v1/corpora/web").status == 200


def test_a_client_that_goes_away_within_its_body_leaves_no_traceback(alone: RunningServer) -> None:
    with socket.create_connection(host_and_port(alone.url), timeout=20) as connection:
        connection.sendall(b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        assert alone.get("/healthz").status == 200
    assert "unexpected=" not in alone.log()


def test_a_header_of_a_megabyte_is_refused(alone: RunningServer, growth: list[int]) -> None:
    """Catalogue row 24; also one that never ends, and one of many small fields."""
    endless = iter([b"a" * 65536] * 16384)
    fields = iter([b"X-Field: 1\r\n" * 5000] * 5000)
    for parts in (iter([b"a" * MIB, b"\r\n\r\n"]), endless, fields):
        with socket.create_connection(host_and_port(alone.url), timeout=20) as connection:
            head = "GET /v1/corpora HTTP/1.1\r\nHost: x\r\nX-Large: "
            response, sent = exchange(connection, head, parts)
        assert response.startswith(b"HTTP/1.1 431 ")
        assert json.loads(response.partition(b"\r\n\r\n")[2])["type"] == "head-too-large"
        assert sent < REFUSED_BYTES


def test_a_long_url_and_a_million_parameters_are_refused(alone: RunningServer, growth: list[int]) -> None:
    """Catalogue row 24: 64 kB, 14 MB, and one without an end."""
    many = b"&".join(b"a%d=1" % number for number in range(1_000_000))
    rest = b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for parts in ([b"a" * 65536, rest], [many, rest], [b"a" * 65536] * 16384):
        for path in ("/v1/batches?", "/v1/corpora/", "/healthz?"):
            with socket.create_connection(host_and_port(alone.url), timeout=20) as connection:
                response, sent = exchange(connection, f"GET {path}", iter(parts))
            # 400: a URL of 65,536 bytes that came at once is complete, and more than the parser takes.
            assert response.startswith((b"HTTP/1.1 414 ", b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
            assert sent < REFUSED_BYTES


def test_a_million_parameters_in_a_body_are_refused(alone: RunningServer, growth: list[int]) -> None:
    body = b"&".join(b"a%d=1" % number for number in range(1_000_000))
    check_problem(alone.get("/v1/plans", method="POST", body=body), 422, "invalid-plan")


def is_refused(client: socket.socket) -> bool:
    with contextlib.suppress(OSError):  # nothing has come, or the server has closed the connection
        return client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 503"
    return False


def test_a_hundred_open_bodies_cost_little(alone: RunningServer, growth: list[int]) -> None:
    """Catalogue row 24: what does not fit is told to come back; the others are waited for."""
    head = b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n"
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(100):
            client = stack.enter_context(socket.create_connection(host_and_port(alone.url), timeout=20))
            client.setblocking(False)
            clients.append(client)
            with contextlib.suppress(OSError):  # the server takes no more, or has refused
                client.send(head)
                for _ in range(32):
                    client.send(b" " * 65536)
                    time.sleep(0.0005)
        wait_until(lambda: any(map(is_refused, clients)), "nobody was told to come back")
        assert alone.get("/v1/corpora").status == 200
