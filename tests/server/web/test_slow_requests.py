"""Heads and bodies that come slowly or not at all, bodies that nobody asked for, and too many connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.conftest import ServedCorpus
from tests.raw_http import RawConnection, check_raw_problem, get
from tests.serving import RunningServer

TOKENS = get("/v1/batches", corpus="web", seq_len=16, batch_size=8, step=1)
HEALTH = get("/healthz")
GIGABYTE = 2**30
CONFIG = """
[server]
head_timeout_seconds = 1
body_timeout_seconds = 1
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


def test_a_head_in_time_and_an_idle_connection_are_left_alone(strict: RunningServer) -> None:
    with RawConnection(strict) as slow, RawConnection(strict) as idle, RawConnection(strict) as other:
        for connection, request in ((idle, TOKENS), (other, HEALTH)):
            connection.send(request)
            assert connection.read().status == 200
        for request in (TOKENS, HEALTH, HEALTH):
            slow.send(request[:10])
            time.sleep(0.4)
            slow.send(request[10:])
            assert slow.read().status == 200
        for connection, request in ((idle, TOKENS), (other, HEALTH)):
            connection.send(request)
            assert connection.read().status == 200


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
