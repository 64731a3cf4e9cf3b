"""One HTTP/1.1 connection: its requests are answered strictly one after another.

    state         what happens                            ends with
    READING       waits for a request, or its head        a whole head; refused; idle too long; closed
    ANSWERING     an `Exchange` or a refusal is sent      all sent; failed
    APPLICATION   a `Bridge` drives the ASGI application  it has returned; failed
    LINGERING     drops what the client still sends       the client closes; `LINGER_SECONDS`
    CLOSED        nothing                                 -

`_NEXT` has the transitions. While a response is under way, what follows its request waits unparsed, and
reading stops above `MAX_WAITING_BYTES`. At any moment one party writes: a gather thread, or the loop. Under
TLS, and where no descriptor is left for a thread, the loop sends everything.

Whatever a step raises ends its request: with a 500 if nothing of a response was sent, else the connection is
cut, so that the client sees a body shorter than Content-Length.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from email.utils import formatdate
from enum import Enum
from itertools import chain
from typing import Any, cast

from starlette.types import ASGIApp

from corpus_server import metrics
from corpus_server.admission.request import MAX_HEAD_BYTES, RequestHead, request_id_in
from corpus_server.answers.access_log import Answered
from corpus_server.answers.response import Buffer, ClientLeft, Response, problem
from corpus_server.answers.service import Service
from corpus_server.errors import BadRequest, CorpusServerError, RequestTimeout
from corpus_server.http.bridge import Bridge
from corpus_server.http.exchange import ROUTES, Exchange, log_error, respond
from corpus_server.http.message import END, Message, too_large
from corpus_server.http.sending import Descriptor, widen

MAX_WAITING_BYTES = 64 * 1024
"""Bytes of pipelined requests that wait behind a response; the connection is not read beyond."""

LINGER_SECONDS = 2.0
"""A client that is still sending may read the last response for so long. After close(2) a reset would
overtake that."""

MAX_DROPPED_BYTES = 64 * 2**20
"""Twice the largest plan: a client that sends all of a body before it reads learns why it was refused."""

LEFT_SECONDS = 1.0
"""The application goes on for so long after the client has stopped sending: it may have left, or may wait."""

LAST_REQUEST_SECONDS = 0.5
"""At shutdown, a client that has just connected may send its first request for so long; on others one that is
on its way is answered if it comes within a tenth of that."""

_CLOSE = (b"Connection", b"close")
_CLIENT_LEFT = 499  # nginx's number for a client that closed the connection; only the metrics see it

_log = logging.getLogger("corpus_server")


class State(Enum):
    """See the module."""

    READING = 1
    ANSWERING = 2
    APPLICATION = 3
    LINGERING = 4
    CLOSED = 5


_NEXT = {
    State.READING: {State.ANSWERING, State.APPLICATION, State.LINGERING, State.CLOSED},
    State.ANSWERING: {State.READING, State.LINGERING, State.CLOSED},
    State.APPLICATION: {State.READING, State.ANSWERING, State.LINGERING, State.CLOSED},
    State.LINGERING: {State.CLOSED},
    State.CLOSED: {State.CLOSED},
}


class Shared:
    """What the connections of a process share.

    Attributes:
        connections: that are open.
        default_headers: that each response has besides its own: `Date`.
    """

    def __init__(self) -> None:
        self.connections: set[Connection] = set()
        self.renew_date()

    def renew_date(self) -> None:
        """Set `Date` to now; to be called every second."""
        self.default_headers = [(b"date", formatdate(usegmt=True).encode())]


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        service: of this process.
        app: answers what `ROUTES` do not.
        shared: with the other connections of the server.
    """

    def __init__(self, service: Service, app: ASGIApp, shared: Shared) -> None:
        self._service = service
        self._app = app
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._state = State.READING
        self._received = b""
        self._message: Message | None = None  # whose body is to come
        self._exchange: Exchange | None = None
        self._request: RequestHead | None = None  # that the exchange answers
        self._in_thread = False
        self._unsent_bytes = 0  # that a thread has left to the loop
        self._bridge: Bridge | None = None
        self.ends = False  # the connection, with the response under way
        self._eof = False  # the client sends nothing more
        self._is_new = True  # no request has come
        self._head_began = False  # some of a head is there, and the timer is that of the head
        self._num_dropped = 0
        self._timer: asyncio.TimerHandle | None = None  # of the state
        self._watch: asyncio.TimerHandle | None = None  # of a reader that falls behind

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
        try:
            self._service.admission.connect(self.transport)
        except CorpusServerError as error:
            self.ends = True
            self._guarded(self._refuse, error)
        else:
            self._guarded(self._wait_for_request)

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection; a thread that is at work for it stops at its next slice."""
        self._state = State.CLOSED
        self._shared.connections.discard(self)
        self._service.admission.disconnect(self.transport)
        self._stop_timers()
        if self._exchange is not None:
            self._exchange.cancelled = True
            if not self._in_thread:
                self._guarded(self._finish_left)
        if self._bridge is not None:
            self._bridge.disconnect()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self._state is State.LINGERING:
            self._num_dropped += len(data)
            if self._num_dropped > MAX_DROPPED_BYTES:
                self.transport.abort()
        elif self._state is not State.CLOSED:
            self._guarded(self._take, data)

    def eof_received(self) -> bool:
        """Answer a client that has finished sending before the connection is closed."""
        self._eof = True
        self._expect_leaving()
        under_way = self._state in (State.ANSWERING, State.APPLICATION) or END in self._received
        return under_way and not self.is_tls  # which has no half-closed connections

    def _expect_leaving(self) -> None:
        """Tell the application that a client has left, which has stopped sending: soon, as it may wait."""
        if self._eof and self._bridge is not None:
            seconds = LEFT_SECONDS if self._message is None else 0.0  # else its body will never be whole
            self._timer = self._loop.call_later(seconds, self._bridge.disconnect)

    def resume_writing(self) -> None:
        """Go on: the kernel has taken what the loop had left to send."""
        if self._watch is None:
            return  # TLS tells within `send`, too
        self._stop_timers(watch_only=True)
        if self._state is State.ANSWERING:
            self._guarded(self._taken)
        elif self._bridge is not None:
            self._bridge.resume()

    def shutdown(self) -> None:
        """Close the connection when nothing is under way, else after the response."""
        self.ends = True
        if self._state is State.READING:
            # What has come may be on its way through the loop: a request that was sent gets its answer.
            seconds = LAST_REQUEST_SECONDS if self._is_new else LAST_REQUEST_SECONDS / 10
            self._loop.call_later(seconds, self._guarded, self._close_if_idle)

    # -- requests

    def _wait_for_request(self) -> None:
        self._head_began = False
        self._timer = self._loop.call_later(
            self._service.settings.keep_alive_seconds, self._guarded, self._close_if_idle
        )
        if self._received:
            # Later and not here: a thousand pipelined requests would otherwise nest a thousand calls.
            self._loop.call_soon(self._guarded, self._take_request)

    def _take(self, data: bytes) -> None:
        if self._message is not None:
            self._take_body(data)
            return
        self._received += data
        if self._state is State.READING:
            self._take_request()
        elif len(self._received) > MAX_WAITING_BYTES:
            self.transport.pause_reading()

    def _take_request(self) -> None:
        """Begin to answer if a whole head is there."""
        if self._state is not State.READING:
            return
        # Empty lines before a request are to be ignored (RFC 9112, 2.2).
        received = self._received = self._received.lstrip(b"\r\n")
        end = received.find(END, 0, MAX_HEAD_BYTES)
        if end < 0:
            if len(received) >= MAX_HEAD_BYTES:
                self._give_up(too_large(received))
            elif received and not received[:1].isalpha():
                self._give_up(BadRequest("the request must be HTTP/1.1: it does not begin with a method"))
            elif received and not self._head_began:
                self._head_began = True
                self._stop_timers()
                seconds = self._service.settings.head_timeout_seconds
                late = RequestTimeout(f"a request's head must arrive within {seconds:g} s of its first byte")
                self._timer = self._loop.call_later(seconds, self._guarded, self._give_up, late)
            return
        text, self._received = received[: end + len(END)], received[end + len(END) :]
        self._is_new = False
        self._stop_timers()
        try:
            message = Message(text, self._address)
        except CorpusServerError as error:
            self._received = text + self._received
            self._give_up(error)
            return
        self.ends = self.ends or not message.head.keep_alive or self._service.admission.closing
        if message.complete and message.head.method == "GET" and message.head.path in ROUTES:
            self._answer(message.head)
        else:
            self._drive_application(message)

    def _give_up(self, error: CorpusServerError) -> None:
        """Refuse bytes that are no request; what follows them may be anything."""
        self.ends = True
        self._refuse(error)

    # -- the fast path

    def _answer(self, request: RequestHead) -> None:
        try:
            request.caller = self._service.admission.check(request)
            work = respond(self._service, request)
            self._request = request
            self._exchange = Exchange(self._service, request, work, self.transport, self._head_of)
        except CorpusServerError as error:
            self._refuse(error, request)
            return
        metrics.ACTIVE.number += 1
        self._become(State.ANSWERING)
        self._work()

    def _head_of(self, response: Response) -> bytes:
        assert self._request is not None
        return response.head(self._request, self.headers)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the connection, which each of its responses has."""
        return [*self._shared.default_headers, _CLOSE] if self.ends else self._shared.default_headers

    def _work(self) -> None:
        """Let a gather thread make and send more of the response."""
        assert self._exchange is not None
        take: Callable[[Sequence[Buffer]], Sequence[Buffer]] = _take_nothing
        descriptor: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if not self.is_tls:  # a thread cannot write ciphertext
            with contextlib.suppress(OSError):  # no descriptor is left: the loop sends
                descriptor = to = Descriptor(self.transport.get_extra_info("socket").fileno())
                take = to.take
        self._service.gather_threads.submit(self._in_gather_thread, self._exchange, descriptor, take)
        self._in_thread = True

    def _in_gather_thread(
        self,
        exchange: Exchange,
        descriptor: contextlib.AbstractContextManager[object],
        take: Callable[[Sequence[Buffer]], Sequence[Buffer]],
    ) -> None:
        rest: Sequence[Buffer] = ()
        failure: BaseException | None = None
        try:
            with descriptor, self._service.working():
                rest = exchange.advance(take)
        except BaseException as error:  # noqa: BLE001 - reported by the loop
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed, and all connections with it
            self._loop.call_soon_threadsafe(self._guarded, self._worked, exchange, rest, failure)

    def _worked(self, exchange: Exchange, rest: Sequence[Buffer], failure: BaseException | None) -> None:
        """Go on after a thread's part."""
        self._in_thread = False
        if self._state is State.CLOSED:
            self._finish_left()
        elif failure is not None:
            raise failure
        elif exchange.done:
            self._finish()
            self._next()
        elif exchange.waiting is not None:
            exchange.waiting.add_done_callback(lambda _: self._wake(exchange))
        else:
            self._unsent_bytes = sum(map(len, rest))
            self._write(rest)

    def _wake(self, exchange: Exchange) -> None:
        """Go on with a response that has waited; called by any thread."""

        def go_on() -> None:
            if exchange is self._exchange:  # else the client has left
                self._work()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._guarded, go_on)

    def _finish_left(self) -> None:
        assert self._exchange is not None
        self._finish(left=not self._exchange.done)

    def _finish(self, *, left: bool = False) -> None:
        """Count the response and give up what is left of it."""
        exchange, self._exchange = self._exchange, None
        request = self._request
        if exchange is None or request is None:
            return
        metrics.ACTIVE.number -= 1
        exchange.finish()
        response = exchange.response
        if response is None and not left:
            return  # a refusal follows, which is counted
        self._service.requests.done(
            Answered(
                request=request,
                route=request.path.decode("ascii"),
                via="fast-path",
                status=_CLIENT_LEFT if left or response is None else response.status,
                sent_bytes=max(0, exchange.sent_bytes),
                seconds=exchange.seconds,
                problem_type="" if response is None else response.problem_type,
                stages=exchange.stages,
            )
        )

    def _refuse(self, error: Exception, request: RequestHead | None = None) -> None:
        """Send an error that costs nothing to make; without a request, only bytes of one came."""
        if request is None:
            request = RequestHead("GET", b"", {}, request_id=request_id_in(self._received))
        self._stop_timers()
        self._request = None
        self._become(State.ANSWERING)
        log_error(error)
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
        self._write([response.head(request, self.headers), *chain.from_iterable(response.body)])
        self._service.refusing()

    # -- the application

    def _drive_application(self, message: Message) -> None:
        self._become(State.APPLICATION)
        self._message = None if message.complete else message
        self._bridge = bridge = Bridge(self, message)
        received, self._received = self._received, b""
        task = self._loop.create_task(bridge.run(self._app))
        task.add_done_callback(lambda _: self._guarded(self._driven))
        if received:
            self._take(received)
        self._expect_leaving()

    def _take_body(self, data: bytes) -> None:
        """Pass on what belongs to the body of the application's request."""
        assert self._message is not None
        assert self._bridge is not None
        if self._bridge.body_error is not None:
            return  # what follows may be anything
        try:
            body, self._received = self._message.feed(data)
        except CorpusServerError as error:
            self._bridge.fail(error)
            return
        self._bridge.feed(body, complete=self._message.complete)
        if self._message.complete:
            self._message = None

    def _driven(self) -> None:
        """Go on after the application's response."""
        bridge, self._bridge = self._bridge, None
        if self._state is State.CLOSED or bridge is None:
            return
        self._stop_timers()
        if bridge.complete:
            self._next()
        elif bridge.started or bridge.left:
            self.transport.abort()
        else:
            self.ends = True
            self._refuse(bridge.failure or RuntimeError("no response"), bridge.request)

    # -- sending, for both

    def _write(self, parts: Sequence[Buffer]) -> None:
        """Send from the loop; `_taken` follows once the kernel has everything."""
        if self.send(parts):
            self._taken()

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send from the loop; return whether the kernel has taken all, else `resume_writing` follows."""
        self.transport.writelines(parts)  # in one system call: the client need not wake up for the head alone
        if self.transport.get_write_buffer_size():
            self._watch_reader()
            return False
        return True

    def _taken(self) -> None:
        if self._exchange is None:  # it was a refusal
            self._next()
        else:
            self._exchange.sent_bytes += self._unsent_bytes
            self._work()

    def _watch_reader(self, before: int | None = None) -> None:
        """Drop a reader that took nothing since the last look; a slow one that takes some may go on."""
        unsent = self.transport.get_write_buffer_size()
        timeout = self._service.settings.send_timeout_seconds
        if unsent and unsent == before:
            _log.warning("dropped a reader that took nothing for %g s: %s", timeout, self._peer)
            self.transport.abort()
        else:
            self._stop_timers(watch_only=True)
            self._watch = self._loop.call_later(timeout, self._watch_reader, unsent)

    @property
    def _peer(self) -> str:
        peer = self.transport.get_extra_info("peername")
        return ":".join(map(str, peer[:2])) if isinstance(peer, tuple) else "unknown"

    # -- the end

    def _next(self) -> None:
        """Go on to the next request, or close."""
        if self.ends or (self._eof and END not in self._received):
            self._close()
        else:
            self._become(State.READING)
            self.transport.resume_reading()
            self._wait_for_request()

    def _close_if_idle(self) -> None:
        if self._state is State.READING:
            self._close()

    def _close(self) -> None:
        """Close the connection, after the client has read the last response."""
        self._stop_timers()
        is_sending = (self._received or self._message is not None) and not self._eof
        if is_sending and self.transport.can_write_eof():
            self._become(State.LINGERING)
            self._received = b""
            self.transport.write_eof()
            self._timer = self._loop.call_later(LINGER_SECONDS, self.transport.abort)
            self.transport.resume_reading()
        else:
            self._become(State.CLOSED)
            self.transport.close()

    def _become(self, state: State) -> None:
        if state not in _NEXT[self._state]:
            raise RuntimeError(f"a connection cannot become {state.name} when it is {self._state.name}")
        self._state = state

    def _guarded(self, step: Callable[..., None], *arguments: Any) -> None:
        """Take a step; whatever it raises ends the request that is under way, and not without an answer."""
        try:
            step(*arguments)
        except BaseException as error:  # noqa: BLE001 - see above
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        exchange, request = self._exchange, self._request
        if isinstance(error, CorpusServerError):
            log_error(error)
        elif not isinstance(error, ClientLeft):
            _log.error("a request failed", exc_info=error)
        untouched = self._state is State.READING or (
            self._state is State.ANSWERING and exchange is not None and exchange.response is None
        )
        with contextlib.suppress(Exception):
            self._finish(left=isinstance(error, ClientLeft))
        if untouched and isinstance(error, Exception) and not isinstance(error, ClientLeft):
            self._state, self.ends = State.READING, True
            with contextlib.suppress(Exception):
                self._refuse(error, request)
                return
        self.transport.abort()

    def _stop_timers(self, *, watch_only: bool = False) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._timer is not None and not watch_only:
            self._timer.cancel()
            self._timer = None


def _take_nothing(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """Leave everything to the loop."""
    return parts
