"""The protocol that accepts every connection.

    idle ----- a plain GET of a token route ----> answering ---- all sent ----> idle, or closing
      |                                               `--------- it failed ---> closing
      `------- anything else ----> handed over to the ordinary HTTP protocol, for good

Requests are answered strictly one after another: while a response is under way, what comes behind it waits
unparsed. At any moment one party writes to the connection: a gather thread, the loop (the rest of what a
thread could not send), or, after the handing over, the ordinary protocol. Nothing can come between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain
from typing import Any, Protocol, cast

from corpus_server.admission.checks import MAX_URL_BYTES
from corpus_server.admission.request import (
    MAX_HEAD_BYTES,
    RequestHead,
    parse_simple_get,
    request_id_in,
    without_ids,
)
from corpus_server.answers.access_log import Answered
from corpus_server.answers.response import Buffer, ClientLeft, problem
from corpus_server.answers.service import Service
from corpus_server.errors import CorpusServerError, HeadTooLarge, RequestTimeout, UrlTooLong
from corpus_server.http.exchange import PATIENCE_SECONDS, ROUTES, Exchange, log_error
from corpus_server.http.lingering import leave
from corpus_server.http.sending import Descriptor, widen

VIA = "Corpus-Via"
"""Header that says which path answered: `door`, or `application`."""

MAX_WAITING_BYTES = 64 * 1024
"""Bytes of pipelined requests that wait behind a response; the connection is not read beyond."""

_END = b"\r\n\r\n"
_STARTS = tuple(b"GET " + path + b"?" for path in ROUTES)
_VIA_DOOR = (VIA.lower().encode(), b"door")

_log = logging.getLogger("corpus_server")


class Connections(Protocol):
    """What the connections of a process share; uvicorn's `ServerState` is one."""

    connections: set[Any]
    default_headers: list[tuple[bytes, bytes]]


class State(Enum):
    """See the module."""

    IDLE = 1
    ANSWERING = 2
    CLOSING = 3


