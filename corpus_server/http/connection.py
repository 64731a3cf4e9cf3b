"""One HTTP/1.1 connection: its requests are answered strictly one after another, by one task.

    state      in            what happens                                ends with
    reading    `_read`       waits for a request, or its whole head      a head; an error; idle time-out
    answering  `_answer`     an `Exchange` makes and sends the response  all sent; an error; the client leaves
               `Bridge.run`  the ASGI application does                   all sent; an error; the client leaves
               `_refuse`     the problem document of an error is sent    all sent; the client leaves
    lingering  `_linger`     drops what the client still sends           the client closes; `LINGER_SECONDS`
    closed                   nothing                                     -

While a response is under way, what follows its request waits unparsed, and reading stops above
`MAX_WAITING_BYTES`. At any moment one party writes: a gather thread, or the loop. Under TLS, and where no
descriptor is left for a thread, the loop sends everything.

Whatever fails ends its request: with a 500 if nothing of a response was sent, else the connection is cut, so
that the client sees a body shorter than Content-Length.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from fcntl import ioctl
from functools import partial
from itertools import chain
from termios import TIOCOUTQ
from typing import Any, Protocol, cast

from starlette.types import ASGIApp

from corpus_server import metrics
from corpus_server.admission.request import MAX_HEAD_BYTES, RequestHead, request_id_in
from corpus_server.errors import BadRequest, CorpusServerError, RequestTimeout
from corpus_server.http.bridge import Bridge
from corpus_server.http.exchange import LEFT_SECONDS, ROUTES, Exchange, respond
from corpus_server.http.message import END, Message, too_large
from corpus_server.http.send import widen
from corpus_server.responses.own_errors import log_error
from corpus_server.responses.problem import problem
from corpus_server.responses.requests import CLIENT_LEFT
from corpus_server.responses.response import Answered, Buffer
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import TOKEN_LIMITS
from corpus_server.work import ClientLeft

MAX_WAITING_BYTES = 64 * 1024
"""Bytes that wait behind a request, of its body or of pipelined ones; the connection is not read beyond."""

LINGER_SECONDS = 2.0
"""A client that is still sending may read the last response for so long. After close(2) a reset would
overtake that."""

MAX_DROPPED_BYTES = 64 * 2**20
"""Twice the largest plan: a client that sends all of a body before it reads learns why it was refused."""

LAST_REQUEST_SECONDS = 0.5
"""At shutdown, a client that has just connected may send its first request for so long; on others one that is
on its way is answered if it comes within a tenth of that."""

LOOKS = 8
"""How often within a time-out it is looked whether a reader has taken something."""

_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_CLOSE = (b"Connection", b"close")

_log = logging.getLogger("corpus_server")


class Shared(Protocol):
    """What the connections of a server share; uvicorn's `ServerState` is one.

    Attributes:
        connections: that are open.
        default_headers: that each response has besides its own: `Date`, renewed every second.
    """

    connections: set[Any]
    default_headers: list[tuple[bytes, bytes]]


class Connection(asyncio.Protocol):
    """One connection; its attributes are those of `Line`.

    Args:
        service: of this process.
        app: answers what `ROUTES` do not.
        shared: with the other connections.
    """

    def __init__(self, service: Service, app: ASGIApp, shared: Shared) -> None:
        self._service = service
        self._app = app
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # something came or was sent, or the client has left
        self._closes_at = math.inf  # time of the loop, if no request comes before
        self._is_new = True  # no request has come
        self._message: Message | None = None  # the request that came last
        self.received = b""
        self.eof_at = math.inf
        self.left = self.begun = self.ends = False

    # -- events of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection."""
        self.transport = cast("asyncio.Transport", transport)
        # With both marks at zero, `resume_writing` tells that everything has left for the kernel.
        self.transport.set_write_buffer_limits(high=0, low=0)
        self.is_tls = transport.get_extra_info("sslcontext") is not None
        widen(transport.get_extra_info("socket"))
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if isinstance(peer, tuple) else ""  # of a Unix socket
        self._shared.connections.add(self)
        self._service.admission.connect(self._address)
        self._task = self._loop.create_task(self._serve())

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection; a thread that is at work for it stops at its next slice."""
        self.left = True
        self._shared.connections.discard(self)
        self._service.admission.disconnect(self._address)
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self.received += data
        if len(self.received) > MAX_WAITING_BYTES:
            self.transport.pause_reading()
        self._changed.set()

    def eof_received(self) -> bool:
        """Answer a client that has finished sending before the connection is closed."""
        self.eof_at = self._loop.time()
        self._changed.set()
        return not self.is_tls  # which has no half-closed connections

    def resume_writing(self) -> None:
        """Go on: the kernel has taken what the loop had left to send."""
        self._changed.set()

    def shutdown(self) -> None:
        """Close the connection when nothing is under way, else after the response."""
        self.ends = True
        # What has come may be on its way through the loop: a request that was sent gets its response.
        seconds = LAST_REQUEST_SECONDS if self._is_new else LAST_REQUEST_SECONDS / 10
        self._closes_at = self._loop.time() + seconds
        self._changed.set()

    async def wait(self, until: float) -> None:
        """Wait until something comes or was sent, the client has left, or until a time of the loop."""
        if len(self.received) <= MAX_WAITING_BYTES and self.eof_at == math.inf:
            self.transport.resume_reading()
        self._changed.clear()
        timer = None if until == math.inf else self._loop.call_at(until, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
        if self._loop.time() >= until:
            # A process that was stopped may find its timers over before it has read what came meanwhile.
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Return when the client has left, or has stopped sending and may have."""
        while not self.left and self._loop.time() < self.eof_at + LEFT_SECONDS:
            await self.wait(self.eof_at + LEFT_SECONDS)

    # -- requests

    async def _serve(self) -> None:
        """Answer request after request, and close the connection."""
        end = self.transport.abort
        try:
            while await self._serve_one():
                if self.received:  # the next request is here already: others may have their turn
                    await asyncio.sleep(0)
            await self._linger()
            end = self.transport.close
        except ClientLeft:
            pass
        finally:
            end()

    async def _serve_one(self) -> bool:
        """Answer the next request; return whether another one may follow."""
        self.begun = False
        request: RequestHead | None = None
        try:
            if self._is_new:
                asking = RequestHead("", b"", {}, address=self._address)
                self._service.admission.check(asking, "connection")
            self._message = await self._read()
            if self._message is None:
                return False
            request = self._message.head
            self.ends = self.ends or not request.keep_alive or self._service.admission.closing
            if self._message.complete and request.method == "GET" and request.path in ROUTES:
                await self._response(request)
            else:
                await Bridge(self, self._message).run(self._app)
        except Exception as error:  # noqa: BLE001 - a client must not be left without a response
            log_error(error, request)
            if self.begun or self.left or isinstance(error, ClientLeft):
                raise ClientLeft("a response was cut") from None
            # What follows bytes that are no request may be anything.
            self.ends = self.ends or request is None or not isinstance(error, CorpusServerError)
            await self._refuse(error, request)
        return not self.ends

    async def _read(self) -> Message | None:
        """Return the next request; None: none comes.

        Raises:
            CorpusServerError: what comes is no request, or comes too slowly.
        """
        settings = self._service.settings
        deadline = self._loop.time() + settings.keep_alive_seconds
        has_begun = False
        while True:
            # Empty lines before a request are to be ignored (RFC 9112, 2.2).
            received = self.received = self.received.lstrip(b"\r\n")
            if (end := received.find(END, 0, MAX_HEAD_BYTES)) >= 0:
                break
            if len(received) >= MAX_HEAD_BYTES:
                raise too_large(received)
            if received and not received[:1].isalpha():
                raise BadRequest("the request must be HTTP/1.1: it does not begin with a method")
            if _BARE_LINE_FEED.search(received):  # its head would never end
                raise BadRequest("lines of a request's head must end with CR LF, one ends with LF alone")
            now = self._loop.time()
            if received and not has_begun:
                has_begun = True
                deadline = now + settings.head_timeout_seconds
            if received and now >= self.eof_at and not self.left:
                raise BadRequest("the client stopped sending before the end of the request's head")
            if self.left or now >= min(self.eof_at, self._closes_at):
                return None
            if now >= deadline:
                if not has_begun:
                    return None
                seconds = settings.head_timeout_seconds
                raise RequestTimeout(f"a request's head must arrive within {seconds:g} s of its first byte")
            await self.wait(min(deadline, self._closes_at))
        self._is_new = False
        message = Message(received[: end + len(END)], self._address)
        self.received = received[end + len(END) :]
        return message

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the connection, which each of its responses has."""
        return [*self._shared.default_headers, _CLOSE] if self.ends else self._shared.default_headers

    async def _response(self, request: RequestHead) -> None:
        """Answer a request on the fast path, and count the response."""
        self._service.admission.check(request)
        work = partial(respond, self._service, request)
        exchange = Exchange(self._service, request, work, TOKEN_LIMITS, self, self.gone, sends_head=True)
        metrics.ACTIVE.number += 1
        left = False
        try:
            await exchange.run(self.send)
        except ClientLeft:
            left = True
            raise
        finally:
            metrics.ACTIVE.number -= 1
            response = exchange.response
            if left or response is not None:  # else a refusal follows, which is counted
                answered = Answered(
                    request=request,
                    route=request.path.decode("ascii"),
                    via="fast-path",
                    status=CLIENT_LEFT if left or response is None else response.status,
                    sent_bytes=max(0, exchange.sent_bytes),
                    seconds=exchange.seconds,
                    problem_type="" if response is None else response.problem_type,
                    stages=exchange.stages,
                )
                self._service.requests.done(answered)

    async def _refuse(self, error: Exception, request: RequestHead | None) -> None:
        """Send an error that costs nothing to make; without a request, only bytes of one came."""
        if request is None:
            request = RequestHead("GET", b"", {}, request_id=request_id_in(self.received))
        response = problem(error, request.request_id)
        answered = Answered(
            request=request,
            route="refused",
            via="fast-path",
            status=response.status,
            sent_bytes=response.num_bytes,
            problem_type=response.problem_type,
        )
        self._service.requests.done(answered)
        self._service.gather_threads.pause()
        await self.send([response.head(request, self.headers), *chain.from_iterable(response.body)])

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send from the loop; return when the kernel has taken all.

        Raises:
            ClientLeft: the client has left, or was dropped: a reader that takes nothing within a time-out. A
                slow one that takes some may go on.
        """
        if self.left or self.transport.is_closing():  # uvloop's own error would be one of the server
            raise ClientLeft("the client left")
        self.transport.writelines(parts)  # in one system call: the client need not wake up for the head alone
        timeout = self._service.settings.send_timeout_seconds
        before, since = -1, self._loop.time()
        while not self.left and self.transport.get_write_buffer_size():
            now = self._loop.time()
            if (unsent := self._num_unsent()) != before:
                before, since = unsent, now
            elif now - since >= timeout:
                peer = self.transport.get_extra_info("peername")
                name = ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else "unknown"
                _log.warning("dropped a reader that took nothing for %g s: %s", timeout, name)
                self.transport.abort()
                raise ClientLeft("the client takes nothing")
            await self.wait(min(now + timeout / LOOKS, since + timeout))
        if self.left:
            raise ClientLeft("the client left")

    def _num_unsent(self) -> int:
        """Return how many bytes the client has not taken.

        What the kernel holds counts, too: it asks for more only when a third of its megabytes has left, and a
        slow reader takes less than that within a time-out.
        """
        number = self.transport.get_write_buffer_size()
        with suppress(OSError, ValueError):  # the connection was closed
            held = ioctl(self.transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
            number += int.from_bytes(held, sys.byteorder)
        return number

    async def _linger(self) -> None:
        """Drop what the client still sends, so that it can read the last response."""
        is_sending = self.received or (self._message is not None and not self._message.complete)
        if self.left or not is_sending or not self.transport.can_write_eof():
            return
        self.transport.write_eof()
        until, num_bytes = self._loop.time() + LINGER_SECONDS, MAX_DROPPED_BYTES
        while not self.left and num_bytes > 0 and self._loop.time() < min(until, self.eof_at):
            num_bytes -= len(self.received)
            self.received = b""
            await self.wait(until)
