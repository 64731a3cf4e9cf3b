"""One request that the ASGI application answers: its messages on one side, bytes on the other.

receive   what has come of the body; 100 Continue when the application first waits for one; the error of a
          body that is cut or cannot be parsed; `http.disconnect` once the client has left or the response is
          complete
send      framed by Content-Length, else in chunks (HTTP/1.0: by the end of the connection); returns when the
          kernel has taken it
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Scope
from starlette.types import Message as AsgiMessage

from corpus_server.errors import BadRequest, CorpusServerError
from corpus_server.http.exchange import LEFT_SECONDS, Line
from corpus_server.http.message import Message
from corpus_server.responses.own_errors import log_error
from corpus_server.responses.response import Buffer, status_line
from corpus_server.work import ClientLeft

LINE = "line"
"""Key of the connection in a request's `scope["state"]`."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS = {204, 304}


class Bridge:
    """One request and its response.

    Args:
        line: the connection; is told what the response says of its end.
        message: the request, whose body is parsed when the application asks for it.
    """

    def __init__(self, line: Line, message: Message) -> None:
        self._line = line
        self._message = message
        self._request = message.head
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        expects = self._request.headers.get("expect", "").lower()
        self._awaits_continue = expects == "100-continue" and message.version == "1.1"
        self._body_read = False  # by the application, to its end
        self._body_error: CorpusServerError | None = None
        self._complete = False
        self._told = False  # the application, that the client has left
        self._head = b""
        self._is_bodiless = self._chunked = False
        self._left_bytes: int | None = None  # of Content-Length; None: the body has no length

    async def run(self, app: ASGIApp) -> None:
        """Call the application; raise its error unless its response is complete."""
        try:
            await app(self._scope(), self.receive, self.send)
            if not self._complete:
                raise RuntimeError("the application sent no whole response")
        except Exception as error:
            if self._complete:
                log_error(error, self._request)
                return
            self._line.ends = True
            if self._told or self._line.left:
                raise ClientLeft("the client left") from error
            raise

    async def receive(self) -> AsgiMessage:
        """Return what comes next from the client; see the module."""
        while True:
            if self._body_error is not None:
                raise self._body_error
            if self._line.left or self._told or self._complete:
                return {"type": "http.disconnect"}
            if not self._body_read and (self._message.complete or self._line.received):
                body = self._feed()
                self._body_read = self._message.complete
                return {"type": "http.request", "body": body, "more_body": not self._body_read}
            # A body that is not whole when the client stops sending will never be.
            patience = LEFT_SECONDS if self._message.complete else 0.0
            leaves_at = max(self._line.eof_at, self._began) + patience
            if self._loop.time() >= leaves_at:
                # Nobody reads the body of a GET: who waits for it here watches whether the client leaves.
                if self._message.complete or self._line.begun or self._request.method != "POST":
                    self._told = True
                else:
                    what = "the client stopped sending before the end of the request's body"
                    self._body_error = BadRequest(what)
                continue
            if self._awaits_continue and not self._line.begun and not self._message.complete:
                self._awaits_continue = False
                self._line.transport.write(_CONTINUE)
            await self._line.wait(leaves_at)

    def _feed(self) -> bytes:
        """Parse what has come of the body, if there is more to come."""
        if self._message.complete:
            return b""
        try:
            body, self._line.received = self._message.feed(self._line.received)
        except CorpusServerError as error:
            self._body_error = error
            raise
        return body

    async def send(self, message: AsgiMessage) -> None:
        """Send a part of the response.

        Raises:
            ClientLeft: the client has left.
            RuntimeError: the messages are not those of one response, or its body has another length.
        """
        if message["type"] == "http.response.start":
            self._head = self._begin(message["status"], list(message.get("headers", ())))
            return
        if self._told:
            raise ClientLeft("the client left")
        more = message.get("more_body", False)
        parts: list[Buffer] = [self._head, *self._framed(message.get("body", b""), more=more)]
        self._head = b""
        self._line.begun = True
        await self._line.send(parts)
        self._complete = not more

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Decide how the body is framed; return the head."""
        if self._body_error is None:
            try:
                self._feed()  # a small body that nobody reads is dropped
            except CorpusServerError as error:
                log_error(error)
        fields = dict(headers)
        # Any other body that nobody has read ends the connection: else it would be received and dropped.
        if not self._message.complete or fields.get(b"connection") == b"close":
            self._line.ends = True
        length = fields.get(b"content-length")
        self._is_bodiless = self._request.method == "HEAD" or status in _BODILESS
        self._left_bytes = None if length is None else int(length)
        if length is None and not self._is_bodiless:
            self._chunked = self._message.version == "1.1"
            if self._chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self._line.ends = True
        lines = [b"%b: %b\r\n" % each for each in headers if each[0] != b"connection"]
        lines += [b"%b: %b\r\n" % each for each in self._line.headers]
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
        path, _, query = self._request.target.partition(b"?")
        transport = self._line.transport
        peer, own_address = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._message.version,
            "method": self._request.method,
            "scheme": "https" if self._line.is_tls else "http",
            "path": self._request.decoded_path,
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._message.lines,
            "client": peer[:2] if isinstance(peer, tuple) else None,
            "server": own_address[:2] if isinstance(own_address, tuple) else None,
            "state": {LINE: self._line},
        }
