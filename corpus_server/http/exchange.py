"""One costly response: a gather thread makes it and reads its pieces; whoever drives it sends them.

    the loop                    gather thread
    admit               ->      make the response; then piece by piece: gather, hash, hand over
    send the rest       <-      (of a piece that a slow reader did not take)
                        ->      next piece ...

A slow reader therefore costs no thread, only the loop's attention and the memory of one piece. The connection
drives the responses of `ROUTES` itself; all others, and these under another server, the application does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from pydantic import ValidationError

from corpus_server import metrics
from corpus_server.admission.request import RequestHead
from corpus_server.answers import tokens
from corpus_server.answers.queries import BatchesQuery, parameters
from corpus_server.answers.response import Buffer, ClientLeft, Response, Slices, problem
from corpus_server.answers.service import Service
from corpus_server.errors import CorpusServerError
from corpus_server.read import wire
from corpus_server.read.gather import OF_THREAD

ROUTES: dict[bytes, Callable[[Service, BatchesQuery, RequestHead], Slices[Response]]] = {
    b"/v1/batches": tokens.batches,
    b"/v1/indices": tokens.indices,
}
"""What a connection answers itself; the application has the same paths as routes."""

_log = logging.getLogger("corpus_server")


def respond(service: Service, request: RequestHead) -> Slices[Response]:
    """Make the response to a request for one of `ROUTES`; an error becomes a problem document."""
    try:
        query = BatchesQuery.model_validate(parameters(request.query_string))
        return (yield from ROUTES[request.path](service, query, request))
    except (ValidationError, CorpusServerError) as error:
        log_error(error)
        return problem(error, request.request_id)
    except Exception as error:  # noqa: BLE001 - a connection must not be left without a response
        _log.exception("%s failed", request.path.decode("latin-1"))
        return problem(error, request.request_id)


def log_error(error: Exception) -> None:
    """Log an error that is the server's own; being busy is none, and staging logs its own."""
    if isinstance(error, CorpusServerError) and error.status >= 500 and error.retry_after_seconds is None:
        _log.error("%s: %s", error.slug, error.detail)


class Exchange:
    """A costly response and its place in the limits.

    `advance` belongs to one gather thread at a time, everything else to the event loop's thread.

    Args:
        request: who asks; is told what the response may cost.
        work: makes the response.
        reader: the client's connection, where it can be cut off.
        head: returns the bytes that go before the body; None: whoever drives it sends the head.

    Attributes:
        response: once it is made.
        cancelled: set by the loop when the client has left; the thread then stops at the next slice.
        waiting: what the response waits for; no thread need be at work until that is done.
        done: whether the whole response was handed over.
        sent_bytes: bytes that were handed over and taken, without those of the head.

    Raises:
        Overloaded, TooManyRequests: there is no room for it.
    """

    def __init__(
        self,
        service: Service,
        request: RequestHead,
        work: Slices[Response],
        reader: asyncio.WriteTransport | None,
        head: Callable[[Response], bytes] | None = None,
    ) -> None:
        self._work = work
        self._head = head
        self._groups: Iterator[list[Buffer]] | None = None
        self._began = time.monotonic()
        self._waits_since: float | None = self._began  # for a thread, or for shards
        self._wait_seconds = self._locate_seconds = self._make_seconds = self._send_seconds = 0.0
        self.response: Response | None = None
        self.cancelled = False
        self.waiting: Future[None] | None = None
        self.done = False
        self.sent_bytes = 0
        self._slot = service.admission.admit(request, reader)
        request.charge = self._slot.charge

    def advance(self, take: Callable[[Sequence[Buffer]], Sequence[Buffer]]) -> Sequence[Buffer]:
        """Make the response, then read and hand over until everything is taken, or something is not.

        Args:
            take: sends buffers; returns what was not taken.

        Returns:
            What was not taken; it is to be sent before the next call. Nothing if the response is `done`, or
            `waiting`; the next call comes after that.

        Raises:
            ClientLeft: the connection is closed.
            CorpusChanged, ReadFailed: reading failed after the head was sent.
        """
        now = time.monotonic()
        if self._waits_since is not None:
            self._wait_seconds += now - self._waits_since
            self._waits_since = None
        located = OF_THREAD.locate_seconds
        rest: Sequence[Buffer] = ()
        while not rest:
            group = self._next_group()
            began = time.monotonic()
            self._make_seconds += began - now
            if group is None:
                self._waits_since = None if self.waiting is None else began
                break
            num_bytes = sum(map(len, group))
            rest = take(group)
            self.sent_bytes += num_bytes - sum(map(len, rest))
            now = time.monotonic()
            self._send_seconds += now - began
            del group  # its memory serves the next piece
        self._locate_seconds += OF_THREAD.locate_seconds - located
        return rest

    @property
    def seconds(self) -> float:
        """Seconds since the request was complete."""
        return time.monotonic() - self._began

    @property
    def stages(self) -> tuple[float, float, float, float]:
        """Seconds of each of `metrics.STAGES` so far."""
        gather = self._make_seconds - self._locate_seconds
        return self._wait_seconds, self._locate_seconds, gather, self._send_seconds

    def finish(self) -> None:
        """Give up what is left, give the slot back and count the tokens; no thread may be at work."""
        try:
            self._work.close()
        finally:
            self._slot.release()
        response = self.response
        if response is None or not self.done:
            return  # of what was not sent as a whole nothing is counted
        if response.source is not None:
            metrics.count_tokens(response.source, response.num_tokens)
        if response.reader is not None:
            making, steps = self._wait_seconds + self._make_seconds, response.num_steps
            response.reader.sent(steps, making_seconds=making, sending_seconds=self.seconds - making)

    def _next_group(self) -> Sequence[Buffer] | None:
        """Return the next parts to be sent, after the head if there is one; None: `done`, or `waiting`."""
        head = b""
        if self._groups is None:
            if (response := self._make()) is None:
                return None
            response.headers[wire.TIMING] = wire.timing_value(self.seconds)
            head = b"" if self._head is None else self._head(response)
            self.sent_bytes -= len(head)
            self._groups = iter(response.body)
            self.response = response
        if self.cancelled:
            raise ClientLeft("the client left")
        group = next(self._groups, None)
        if group is None:
            self.done = not head
            return [head] if head else None
        return [head, *group] if head else group

    def _make(self) -> Response | None:
        """Return the response; None if it is `waiting`."""
        self.waiting = None
        while not self.cancelled:
            try:
                self.waiting = next(self._work)
            except StopIteration as end:
                response: Response = end.value
                return response
            if self.waiting is not None:
                return None
        raise ClientLeft("the client left")
