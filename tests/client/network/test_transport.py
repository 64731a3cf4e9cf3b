"""One connection: exact bytes into the buffer it is handed, or an error and a closed socket."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import xxhash

from corpus_client import errors
from corpus_client.network import wire
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from corpus_client.network.transport import Connection
from tests.client.network.scripted import ScriptedServer

BODY = bytes(range(256)) * 4096  # 1 MiB
TAIL = xxhash.xxh3_64_digest(BODY)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
REQUEST = wire.ArrayRequest(path="/x", shape=(len(BODY),), dtype="uint8", plan_id="ab")


def head(**changes: str) -> bytes:
    headers = {
        "Content-Length": str(len(BODY) + len(TAIL)),
        "Corpus-Shape": str(len(BODY)),
        "Corpus-Dtype": "uint8",
        "Corpus-Plan": "ab",
        "Corpus-Checksum": "xxh3-64=tail",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return "\r\n".join(["HTTP/1.1 200 OK", *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode()


@pytest.fixture
def buffer() -> memoryview:
    return memoryview(bytearray(len(BODY) + 64))


Connect = Callable[..., tuple[ScriptedServer, Connection]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A scripted server and a connection to it, both closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(*scripts: list[Any], **options: Any) -> tuple[ScriptedServer, Connection]:
            server = ScriptedServer(*scripts)
            endpoint = Endpoint.parse(f"http://127.0.0.1:{server.port}/data/")
            connection = Connection(endpoint, Network(**options))
            stack.callback(server.close)
            stack.callback(connection.close)
            return server, connection

        yield make


def receive(connection: Connection, buffer: memoryview, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    connection.send(REQUEST.path, deadline=deadline)
    connection.receive_into(buffer, REQUEST, deadline=deadline)


def wait_for(connection: Connection) -> None:
    """Wait until something has arrived."""
    end = time.monotonic() + 20
    while not connection.arrived():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_body_lies_at_the_start_of_the_buffer_and_nowhere_else(buffer: memoryview, connect: Connect) -> None:
    server, connection = connect(
        [head() + BODY + TAIL], [head(), 0.01, BODY[:7], 0.01, BODY[7:] + TAIL[:3], 0.01, TAIL[3:]]
    )
    for _ in range(2):
        buffer[:] = bytes(len(buffer))
        receive(connection, buffer)
        assert buffer[: len(BODY)] == BODY
        assert bytes(buffer[len(BODY) :]) == bytes(64)
    sent = re.compile(
        rb"GET /data/x HTTP/1\.1\r\nHost: 127\.0\.0\.1:%d\r\nAccept-Encoding: identity\r\n"
        rb"x-request-id: ([0-9a-f]{12})-(\d)\r\n\r\n" % server.port
    )
    found = [sent.fullmatch(request) for request in server.requests]
    assert [each and each[2] for each in found] == [b"1", b"2"]
    assert len({each and each[1] for each in found}) == 1
    assert connection.usable


def test_informational_answers_come_before_the_response(buffer: memoryview, connect: Connect) -> None:
    """A proxy may send them unasked (RFC 9110, 15.2)."""
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    _, connection = connect([hints + hints, b"HTTP/1.1 100 Continue\r\n\r\n" + head() + BODY + TAIL])
    receive(connection, buffer)
    assert buffer[: len(BODY)] == BODY


def test_a_response_without_a_checksum_ends_with_its_array(buffer: memoryview, connect: Connect) -> None:
    plain = {"Content_Length": str(len(BODY)), "Corpus_Checksum": "none"}
    _, connection = connect([head(**plain) + BODY], [head(**plain) + BODY + TAIL[:1]])
    request = replace(REQUEST, verify=False)
    deadline = time.monotonic() + 10
    connection.send(request.path, deadline=deadline)
    headers = connection.receive_into(buffer, request, deadline=deadline)
    assert buffer[: len(BODY)] == BODY
    assert headers == {
        "content-length": str(len(BODY)),
        "corpus-shape": str(len(BODY)),
        "corpus-dtype": "uint8",
        "corpus-plan": "ab",
        "corpus-checksum": "none",
    }


def test_a_head_may_have_as_many_bytes_as_it_may(buffer: memoryview, connect: Connect) -> None:
    padding = wire.MAX_HEAD_BYTES - len(head(Padding=""))
    _, connection = connect([head(Padding="x" * padding) + BODY + TAIL])
    receive(connection, buffer)
    assert buffer[: len(BODY)] == BODY


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ([head(), BODY[:-1], "close"], errors.ResponseCorrupt, "it ended after 1048575"),
        ([head() + BODY[:-1] + b"\0" + TAIL], errors.ResponseCorrupt, "checksum"),
        ([head() + BODY[:-1], "close"], errors.ResponseCorrupt, "the body must have 1048576 bytes here"),
        ([head() + BODY + bytes(8)], errors.ResponseCorrupt, "checksum"),
        ([head() + BODY + TAIL[:5], "close"], errors.ResponseCorrupt, "it ended after 5"),
        ([head(Content_Length="7") + BODY], errors.ResponseCorrupt, "content-length"),
        ([head(Corpus_Shape="1")], errors.ResponseCorrupt, "corpus-shape"),
        ([head(Corpus_Plan="cd")], errors.ResponseCorrupt, "corpus-plan"),
        (
            [CHUNKED],
            errors.ResponseCorrupt,
            "content-l",
        ),
        ([b"nonsense\r\n\r\n"], errors.ResponseCorrupt, "status line of HTTP/1.1, got b'nonsense"),
        ([b"\r\n\r\n"], errors.ResponseCorrupt, "status line of HTTP/1.1, got b'"),
        (["close"], errors.ConnectionFailed, "closed connection after 0 bytes of the response's head"),
        ([head()[:40], "close"], errors.ConnectionFailed, "closed connection after 40 bytes"),
        ([head()[:40], 0.05, "reset"], errors.ConnectionFailed, "Connection reset by peer"),
        ([head(Padding="x" * 70_000)], errors.ResponseCorrupt, "the head must have at most 65536 bytes"),
        ([30.0], errors.NoProgress, "nothing came in time"),
        ([head() + BODY[:9], 30.0], errors.NoProgress, "nothing came in time"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:12],
)
def test_bad_responses(
    script: list[Any], kind: type[Exception], message: str, buffer: memoryview, connect: Connect
) -> None:
    server, connection = connect(script, progress_seconds=0.3 if kind is errors.NoProgress else 30)
    with pytest.raises(kind, match=message) as caught:
        receive(connection, buffer)
    whole = rf"http://127\.0\.0\.1:{server.port}/data: .*; request [0-9a-f]{{12}}-1"
    assert re.fullmatch(whole, str(caught.value))
    assert not connection.usable
    assert not getattr(caught.value, "stale", False), "it had not served before"


def test_drip_does_not_outlast_the_deadline(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head(), *[b"x", 0.02] * 1000], progress_seconds=30)
    started = time.monotonic()
    with pytest.raises(errors.NoProgress):
        receive(connection, buffer, seconds=0.3)
    assert time.monotonic() - started < 10


def test_problem_keeps_the_connection(buffer: memoryview, connect: Connect) -> None:
    problem = b'{"type": "overloaded", "detail": "full"}'
    response = (
        b"HTTP/1.1 503 Busy\r\nContent-Type: application/problem+json\r\nRetry-After: 2\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(problem), problem)
    )
    _, connection = connect([response], [head() + BODY + TAIL])
    with pytest.raises(errors.ServerError, match="full") as caught:
        receive(connection, buffer)
    assert caught.value.retry_after_seconds == 2
    assert connection.usable
    receive(connection, buffer)


@pytest.mark.parametrize("status", [203, 206, 299])
def test_only_200_is_a_response(status: int, buffer: memoryview, connect: Connect) -> None:
    """A proxy may have transformed another one (203), or it may be a part (206)."""
    _, connection = connect([head().replace(b"200 OK", b"%d X" % status) + BODY + TAIL])
    with pytest.raises(errors.ServerError, match=f"HTTP {status}"):
        receive(connection, buffer)


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 503 Busy\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 70000\r\n\r\n" + bytes(70_000),
        b"HTTP/1.1 503 Busy\r\nContent-Length: 1\r\nConnection: close\r\n\r\n1",
    ],
    ids=["no length", "nonsense", "too long", "close"],
)
def test_a_failure_whose_end_is_not_known_ends_the_connection(
    response: bytes, buffer: memoryview, connect: Connect
) -> None:
    _, connection = connect([response, 0.2])
    with pytest.raises(errors.ServerError):
        receive(connection, buffer)
    assert not connection.usable


def test_a_server_may_end_the_connection_with_a_response(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head(Connection="close") + BODY + TAIL, 0.2])
    receive(connection, buffer)
    assert not connection.usable


def test_nothing_may_come_behind_the_last_response(buffer: memoryview, connect: Connect) -> None:
    """It would be taken for the beginning of the next one."""
    small = wire.ArrayRequest(path="x", shape=(3,), dtype="uint8", plan_id="ab")
    response = head(Corpus_Shape="3", Content_Length="11") + b"abc" + xxhash.xxh3_64_digest(b"abc")
    _, connection = connect([response + b"d", 0.2])
    connection.send(small.path, deadline=time.monotonic() + 10)
    with pytest.raises(errors.ResponseCorrupt, match="more came"):
        connection.receive_into(buffer, small, deadline=time.monotonic() + 10)
    assert not connection.usable


def test_idle_connection_closed_by_the_server_is_stale(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head() + BODY + TAIL, "close"], [head() + BODY + TAIL])
    receive(connection, buffer)
    time.sleep(0.05)
    with pytest.raises(errors.ConnectionFailed) as caught:
        receive(connection, buffer)
    assert caught.value.stale
    assert not connection.usable
    with pytest.raises(errors.ConnectionFailed, match="closed"):
        receive(connection, buffer)


def test_an_idle_connection_that_was_reset_is_stale(buffer: memoryview, connect: Connect) -> None:
    """Whether sending meets it or receiving."""
    received = threading.Event()
    _, connection = connect([head() + BODY + TAIL, received, "reset"])
    receive(connection, buffer)
    received.set()
    wait_for(connection)
    with pytest.raises(errors.ConnectionFailed) as caught:
        connection.send(REQUEST.path, deadline=time.monotonic() + 10)
    assert caught.value.stale


@pytest.mark.parametrize("cut", [10, 3000, len(BODY)])
def test_a_connection_that_breaks_within_a_response_is_not_stale(
    cut: int, buffer: memoryview, connect: Connect
) -> None:
    response, head_came = head() + BODY + TAIL, threading.Event()
    _, connection = connect([response], [response[: len(head()) + cut], head_came, "reset"])
    receive(connection, buffer)
    deadline = time.monotonic() + 10
    connection.send(REQUEST.path, deadline=deadline)
    wait_for(connection)
    head_came.set()
    with pytest.raises(errors.ConnectionFailed) as caught:
        connection.receive_into(buffer, REQUEST, deadline=deadline)
    assert not caught.value.stale


def test_a_connection_that_has_not_served_is_not_stale() -> None:
    """Else a server that hangs up would be asked again at once, thousands of times a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(Endpoint.parse(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        deadline = time.monotonic() + 10
        connection.send(REQUEST.path, deadline=deadline)
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        wait_for(connection)
        with pytest.raises(errors.ConnectionFailed) as caught:
            connection.send(REQUEST.path, deadline=deadline)
        assert not caught.value.stale


def test_answers_come_in_the_order_of_the_requests(buffer: memoryview, connect: Connect) -> None:
    small = wire.ArrayRequest(path="x", shape=(3, 4), dtype="uint8", plan_id="ab")
    response = head(Corpus_Shape="3,4", Content_Length="20")
    first, second = bytes(range(12)), bytes(range(12, 24))
    together = response + first + xxhash.xxh3_64_digest(first) + response + second
    _, connection = connect([0.2, together, 0.05, xxhash.xxh3_64_digest(second)], [])
    deadline = time.monotonic() + 10
    for _ in range(2):
        connection.send(small.path, deadline=deadline)
    for body in (first, second):
        connection.receive_into(buffer, small, deadline=deadline)
        assert buffer[:12] == body
    assert connection.usable


def test_a_bad_response_is_named_after_its_own_request(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([0.2, head() + BODY + bytes(8)], [])
    deadline = time.monotonic() + 10
    for _ in range(2):
        connection.send(REQUEST.path, deadline=deadline)
    with pytest.raises(errors.ResponseCorrupt, match=r"request [0-9a-f]{12}-1$"):
        connection.receive_into(buffer, REQUEST, deadline=deadline)


def test_an_error_ends_a_connection_with_another_response_to_come(
    buffer: memoryview, connect: Connect
) -> None:
    problem = b'{"type": "overloaded"}'
    response = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n" % len(problem)
    response += b"Content-Type: application/problem+json\r\n\r\n" + problem
    _, connection = connect([0.2, response + b"HTTP/1.1 200"], [])
    deadline = time.monotonic() + 10
    for _ in range(2):
        connection.send(REQUEST.path, deadline=deadline)
    with pytest.raises(errors.ServerError):
        connection.receive_into(buffer, REQUEST, deadline=deadline)
    assert not connection.usable


def test_abort_wakes_a_blocked_reader(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head() + BODY[:5], 30.0])
    threading.Timer(0.1, connection.abort).start()
    with pytest.raises((errors.ConnectionFailed, errors.ResponseCorrupt)):  # not NoProgress
        receive(connection, buffer, seconds=30)


def test_abort_wakes_a_blocked_connect(black_hole: str) -> None:
    connection = Connection(Endpoint.parse(black_hole))
    threading.Timer(0.1, connection.abort).start()
    with pytest.raises(errors.ConnectionFailed):  # not NoProgress
        connection.send("/", deadline=time.monotonic() + 30)


def test_a_connection_that_was_aborted_is_not_used(connect: Connect) -> None:
    server, connection = connect([head()])
    connection.open(time.monotonic() + 10)
    connection.abort()
    assert not connection.usable
    with pytest.raises(errors.ConnectionFailed):
        connection.send("/", deadline=time.monotonic() + 10)
    assert server.requests == []
    for _ in range(2):
        connection.close()


def test_nobody_there_is_told_without_a_request(tmp_path: Path) -> None:
    connection = Connection(Endpoint.parse(f"uds://{tmp_path}/none.sock"))
    with pytest.raises(errors.ConnectionFailed) as caught:
        connection.open(time.monotonic() + 10)
    text = f"uds://{tmp_path}/none.sock: No such file or directory"
    assert (str(caught.value), caught.value.stale) == (text, False)


def test_connect_keeps_to_the_deadline(black_hole: str) -> None:
    connection = Connection(Endpoint.parse(black_hole))
    started = time.monotonic()
    with pytest.raises(errors.NoProgress):
        connection.send("/", deadline=started + 0.3)
    assert 0.25 < time.monotonic() - started < 10
    with pytest.raises(errors.NoProgress, match=r"nothing came in time \(timed out\)$"):
        Connection(Endpoint.parse(black_hole)).open(started)


def test_a_unix_socket_is_connected_to_by_its_url(tmp_path: Path, buffer: memoryview) -> None:
    path = tmp_path / "a?b.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        connection = Connection(Endpoint.parse(f"uds://{quote(str(path))}"))
        connection.send(REQUEST.path, deadline=time.monotonic() + 10)
        peer, _ = listener.accept()
        with peer:
            assert peer.recv(65536).startswith(b"GET /x HTTP/1.1\r\nHost: localhost\r\n")
            threading.Thread(target=peer.sendall, args=(head() + BODY + TAIL,)).start()
            connection.receive_into(buffer, REQUEST, deadline=time.monotonic() + 10)
        assert buffer[: len(BODY)] == BODY
        connection.close()
    connection = Connection(Endpoint.parse(f"uds://{quote(str(path))}"))
    with pytest.raises(errors.ConnectionFailed, match=r"uds://.*a%3Fb.sock: Connection refused"):
        connection.send(REQUEST.path, deadline=time.monotonic() + 10)


def test_whether_a_response_has_arrived_is_known_without_waiting(
    buffer: memoryview, connect: Connect
) -> None:
    response = head() + BODY + TAIL
    asked = threading.Event()
    _, connection = connect([asked, response[:30], 0.1, response[30:]])
    deadline = time.monotonic() + 30
    connection.send(REQUEST.path, deadline=deadline)
    assert not connection.arrived()
    asked.set()
    wait_for(connection)
    connection.receive_into(buffer, REQUEST, deadline=deadline)
    assert buffer[: len(BODY)] == BODY
    assert not connection.arrived()


def test_nothing_is_sent_when_the_time_is_over_or_the_connection_was_closed(connect: Connect) -> None:
    server, connection = connect([head()])
    connection.open(time.monotonic() + 30)
    with pytest.raises(errors.TransportError, match="the time for this attempt is over"):
        connection.send(REQUEST.path, deadline=time.monotonic() - 1)
    assert not connection.usable
    assert server.requests == []
