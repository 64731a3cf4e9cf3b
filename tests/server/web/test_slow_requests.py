"""Heads and bodies that come slowly or not at all, bodies that nobody asked for, and too many connections."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from tests.conftest import ServedCorpus
from tests.raw_http import RawConnection, check_raw_problem, get, post
from tests.reference import one_source
from tests.serving import RunningServer

TOKENS = get("/v1/batches", corpus="web", seq_len=16, batch_size=8, step=1)
HEALTH = get("/healthz")
GIGABYTE = 2**30
HEAD_SECONDS = 1
POST = post("/v1/plans", json.dumps(one_source("web", 16, 8)).encode())
CONFIG = f"""
[server]
head_timeout_seconds = {HEAD_SECONDS}
body_timeout_seconds = {HEAD_SECONDS}
max_connections = 20
max_connections_per_address = 12
"""


@pytest.fixture(scope="module")
def strict(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server with little patience."""
    folder = tmp_path_factory.mktemp("strict")
    with RunningServer({"web": corpora["web"].path}, folder, config=CONFIG) as running:
        yield running


@pytest.mark.parametrize("before", [b"", TOKENS, HEALTH], ids=["new", "after-tokens", "after-another"])
@pytest.mark.parametrize("start", [b"G", TOKENS[:-2], HEALTH[:-2], b"POST /v1/plans HTTP/1.1\r\n"], ids=repr)
def test_a_head_that_comes_byte_by_byte_is_refused(
    strict: RunningServer, before: bytes, start: bytes
) -> None:
    """Wherever it is going, and whatever the connection was used for before."""
    with RawConnection(strict) as slow:
        if before:
            slow.send(before)
            assert slow.read().status == 200
        slow.send(start)
        slow.socket.settimeout(0.2)
        began = time.monotonic()
        while time.monotonic() - began < 20:
            try:
                slow.send(b"\r" if start == b"G" else b"x")
                slow.await_some(10_000)
                break
            except TimeoutError:
                pass
        slow.socket.settimeout(20)
        document = check_raw_problem(response := slow.read(), 408, "request-timeout")
        assert "within 1 s" in document["detail"]
        assert response.headers["connection"] == "close"
        assert slow.ended()


def send_in_two_parts(connection: RawConnection, request: bytes, between: Callable[[], object]) -> float:
    """Return the seconds after which the head was whole, as the server may see them."""
    began = time.monotonic()
    connection.send(request[:-1])
    between()
    connection.send(request[-1:])
    return time.monotonic() - began


def test_a_head_in_time_and_an_idle_connection_are_left_alone(strict: RunningServer) -> None:
    """A busy machine may hold up the second part of a head for too long: it is sent anew."""
    with RawConnection(strict) as idle, RawConnection(strict) as other:
        for connection, request in ((idle, TOKENS), (other, HEALTH)):
            connection.send(request)
            assert connection.read().status == 200
        took = math.inf
        while took >= HEAD_SECONDS:
            with RawConnection(strict) as slow:
                for request in (TOKENS, HEALTH, HEALTH):
                    took = send_in_two_parts(slow, request, lambda: time.sleep(0.4))
                    response = slow.read()
                    if took >= HEAD_SECONDS:
                        break
                    assert response.status == 200
        for connection, request in ((idle, TOKENS), (other, HEALTH)):
            connection.send(request)
            assert connection.read().status == 200


@pytest.mark.parametrize("request_", [TOKENS, HEALTH, POST], ids=["tokens", "another", "body"])
def test_what_came_while_the_server_was_stopped_came_in_time(strict: RunningServer, request_: bytes) -> None:
    """A busy machine may give it no processor for longer than a head or a body may take."""
    worker = psutil.Process(strict.worker_pid)
    took = math.inf
    while took >= HEAD_SECONDS:
        with RawConnection(strict) as client:

            def stop() -> None:
                time.sleep(0.2)  # the first part is read
                worker.suspend()

            try:
                took = send_in_two_parts(client, request_, stop)
                time.sleep(HEAD_SECONDS)
            finally:
                worker.resume()
            response = client.read()
    assert response.status == 200, response


def test_a_body_that_does_not_come_is_given_up(strict: RunningServer) -> None:
    with RawConnection(strict) as slow:
        slow.send(get("/v1/plans", "Content-Length: 1000", method="POST"), b"{")
        check_raw_problem(slow.read(), 408, "request-timeout")
        assert slow.ended()


@pytest.mark.parametrize("framing", ["announced", "chunked"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", path) for path in ("/v1/plans", "/v1/batches", "/healthz", "/nowhere")),
        *(("GET", path) for path in ("/v1/batches", "/v1/corpora", "/readyz", "/metrics", "/docs")),
        ("PUT", "/v1/plans"),
    ],
    ids=lambda value: value.strip("/").replace("/", "-"),
)
def test_no_route_receives_a_gigabyte(strict: RunningServer, method: str, path: str, framing: str) -> None:
    """Catalogue row 24; the failure was: it was all received, and dropped."""
    how = f"Content-Length: {GIGABYTE}" if framing == "announced" else "Transfer-Encoding: chunked"
    part = b" " * 2**20
    if framing == "chunked":
        part = b"%x\r\n%b\r\n" % (len(part), part)
    sent = 0
    with RawConnection(strict) as client:
        client.send(get(path, how, method=method))
        try:
            while sent < GIGABYTE:
                client.send(part)
                sent += len(part)
        except OSError:  # the server has closed
            pass
        assert sent < 160 * 2**20
        if framing == "announced":
            with RawConnection(strict) as polite:
                polite.send(get(path, how, method=method))
                document = check_raw_problem(response := polite.read(), 413, "body-too-large")
                assert str(GIGABYTE) in document["detail"]
                assert response.headers["connection"] == "close"
                assert polite.ended()


def test_too_many_connections_are_refused(strict: RunningServer) -> None:
    """And only new ones: those that are there go on, and the end of one makes room."""
    strict.wait_until_idle()
    time.sleep(0.2)
    with ExitStack() as stack:
        kept = [stack.enter_context(RawConnection(strict)) for _ in range(12)]
        for number, connection in enumerate(kept):
            connection.send(HEALTH if number % 2 else TOKENS)
            assert connection.read().status == 200
        with RawConnection(strict) as refused:
            document = check_raw_problem(response := refused.read(), 503, "overloaded")
            assert "12 connections from 127.0.0.1" in document["detail"]
            assert (response.headers["connection"], response.headers["retry-after"]) == ("close", "1")
            assert refused.ended()
        kept[0].send(HEALTH)
        assert kept[0].read().status == 200
        for connection in kept[:2]:
            connection.close()
        deadline = time.monotonic() + 10
        while True:
            with RawConnection(strict) as again:
                again.send(HEALTH)
                if (status := again.read().status) == 200:
                    break
            assert status == 503
            assert time.monotonic() < deadline
