"""One connection: exact bytes into the buffer it is handed, or an error and a closed socket."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import xxhash

from corpus_client import errors
from corpus_client.network import wire
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from corpus_client.network.transport import Connection, first_to_answer

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


class ScriptedServer:
    """Accepts connections one after another; answers each request with the next script.

    A script is a list of bytes to send, numbers of seconds to wait, and "close".
    """

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = iter(scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.requests: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                self._talk(peer)

    def _talk(self, peer: socket.socket) -> None:
        while received := peer.recv(65536):
            self.requests.append(received)
            for part in next(self._scripts, ["close"]):
                if part == "close":
                    return
                if isinstance(part, bytes):
                    peer.sendall(part)
                else:
                    time.sleep(part)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def buffer() -> memoryview:
    return memoryview(bytearray(len(BODY) + 64))


Connect = Callable[..., tuple[ScriptedServer, Connection]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A scripted server and a connection to it, both closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(*scripts: list[Any], **options: float) -> tuple[ScriptedServer, Connection]:
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


def test_body_lies_at_the_start_of_the_buffer_and_nowhere_else(buffer: memoryview, connect: Connect) -> None:
    server, connection = connect(
        [head() + BODY + TAIL], [head(), 0.01, BODY[:7], 0.01, BODY[7:] + TAIL[:3], 0.01, TAIL[3:]]
    )
    for _ in range(2):
        buffer[:] = bytes(len(buffer))
        receive(connection, buffer)
        assert buffer[: len(BODY)] == BODY
        assert bytes(buffer[len(BODY) :]) == bytes(64)
    assert server.requests[0].startswith(b"GET /data/x HTTP/1.1\r\n")
    assert len(server.requests) == 2
    assert connection.usable


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ([head(), BODY[:-1], "close"], errors.AnswerCorrupt, "it ended after 1048575"),
        ([head() + BODY[:-1] + b"\0" + TAIL], errors.AnswerCorrupt, "checksum"),
        ([head() + BODY + bytes(8)], errors.AnswerCorrupt, "checksum"),
        ([head() + BODY + TAIL[:5], "close"], errors.AnswerCorrupt, "it ended after 5"),
        ([head(Content_Length="7") + BODY], errors.AnswerCorrupt, "content-length"),
        ([head(Corpus_Shape="1")], errors.AnswerCorrupt, "corpus-shape"),
        ([head(Corpus_Plan="cd")], errors.AnswerCorrupt, "corpus-plan"),
        (
            [CHUNKED],
            errors.AnswerCorrupt,
            "content-l",
        ),
        ([b"nonsense\r\n\r\n"], errors.AnswerCorrupt, "status line of HTTP/1.1, got b'nonsense"),
        (["close"], errors.ConnectionFailed, "closed connection"),
        ([head()[:40], "close"], errors.ConnectionFailed, "after 40 bytes"),
        ([head(Padding="x" * 70_000)], errors.AnswerCorrupt, "the head must have at most"),
        ([0.7], errors.NoProgress, "nothing came in time"),
        ([head() + BODY[:9], 0.7], errors.NoProgress, "nothing came in time"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:12],
)
def test_bad_answers(
    script: list[Any], kind: type[Exception], message: str, buffer: memoryview, connect: Connect
) -> None:
    _, connection = connect(script, progress_seconds=0.3)
    with pytest.raises(kind, match=message):
        receive(connection, buffer)
    assert not connection.usable


def test_drip_does_not_outlast_the_deadline(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head(), *[b"x", 0.02] * 100], progress_seconds=5)
    started = time.monotonic()
    with pytest.raises(errors.NoProgress):
        receive(connection, buffer, seconds=0.3)
    assert time.monotonic() - started < 0.6


def test_problem_keeps_the_connection(buffer: memoryview, connect: Connect) -> None:
    problem = b'{"type": "overloaded", "detail": "full"}'
    answer = (
        b"HTTP/1.1 503 Busy\r\nContent-Type: application/problem+json\r\nRetry-After: 2\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(problem), problem)
    )
    _, connection = connect([answer], [head() + BODY + TAIL])
    with pytest.raises(errors.ServerError, match="full") as caught:
        receive(connection, buffer)
    assert caught.value.retry_after_seconds == 2
    assert connection.usable
    receive(connection, buffer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Busy\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 70000\r\n\r\n" + bytes(70_000),
        b"HTTP/1.1 503 Busy\r\nContent-Length: 1\r\nConnection: close\r\n\r\n1",
    ],
    ids=["no length", "nonsense", "too long", "close"],
)
def test_a_failure_whose_end_is_not_known_ends_the_connection(
    answer: bytes, buffer: memoryview, connect: Connect
) -> None:
    _, connection = connect([answer, 0.2])
    with pytest.raises(errors.ServerError):
        receive(connection, buffer)
    assert not connection.usable


def test_a_server_may_end_the_connection_with_an_answer(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head(Connection="close") + BODY + TAIL, 0.2])
    receive(connection, buffer)
    assert not connection.usable


def test_nothing_may_come_behind_the_last_answer(buffer: memoryview, connect: Connect) -> None:
    """It would be taken for the beginning of the next one."""
    small = wire.ArrayRequest(path="x", shape=(3,), dtype="uint8", plan_id="ab")
    answer = head(Corpus_Shape="3", Content_Length="11") + b"abc" + xxhash.xxh3_64_digest(b"abc")
    _, connection = connect([answer + b"d", 0.2])
    connection.send(small.path, deadline=time.monotonic() + 10)
    with pytest.raises(errors.AnswerCorrupt, match="more came"):
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


def test_a_connection_that_has_not_served_is_not_stale() -> None:
    """Else a server that hangs up would be asked again at once, thousands of times a second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(Endpoint.parse(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        deadline = time.monotonic() + 10
        connection.send(REQUEST.path, deadline=deadline)
        peer, _ = listener.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        assert connection.peek(), "the reset has arrived"
        with pytest.raises(errors.ConnectionFailed) as caught:
            connection.send(REQUEST.path, deadline=deadline)
        assert not caught.value.stale


def test_answers_come_in_the_order_of_the_requests(buffer: memoryview, connect: Connect) -> None:
    small = wire.ArrayRequest(path="x", shape=(3, 4), dtype="uint8", plan_id="ab")
    answer = head(Corpus_Shape="3,4", Content_Length="20")
    first, second = bytes(range(12)), bytes(range(12, 24))
    together = answer + first + xxhash.xxh3_64_digest(first) + answer + second
    _, connection = connect([0.2, together, 0.05, xxhash.xxh3_64_digest(second)], [])
    deadline = time.monotonic() + 10
    for _ in range(2):
        connection.send(small.path, deadline=deadline)
    for body in (first, second):
        connection.receive_into(buffer, small, deadline=deadline)
        assert buffer[:12] == body
    assert (connection.num_waiting, connection.usable) == (0, True)


def test_an_error_ends_a_connection_with_another_answer_to_come(buffer: memoryview, connect: Connect) -> None:
    problem = b'{"type": "overloaded"}'
    answer = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n" % len(problem)
    answer += b"Content-Type: application/problem+json\r\n\r\n" + problem
    _, connection = connect([0.2, answer + b"HTTP/1.1 200"], [])
    deadline = time.monotonic() + 10
    for _ in range(2):
        connection.send(REQUEST.path, deadline=deadline)
    with pytest.raises(errors.ServerError):
        connection.receive_into(buffer, REQUEST, deadline=deadline)
    assert not connection.usable


def test_abort_wakes_a_blocked_reader(buffer: memoryview, connect: Connect) -> None:
    _, connection = connect([head() + BODY[:5], 5.0])
    threading.Timer(0.1, connection.abort).start()
    started = time.monotonic()
    with pytest.raises((errors.ConnectionFailed, errors.AnswerCorrupt)):
        receive(connection, buffer)
    assert time.monotonic() - started < 1


def test_abort_wakes_a_blocked_connect(black_hole: str) -> None:
    connection = Connection(Endpoint.parse(black_hole))
    threading.Timer(0.1, connection.abort).start()
    started = time.monotonic()
    with pytest.raises(errors.ConnectionFailed):
        connection.send("/", deadline=started + 5)
    assert time.monotonic() - started < 1


def test_tcp_keeps_idle_connections_alive(connect: Connect) -> None:
    """A firewall on the way forgets a connection that is silent while the loop computes."""
    _, connection = connect()
    connection.open(time.monotonic() + 10)
    assert connection._open_socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_connect_keeps_to_the_deadline(black_hole: str) -> None:
    connection = Connection(Endpoint.parse(black_hole))
    started = time.monotonic()
    with pytest.raises(errors.NoProgress):
        connection.send("/", deadline=started + 0.3)
    assert 0.25 < time.monotonic() - started < 0.6


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://data:8000", "data", 8000, ""),
        ("http://data/", "data", 80, ""),
        ("https://data/a/b/", "data", 443, "/a/b"),
        ("http://[::1]:9", "::1", 9, ""),
    ],
)
def test_endpoint(url: str, host: str, port: int, prefix: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.prefix) == (host, port, prefix)
    assert (endpoint.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("uds:///run/corpus.sock", "/run/corpus.sock"),
        ("uds:///run/corpus.sock/", "/run/corpus.sock"),
        ("UDS:///run/a%20b%3F%23%25.sock", "/run/a b?#%.sock"),
        ("uds:///run/a b.sock", "/run/a b.sock"),
        ("uds:///run/gr%C3%B6\u00dfer", "/run/gr\u00f6\u00dfer"),
        ("uds:///" + "x" * 106, "/" + "x" * 106),
    ],
)
def test_endpoint_of_a_unix_socket(url: str, path: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.socket_path, endpoint.prefix, endpoint.tls) == (path, "", None)
    assert endpoint.http_url == "http://localhost"
    assert endpoint.url == url.rstrip("/")
    assert endpoint.address == (socket.AF_UNIX, path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("uds://run/corpus.sock", "three slashes"),
        ("uds:/run/corpus.sock", "three slashes"),
        ("uds:corpus.sock", "three slashes"),
        ("uds://", "three slashes"),
        ("uds:///", "three slashes"),
        ("uds:///a?b", "%3F"),
        ("uds:///a#b", "three slashes"),
        ("uds:///a%00b", "three slashes"),
        ("uds:///" + "x" * 107, "at most 107 bytes.*got 108"),
        ("uds:///" + "%C3%9F" * 54, "got 109"),
        ("unix:///run/corpus.sock", "uds:///path/of.sock"),
    ],
)
def test_wrong_url_of_a_unix_socket_is_refused(url: str, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        Endpoint.parse(url)


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
    with pytest.raises(errors.ConnectionFailed, match=r"uds://.*a%3Fb.sock: ConnectionRefusedError"):
        connection.send(REQUEST.path, deadline=time.monotonic() + 10)


@pytest.mark.parametrize(
    "url",
    ["", "data:8000", "ftp://data", "http://", "http://data:port", "http://data/?q=1", "http://u:p@data"],
)
def test_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="url must"):
        Endpoint.parse(url)


def test_the_first_to_answer_is_waited_for_as_long_as_it_is_told(
    buffer: memoryview, connect: Connect
) -> None:
    """And no shorter: else a late answer would be hedged at once, again and again."""
    (_, silent), (_, quick) = connect([60]), connect([head()])
    deadline = time.monotonic() + 30
    silent.send(REQUEST.path, deadline=deadline)
    for seconds in (0.0, 0.1):
        started = time.monotonic()
        assert first_to_answer([silent], seconds) is None
        assert time.monotonic() - started >= seconds
    quick.send(REQUEST.path, deadline=deadline)
    assert first_to_answer([silent, quick], 30) is quick
    silent.close()
    assert first_to_answer([silent], 30) is silent


def test_nothing_is_sent_when_the_time_is_over_or_the_connection_was_closed(connect: Connect) -> None:
    server, connection = connect([head()])
    connection.open(time.monotonic() + 30)
    with pytest.raises(errors.TransportError, match="the time for this attempt is over"):
        connection.send(REQUEST.path, deadline=time.monotonic() - 1)
    assert not connection.usable
    with pytest.raises(ConnectionAbortedError):
        connection.fileno()
    assert server.requests == []
