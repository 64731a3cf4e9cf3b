"""httpx over a Unix socket: whole answers, errors that httpx's callers expect, no socket left behind."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from corpus_client.unix import UnixTransport
from tests.client.conftest import num_descriptors


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "a.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


def client(path: Path, timeout_seconds: float = 10) -> httpx.Client:
    transport = UnixTransport(str(path), timeout_seconds=timeout_seconds)
    return httpx.Client(base_url="http://localhost", transport=transport)


def answer_once(listener: socket.socket, answer: bytes) -> list[bytes]:
    """Answer the next connection; what it sent is in the list afterwards."""
    received: list[bytes] = []

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            received.append(peer.recv(65536))
            if b"POST" in received[0] and not received[0].endswith(b"}"):
                received.append(peer.recv(65536))
            peer.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return received


def test_request_and_answer(path: Path, listener: socket.socket) -> None:
    body = b'{"a": 1}'
    received = answer_once(listener, b"HTTP/1.1 201 Made\r\nX-It: 7\r\nContent-Length: 8\r\n\r\n" + body)
    with client(path) as http:
        answer = http.request("POST", "/v1/plans?x=%20y", json={"b": 2}, headers={"Authorization": "it"})
    assert (answer.status_code, answer.headers["x-it"], answer.json()) == (201, "7", {"a": 1})
    sent = b"".join(received)
    assert sent.startswith(b"POST /v1/plans?x=%20y HTTP/1.1\r\n")
    assert sent.endswith(b'\r\n\r\n{"b":2}')
    assert {b"host: localhost", b"content-length: 7", b"authorization: it"} <= set(
        sent.lower().split(b"\r\n")
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "IncompleteRead"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_a_broken_answer_is_a_transport_error(
    path: Path, listener: socket.socket, answer: bytes, message: str
) -> None:
    answer_once(listener, answer)
    with client(path) as http, pytest.raises(httpx.TransportError, match=message):
        http.get("/")


def test_a_server_that_says_nothing_is_a_timeout(path: Path, listener: socket.socket) -> None:
    with client(path, timeout_seconds=0.2) as http, pytest.raises(httpx.TimeoutException):
        http.get("/")


def test_attempts_that_fail_leave_no_descriptor(path: Path) -> None:
    with client(path) as http:
        before = num_descriptors()
        for _ in range(50):
            with pytest.raises(httpx.NetworkError, match="FileNotFoundError"):
                http.get("/")
        assert num_descriptors() == before
