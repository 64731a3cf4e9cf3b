"""One costly response: a thread makes it, gather threads send its pieces, the loop what a reader leaves.

    the loop                    gather thread
    admit               ->      make the response; then piece by piece: gather, hash, send
    send the rest       <-      (of a piece that a slow reader did not take)
                        ->      next piece ...

A slow reader therefore costs no thread, only the loop's attention and the memory of one piece. The connection
drives the responses of `ROUTES` itself; all others, and these under another server, the application does.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

from corpus_server.admission.load import SMALL_BYTES, Slot
from corpus_server.admission.request import RequestHead
from corpus_server.http.send import writable, write
from corpus_server.responses import tokens
from corpus_server.responses.own_errors import log_error
from corpus_server.responses.problem import problem
from corpus_server.responses.response import TIMING_HEADER, Buffer, Response, timing_value
from corpus_server.responses.service import Gone, Service
from corpus_server.responses.tokens import BatchesQuery, parameters
from corpus_server.work import Budget, Later, Limits

ROUTES: dict[bytes, Callable[[Service, BatchesQuery, RequestHead, Budget], Response]] = {
    b"/v1/batches": tokens.batches,
    b"/v1/indices": tokens.indices,
}
"""What a connection answers itself; the application has the same paths as routes."""

PATIENCE_SECONDS = 0.02
"""How long a thread sends to one reader that falls behind before it leaves the rest to the loop. A fast one
has taken 8 MiB in less than half of it."""

TURN_SECONDS: Final = 0.01
"""How long a thread goes on with one response while others wait for a thread."""

LEFT_SECONDS: Final = 0.05
"""Work goes on for so long after the client has stopped sending: nobody can tell whether it has left, or
waits with its half of the connection closed. What takes longer is given up."""

LEFT_CPU_SECONDS: Final = 0.02
"""The same of a gather thread, in time of the processor: it may have waited for its turn, or for the disk. As
soon as some of the response was sent, the system says who has left."""


_NOW: Final[Future[None]] = Future()
_NOW.set_result(None)


class Line(Protocol):
    """A connection, as the request that is answered sees it.

    Attributes:
        transport: for its peer, its socket, and to cut it.
        left: whether the client has left; any thread may ask.
        eof_at: time of the loop at which the client stopped sending; infinity until then.
        received: bytes that have come, and that nobody has parsed.
        begun: whether some of the response may have been sent.
        ends: whether the connection ends with this response.
        headers: of the connection, which each of its responses has.
    """

    transport: asyncio.Transport
    is_tls: bool
    left: bool
    eof_at: float
    received: bytes
    begun: bool
    ends: bool

    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...  # noqa: D102

    async def send(self, parts: Sequence[Buffer]) -> None:
        """Send; return when the kernel has taken all. Raise ClientLeft if the client has left."""

    async def wait(self, until: float) -> None:
        """Wait until something comes or was sent, the client has left, or until a time of the loop."""


def respond(service: Service, request: RequestHead, budget: Budget) -> Response:
    """Make the response to a request for one of `ROUTES`; an error becomes a problem document."""
    try:
        query = BatchesQuery.model_validate(parameters(request.query_string))
        return ROUTES[request.path](service, query, request, budget)
    except Later:
        raise
    except Exception as error:  # noqa: BLE001 - a connection must not be left without a response
        log_error(error, request)
        return problem(error, request.request_id)


class Exchange:
    """A costly response: its budget, and its place in the limits.

    Args:
        request: who asks.
        work: makes the response; is called again if it raised `Later`.
        limits: of the question.
        line: the client's connection, if it is one of ours.
        gone: returns when the client has left; asked for only while a question is computed or waits.
        sends_head: whether the head is sent before the body, to `line`; else `send` sends it.
        is_token_path: whether it takes a slot from its beginning, and gather threads make it; else it is a
            question that computes in turns with others, and takes a slot for what it streams.

    Attributes:
        response: once it is made.
        done: whether the whole response was sent.
        sent_bytes: bytes of the body that were sent.

    Raises:
        Overloaded, TooManyRequests: there is no room for it.
    """

    def __init__(
        self,
        service: Service,
        request: RequestHead,
        work: Callable[[Budget], Response],
        limits: Limits,
        line: Line | None,
        gone: Gone,
        *,
        sends_head: bool = False,
        is_token_path: bool = True,
    ) -> None:
        self._service = service
        self._request = request
        self._is_head = request.method == "HEAD"
        self._work = work
        self._line = line
        self._gone = gone
        self._sends_head = sends_head
        self._groups: Iterator[list[Buffer]] | None = None
        self._waiting: Later | None = None  # for what the response waits, without a thread
        self._began = time.monotonic()
        self._stopped_sending_at: float | None = None  # time of the thread that noticed it
        self._waits_since: float | None = self._began  # for a thread, or for shards
        self._wait_seconds = self._make_seconds = self._send_seconds = 0.0
        self.response: Response | None = None
        self.done = False
        self.sent_bytes = 0
        self._slot: Slot | None = None
        self._is_long = False
        if is_token_path:
            self._slot = service.admission.admit(request, None if line is None else line.transport)
        else:
            service.admission.check(request, "response")
        self._budget = service.budget(
            request,
            limits,
            has_left=None if line is None else partial(self._has_left, line),
            claim=self._claim if self._slot is not None and not self._is_head else None,
            in_turns=not is_token_path,
        )

    async def run(self, send: Callable[[Sequence[Buffer]], Awaitable[None]]) -> None:
        """Make the response and send it.

        Args:
            send: sends what no thread could; returns when the kernel has taken it.

        Raises:
            ClientLeft: the connection is closed.
            CorpusChanged, ReadFailed: reading failed after the head was sent.
        """
        to = None
        try:
            if self._slot is None:
                await self._compute()
            # Without a head it is the application's response, whose parts go through its server. Under TLS
            # the loop sends all, because a thread cannot write ciphertext.
            if self._line is not None and self._sends_head and not self._line.is_tls:
                to = writable(self._line.transport)
            while not self.done:
                work = partial(self._advance, to)
                rest = await self._service.gather_threads.run(work, is_long=self._is_long)
                if self._waiting is not None and not self._waiting.future.done():
                    await self._service.settled(self._waiting, self._budget, self._gone)
                elif rest:
                    await send(rest)
                    self.sent_bytes += sum(map(len, rest))
                del rest  # no more than one piece is held
        finally:
            if to is not None:
                os.close(to)
            self._finish()

    def _claim(self, num_bytes: int) -> None:
        """Count the bytes of the response; if it is large, wait while as many threads as may make such ones.

        Without that a batch of four rows waited 11 s for 32 strangers' responses of 14 MB each.
        """
        if self._slot is not None:
            self._slot.charge(num_bytes)
        self._is_long = num_bytes > SMALL_BYTES
        if self._is_long and not self._service.gather_threads.takes_long():
            raise Later(_NOW, "a thread for large responses")

    def _has_left(self, line: Line) -> bool:
        """Tell a thread whether the client has left, or may have."""
        if line.left or line.begun or line.eof_at == math.inf:
            return line.left
        now = time.thread_time()
        if self._stopped_sending_at is None:
            self._stopped_sending_at = now
        return now - self._stopped_sending_at >= LEFT_CPU_SECONDS

    async def _compute(self) -> None:
        """Make the response of a question, in turns with others; take a slot for what it streams."""
        response = await self._service.compute(self._work, self._budget, self._gone)
        self._work = lambda _: response
        if response.is_streamed and not self._is_head:
            line = self._line
            self._slot = self._service.admission.admit(
                self._request, None if line is None else line.transport
            )
            self._slot.charge(response.num_bytes)
            self._is_long = response.num_bytes > SMALL_BYTES

    def _advance(self, to: int | None) -> Sequence[Buffer]:
        """Make the response, then read and send until all is sent, or something is not; in a gather thread.

        Returns:
            What was not sent, and is to be sent before the next call. Nothing if the response is `done` or
            `_waiting`, and the next call comes after that; or if others want the thread.
        """
        now = time.monotonic()
        until = now + TURN_SECONDS
        self._stopped_sending_at = None
        patience = PATIENCE_SECONDS
        if self._waits_since is not None:
            self._wait_seconds += now - self._waits_since
            self._waits_since = None
        rest: Sequence[Buffer] = ()
        while not rest:
            group = self._next_group()
            began = time.monotonic()
            self._make_seconds += began - now
            if group is None:
                self._waits_since = None if self._waiting is None else began
                break
            rest = group if to is None else write(to, group, patience)
            self.sent_bytes += sum(map(len, group)) - sum(map(len, rest))
            now = time.monotonic()
            self._send_seconds += now - began
            patience -= now - began  # the time for reading the disk does not count
            del group  # its memory serves the next piece
            if not rest and now >= until and self._service.gather_threads.are_wanted:
                self._waits_since = now
                break
        return rest

    @property
    def seconds(self) -> float:
        """Seconds since the request was complete."""
        return time.monotonic() - self._began

    @property
    def stages(self) -> tuple[float, float, float, float]:
        """Seconds of each of `metrics.STAGES` so far."""
        locate = self._budget.locate_seconds
        return self._wait_seconds, locate, self._make_seconds - locate, self._send_seconds

    def _finish(self) -> None:
        """Give up what is left, give the slot back and count what was sent."""
        self._budget.end()
        if self._slot is not None:
            self._slot.release()
        response = self.response
        if response is None or response.status != 200 or not self.done or self._is_head:
            return
        response.sent()
        if response.reader is not None:
            making, steps = self._wait_seconds + self._make_seconds, response.num_steps
            response.reader.sent(steps, making_seconds=making, sending_seconds=self.seconds - making)

    def _next_group(self) -> Sequence[Buffer] | None:
        """Return the next parts to be sent, after the head if there is one; None: `done`, or `_waiting`."""
        head = b""
        self._budget.spend()
        if self._groups is None:
            self._waiting = None
            try:
                response = self._work(self._budget)
            except Later as later:
                self._waiting = later
                return None
            response.headers[TIMING_HEADER] = timing_value(self.seconds, self._budget.staging_seconds)
            if self._line is not None and self._sends_head:
                head = response.head(self._request, self._line.headers)
                self._line.begun = True
            self.sent_bytes -= len(head)
            self._groups = iter(response.body)
            self.response = response
        group = next(self._groups, None)
        if group is None:
            self.done = not head
            return [head] if head else None
        return [head, *group] if head else group
