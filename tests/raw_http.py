"""Requests as bytes over a plain socket, and responses read strictly by their framing."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import numpy as np

from tests.serving import RunningServer

END = b"\r\n\r\n"
PART_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class RawResponse:
    """One whole response.

    Args:
        status: of the status line.
        headers: by lower-case name; a repeated name is an error.
        body: exactly `Content-Length` bytes; empty for HEAD and 304.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)


class Ended(Exception):
    """The connection ended where a response, or the rest of one, was expected.

    Args:
        head: the response's status line and headers as far as they came.
        body: what came of the body.
    """

    def __init__(self, head: bytes, body: bytes) -> None:
        super().__init__(f"the connection ended after {head!r} and {len(body)} bytes of a body")
        self.head = head
        self.body = body


class RawConnection:
    """A socket to a server on loopback; whatever is not a framed HTTP/1.1 response fails the test.

    Args:
        server: to connect to.
        timeout: seconds that a single send or receive may take.
        receive_buffer: bytes of the kernel's buffer; small, so that the server notices a slow reader.
    """

    def __init__(
        self, server: RunningServer, *, timeout: float = 30.0, receive_buffer: int | None = None
    ) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        try:
            self.socket.connect(("127.0.0.1", server.port))
        except OSError:
            self.socket.close()
            raise
        # A head that is cut into pieces must arrive in pieces.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.tls is not None:
            self.socket = server.tls.wrap_socket(self.socket)
        self._received = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, *requests: bytes) -> None:
        """Send all requests in one call."""
        self.socket.sendall(b"".join(requests))

    def send_slowly(self, data: bytes, pause_seconds: float = 0.0) -> None:
        """Send one byte at a time."""
        for k in range(len(data)):
            self.socket.sendall(data[k : k + 1])
            if pause_seconds:
                time.sleep(pause_seconds)

    def read(
        self, *, bodiless: bool = False, pause_seconds: float = 0.0, part: int = PART_BYTES
    ) -> RawResponse:
        """Read the next response.

        Args:
            bodiless: whether it answers a HEAD request.
            pause_seconds: to wait between two receives, as a slow reader does.
            part: bytes to receive at a time.

        Raises:
            Ended: the connection ended before the response did.
            AssertionError: what came is no framed response.
        """
        status, headers, length = self._read_head(part)
        if bodiless or status == 304:
            return RawResponse(status, headers, b"")
        body = bytearray(self._received[:length])
        del self._received[:length]
        while len(body) < length:
            received = self._receive(min(part, length - len(body)))
            if not received:
                raise Ended(f"HTTP/1.1 {status} {headers}".encode(), bytes(body))
            body += received
            if pause_seconds:
                time.sleep(pause_seconds)
        return RawResponse(status, headers, bytes(body))

    def await_some(self, num_bytes: int) -> None:
        """Wait until something of the next response is there; receive at most `num_bytes` for that."""
        if not self._received:
            self._received += self._receive(num_bytes)

    def read_or_end(self) -> RawResponse | Ended:
        """Read the next response, or return how the connection ended before it did."""
        try:
            return self.read()
        except Ended as ended:
            return ended

    def read_to_end(self) -> bytes:
        """Return everything that comes until the connection ends, framed or not."""
        received = bytearray(self._received)
        self._received.clear()
        while part := self._receive(PART_BYTES):
            received += part
        return bytes(received)

    def ended(self) -> bool:
        """Wait for the end of the connection; return whether nothing more came before it."""
        return not self.read_to_end()

    def reset(self) -> None:
        """Close with a TCP reset, as a killed client's kernel does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Close; idempotent."""
        self.socket.close()

    def _receive(self, num_bytes: int) -> bytes:
        # A server that closes while unread requests wait resets the connection: an end like any other.
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            return self.socket.recv(num_bytes)
        return b""

    def _read_head(self, part: int) -> tuple[int, dict[str, str], int]:
        searched = 0
        while (end := self._received.find(END, searched)) < 0:
            searched = max(0, len(self._received) - len(END))
            received = self._receive(part)
            if not received:
                raise Ended(bytes(self._received), b"")
            self._received += received
            assert len(self._received) < PART_BYTES + 65536, f"no head: {bytes(self._received[:200])!r}"
        head = bytes(self._received[:end])
        del self._received[: end + len(END)]
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        assert version == "HTTP/1.1", f"no status line: {head[:200]!r}"
        assert rest[:3].isdigit(), f"no status line: {head[:200]!r}"
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            assert colon, f"no header: {line!r}"
            assert name.lower() not in headers, f"{name} came twice: {head!r}"
            headers[name.lower()] = value.strip()
        status = int(rest[:3])
        if status == 304:
            return status, headers, 0
        assert "content-length" in headers, f"not framed by its length: {head!r}"
        assert "transfer-encoding" not in headers, f"framed twice: {head!r}"
        return status, headers, int(headers["content-length"])


def get(
    path: str, *lines: str, method: str = "GET", version: str = "1.1", host: bool = True, **query: object
) -> bytes:
    """Return the bytes of a request.

    Args:
        path: the target, or what stands before its query.
        lines: more header lines.
        host: whether to send `Host: x`.
        query: parameters, in order.
    """
    target = path + ("?" + urlencode(query) if query else "")
    head = [f"{method} {target} HTTP/{version}", *(["Host: x"] if host else []), *lines, "", ""]
    return "\r\n".join(head).encode("latin-1")


def post(path: str, body: bytes) -> bytes:
    """Return the bytes of a POST request with its body."""
    return get(path, f"Content-Length: {len(body)}", method="POST") + body


def check_raw_problem(response: RawResponse, status: int, slug: str | None = None) -> dict[str, Any]:
    """Check that a response is a complete problem document (RFC 9457) and return it."""
    assert response.headers.get("content-type") == "application/problem+json", response
    document: dict[str, Any] = response.json()
    assert (response.status, document["status"]) == (status, status), document
    assert document["type"], document
    assert document["detail"], document
    assert document["request_id"] == response.headers["x-request-id"], response
    if slug is not None:
        assert document["type"] == slug, document
    return document


def check_bytes(got: bytes, right: bytes) -> None:
    """Fail with the first difference; a plain `==` would print megabytes."""
    if got == right:
        return
    shortest = min(len(got), len(right))
    differs = np.frombuffer(got, np.uint8, shortest) != np.frombuffer(right, np.uint8, shortest)
    first = int(differs.argmax()) if differs.any() else shortest
    raise AssertionError(
        f"{len(got)} bytes came for {len(right)}; from byte {first} on {got[first : first + 80]!r} "
        f"for {right[first : first + 80]!r}"
    )
