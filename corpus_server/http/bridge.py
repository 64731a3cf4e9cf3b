"""One request that the ASGI application answers: its messages on one side, bytes on the other.

receive   what has come of the body; 100 Continue when the application first waits for one; the error of a
          body that cannot be parsed; `http.disconnect` once the client has left or the response is complete
send      framed by Content-Length, else in chunks (HTTP/1.0: by the end of the connection); returns when the
          kernel has taken it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol
from urllib.parse import unquote

from starlette.types import ASGIApp, Scope
from starlette.types import Message as AsgiMessage

from corpus_server.answers.response import Buffer, ClientLeft, status_line
from corpus_server.errors import CorpusServerError
from corpus_server.http.exchange import log_error
from corpus_server.http.message import Message

MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of a body that wait for the application; the connection is not read beyond."""

TRANSPORT = "transport"
"""Key of the connection's transport in a request's `scope["state"]`."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS = {204, 304}

_log = logging.getLogger("corpus_server")


class Line(Protocol):
    """The connection, as its request sees it."""

    transport: asyncio.Transport
    is_tls: bool
    ends: bool  # with the response under way

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the connection, which each of its responses has."""

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send; return whether the kernel has taken all, else `Bridge.resume` follows."""


class Bridge:
    """One request and its response.

    Args:
        connection: sends, and is told what the response says of its end.
        message: the request; its body follows by `feed`.

    Attributes:
        started: whether the head of the response was sent.
        complete: whether the whole response was.
        left: whether the client has left.
        failure: what the application raised.
        body_error: why the rest of the body cannot be parsed.
    """

    def __init__(self, connection: Line, message: Message) -> None:
        self.request = message.head
        self.started = self.complete = self.left = False
        self.failure: Exception | None = None
        self._connection = connection
        self._message = message
        self._body = bytearray()
        self._body_complete = message.complete
        self.body_error: CorpusServerError | None = None
        expects = self.request.headers.get("expect", "").lower()
        self._awaits_continue = expects == "100-continue" and message.version == "1.1"
        self._something = asyncio.Event()  # has come, for `receive`
        self._taken = asyncio.Event()  # has what was sent
        self._body_read = False  # to its end
        self._head = b""
        self._is_bodiless = self._chunked = False
        self._left_bytes: int | None = None  # of Content-Length; None: the body has no length

    async def run(self, app: ASGIApp) -> None:
        """Call the application; what it raises becomes `failure`."""
        try:
            await app(self._scope(), self.receive, self.send)
        except Exception as error:  # noqa: BLE001 - the connection answers for it
            self.failure = error
            cause = error.__cause__ or error  # the framework's own error, if a response had begun
            if isinstance(cause, CorpusServerError):
                log_error(cause)
            elif not (self.left or isinstance(cause, ClientLeft)):
                _log.error("%s failed", self.request.path.decode("latin-1"), exc_info=error)
        except BaseException as error:  # the loop ends
            self.failure = RuntimeError(repr(error))
            raise

    def feed(self, body: bytes, *, complete: bool) -> None:
        """Take some of the body."""
        self._awaits_continue = False
        self._body += body
        self._body_complete = complete
        if len(self._body) > MAX_UNREAD_BYTES:
            self._connection.transport.pause_reading()
        self._something.set()

    def fail(self, error: CorpusServerError) -> None:
        """Note that the body cannot be parsed: whoever reads it gets the error."""
        self.body_error = error
        self._connection.transport.pause_reading()  # the rest is dropped once the response is sent
        self._something.set()

    def disconnect(self) -> None:
        """Note that the client has left."""
        self.left = True
        self._something.set()
        self._taken.set()

    def resume(self) -> None:
        """Go on: the kernel has taken what was sent."""
        self._taken.set()

    async def receive(self) -> AsgiMessage:
        """Return what comes next from the client; see the module."""
        while True:
            if self.body_error is not None:
                raise self.body_error
            if self.left or self.complete:
                return {"type": "http.disconnect"}
            if self._body or (self._body_complete and not self._body_read):
                body, self._body = bytes(self._body), bytearray()
                self._body_read = self._body_complete
                return {"type": "http.request", "body": body, "more_body": not self._body_read}
            if self._awaits_continue and not self.started:
                self._awaits_continue = False
                self._connection.send([_CONTINUE])
            self._something.clear()
            self._connection.transport.resume_reading()
            await self._something.wait()

    async def send(self, message: AsgiMessage) -> None:
        """Send a part of the response.

        Raises:
            ClientLeft: the client has left.
            RuntimeError: the messages are not those of one response, or its body has another length.
        """
        if message["type"] == "http.response.start":
            self._head = self._begin(message["status"], list(message.get("headers", ())))
            return
        if self.left:
            raise ClientLeft("the client left")
        more = message.get("more_body", False)
        parts: list[Buffer] = [self._head, *self._framed(message.get("body", b""), more=more)]
        self._head = b""
        self.started = True
        self._taken.clear()
        if any(parts) and not self._connection.send(parts):
            await self._taken.wait()
        if self.left:
            raise ClientLeft("the client left")
        if not more:
            self.complete = True
            self._something.set()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Decide how the body is framed; return the head."""
        fields = dict(headers)
        # A body that nobody has read ends the connection: else it would be received and dropped.
        if not self._body_complete or fields.get(b"connection") == b"close":
            self._connection.ends = True
        length = fields.get(b"content-length")
        self._is_bodiless = self.request.method == "HEAD" or status in _BODILESS
        self._left_bytes = None if length is None else int(length)
        if length is None and not self._is_bodiless:
            self._chunked = self._message.version == "1.1"
            if self._chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self._connection.ends = True
        lines = [b"%b: %b\r\n" % each for each in headers if each[0] != b"connection"]
        lines += [b"%b: %b\r\n" % each for each in self._connection.headers]
        if any(b"\n" in line[:-2] or b"\r" in line[:-2] for line in lines):
            raise RuntimeError("a header of the response has a line break")
        return b"".join([status_line(status).encode(), *lines, b"\r\n"])

    def _framed(self, body: bytes, *, more: bool) -> list[Buffer]:
        """Return a part of the body as it is sent."""
        if self._is_bodiless:
            return []
        if self._chunked:
            chunk: list[Buffer] = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            return chunk if more else [*chunk, b"0\r\n\r\n"]
        if self._left_bytes is not None:
            self._left_bytes -= len(body)
            if self._left_bytes < 0 or (self._left_bytes and not more):
                raise RuntimeError(f"the response lacks {self._left_bytes} bytes of its Content-Length")
        return [body]

    def _scope(self) -> Scope:
        path, _, query = self.request.target.partition(b"?")
        transport = self._connection.transport
        peer, here = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._message.version,
            "method": self.request.method,
            "scheme": "https" if self._connection.is_tls else "http",
            "path": unquote(path.decode("latin-1")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._message.lines,
            "client": peer[:2] if isinstance(peer, tuple) else None,
            "server": here[:2] if isinstance(here, tuple) else None,
            "state": {TRANSPORT: transport},
        }