class Door(asyncio.Protocol):
    """One connection.

    Args:
        service: of this process.
        shared: connections of this process, and the headers that every response has.
        make_ordinary: returns the protocol for requests that are not answered here.
    """

    def __init__(
        self, service: Service, shared: Connections, make_ordinary: Callable[[], asyncio.Protocol]
    ) -> None:
        self._service = service
        self._shared = shared
        self._make_ordinary = make_ordinary
        self._loop = asyncio.get_running_loop()
        self._state = State.IDLE
        self._received = b""
        self._exchange: Exchange | None = None
        self._in_thread = False
        self._ends = False  # the connection, with the response under way
        self._eof = False  # the client sends nothing more
        self._head_began = False  # some of a head is there, and the timer is that of the head
        self._timer: asyncio.TimerHandle | None = None  # of an idle client, or of a reader that falls behind

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection."""
        self.transport = cast("asyncio.Transport", transport)
        # With both marks at zero, `resume_writing` tells that everything has left for the kernel.
        self.transport.set_write_buffer_limits(high=0, low=0)
        widen(self.transport.get_extra_info("socket"))
        self._shared.connections.add(self)
        try:
            self._service.admission.connect(self.transport)
        except CorpusServerError as error:
            self._ends = True
            self._refuse(error)
        else:
            self._wait_for_request()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection; a thread that is at work for it stops at its next slice."""
        self._state = State.CLOSING
        self._shared.connections.discard(self)
        self._service.admission.disconnect(self.transport)
        self._stop_timer()
        if self._exchange is not None:
            self._exchange.cancelled = True
            if not self._in_thread:
                self._finish()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._state is State.CLOSING:
            return
        self._received += data
        if self._state is State.IDLE:
            self._take_request()
        elif len(self._received) > MAX_WAITING_BYTES:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Answer a client that has finished sending before the connection is closed."""
        self._eof = True
        return self._state is State.ANSWERING

    def shutdown(self) -> None:
        """Close the connection when nothing is under way, else after the response."""
        self._ends = True
        if self._exchange is not None:
            self._exchange.close = True  # if its head is still to be sent, it says so
        if self._state is State.IDLE:
            self._close()

    # -- idle

    def _wait_for_request(self) -> None:
        self._state = State.IDLE
        self._head_began = False
        self._timer = self._loop.call_later(self._service.settings.keep_alive_seconds, self._close)
        if self._received:
            # Later and not here: a thousand pipelined requests would otherwise nest a thousand calls.
            self._loop.call_soon(self._take_request)

    def _take_request(self) -> None:
        """Begin to answer if a whole request is there that is ours."""
        if self._state is not State.IDLE:
            return
        # Empty lines before a request are to be ignored (RFC 9112, 2.2).
        received = self._received = self._received.lstrip(b"\r\n")
        is_ours = received.startswith(_STARTS) or any(start.startswith(received) for start in _STARTS)
        # Under TLS the kernel's socket carries ciphertext, to which a thread cannot write.
        if not is_ours or self.transport.get_extra_info("sslcontext") is not None:
            self._hand_over()
            return
        end = received.find(_END, 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(received) >= MAX_HEAD_BYTES:
                self._ends = True
                self._refuse(too_large(received))
            elif received and not self._head_began:
                self._head_began = True
                self._stop_timer()
                seconds = self._service.settings.head_timeout_seconds
                self._timer = self._loop.call_later(seconds, self._give_up_head, seconds)
            return
        head = received[: end + len(_END)]
        text, request_id, trace_parent = without_ids(head)
        request = parse_simple_get(text)
        if request is None:
            self._hand_over()
            return
        self._received = received[len(head) :]
        self._stop_timer()
        request.request_id, request.trace_parent = request_id, trace_parent
        peer = self.transport.get_extra_info("peername")
        request.address = peer[0] if isinstance(peer, tuple) else ""
        self._begin(request)

    def _give_up_head(self, seconds: float) -> None:
        self._ends = True
        self._refuse(too_slow(seconds))

    def _hand_over(self) -> None:
        """Leave the connection and all unread bytes to the ordinary protocol."""
        self._stop_timer()
        self._shared.connections.discard(self)
        ordinary = self._make_ordinary()
        self.transport.set_write_buffer_limits()
        self.transport.set_protocol(ordinary)
        ordinary.connection_made(self.transport)
        received, self._received = self._received, b""
        ordinary.data_received(received)

    # -- answering

    def _begin(self, request: RequestHead) -> None:
        gate = self._service.admission
        self._ends = not request.keep_alive or gate.closing
        try:
            request.caller = gate.check(request)
            slot = gate.admit(request, self.transport)
            request.charge = slot.charge
        except CorpusServerError as error:
            self._refuse(error, request)
            return
        self._state = State.ANSWERING
        self._exchange = Exchange(self._service, request, slot, self._headers, close=self._ends)
        self._work()

    def _work(self) -> None:
        """Let a gather thread make and send more of the response."""
        assert self._exchange is not None
        self._in_thread = True
        to = Descriptor(self.transport.get_extra_info("socket").fileno())
        self._service.gather_threads.submit(self._in_gather_thread, self._exchange, to)

    def _in_gather_thread(self, exchange: Exchange, to: Descriptor) -> None:
        rest: Sequence[Buffer] = ()
        failure: BaseException | None = None
        with self._service.working():
            try:
                rest = exchange.advance(to, PATIENCE_SECONDS)
            except BaseException as error:  # noqa: BLE001 - reported by the loop
                failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all connections with it
            self._loop.call_soon_threadsafe(self._worked, exchange, rest, failure)

    def _worked(self, exchange: Exchange, rest: Sequence[Buffer], failure: BaseException | None) -> None:
        """Go on after a thread's part."""
        self._in_thread = False
        if failure is not None:
            if isinstance(failure, CorpusServerError):
                _log.error("%s: %s; a response under way was cut", failure.slug, failure.detail)
            elif not isinstance(failure, ClientLeft):
                _log.error("a response under way was cut", exc_info=failure)
            self.transport.abort()  # the client sees a body shorter than Content-Length
        if self._state is State.CLOSING or failure is not None:
            self._finish()
        elif exchange.done:
            self._complete()
        elif exchange.waiting is not None:
            exchange.waiting.add_done_callback(lambda _: self._wake(exchange))
        else:
            self._write(rest)

    def _wake(self, exchange: Exchange) -> None:
        """Go on with a response that has waited; called by any thread."""

        def go_on() -> None:
            if exchange is self._exchange:  # else the client has left
                self._work()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(go_on)

    def _write(self, parts: Iterable[Buffer]) -> None:
        """Send from the loop; `_taken` follows once the kernel has everything."""
        self.transport.writelines(parts)  # in one system call: the client need not wake up for the head alone
        if self.transport.get_write_buffer_size():
            self._watch_reader()
        else:
            self._taken()

    def resume_writing(self) -> None:
        """Go on: the kernel has taken what the loop had left to send."""
        self._stop_timer()
        if self._state is State.ANSWERING and not self._in_thread:
            self._taken()

    def _taken(self) -> None:
        if self._exchange is None:  # it was a refusal
            self._next()
        elif self._exchange.done:
            self._complete()
        else:
            self._work()

    def _complete(self) -> None:
        """Go on after a response that was sent as a whole."""
        self._finish()
        self._next()

    def _watch_reader(self, before: int | None = None) -> None:
        """Drop a reader that took nothing since the last look; a slow one that takes some may go on."""
        unsent = self.transport.get_write_buffer_size()
        timeout = self._service.settings.send_timeout_seconds
        if unsent == before:
            peer = self.transport.get_extra_info("peername")
            name = ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else "unknown"
            _log.warning("dropped a reader that took nothing for %g s: %s", timeout, name)
            self.transport.abort()
        else:
            self._timer = self._loop.call_later(timeout, self._watch_reader, unsent)

    def _finish(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.finish()

    def _next(self) -> None:
        """Go on to the next request, or close."""
        if self._ends or (self._eof and _END not in self._received):
            self._close()
        else:
            self.transport.resume_reading()
            self._wait_for_request()

    def _refuse(self, error: CorpusServerError, request: RequestHead | None = None) -> None:
        """Send an error that costs nothing to make; without a request, only bytes of one came."""
        if request is None:
            request = RequestHead("GET", b"", {}, request_id=request_id_in(self._received))
        self._stop_timer()
        self._state = State.ANSWERING
        log_error(error)
        response = problem(error, request.request_id)
        answered = Answered(
            request=request,
            route="refused",
            via="door",
            status=response.status,
            sent_bytes=response.num_bytes,
            problem_type=response.problem_type,
        )
        self._service.requests.done(answered)
        head = response.head(self._headers, request_id=request.request_id, close=self._ends)
        self._write([head, *chain.from_iterable(response.body)])
        self._service.refusing()

    def _close(self) -> None:
        """Close the connection."""
        self._state = State.CLOSING
        if self._received and not self._eof:
            self._received = b""
            leave(self.transport, self)
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [*self._shared.default_headers, _VIA_DOOR]


def too_large(received: bytes) -> CorpusServerError:
    """Return the error for a head that did not end within `MAX_HEAD_BYTES`: its first line, or all of it."""
    line, end, _ = received.partition(b"\n")
    if end and len(line) <= MAX_URL_BYTES:
        return HeadTooLarge(f"a request's head must have at most {MAX_HEAD_BYTES} bytes")
    return UrlTooLong(f"the URL must have at most {MAX_URL_BYTES} bytes")


def too_slow(seconds: float) -> RequestTimeout:
    """Return the error for a head that did not end in time."""
    return RequestTimeout(f"a request's head must arrive within {seconds:g} s of its first byte")
