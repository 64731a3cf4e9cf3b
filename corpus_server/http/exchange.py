"""One request that the door answers: its response is made and sent by gather threads.

    loop thread                 gather thread
    admit               ->      make the response; then piece by piece: gather, hash, send
    send the rest       <-      (of a piece that a slow reader did not take)
                        ->      next piece ...

A slow reader therefore costs no thread, only the loop's attention and the memory of one piece.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

from pydantic import ValidationError

from corpus_server import metrics
from corpus_server.admission.load import Slot
from corpus_server.admission.request import RequestHead
from corpus_server.answers import tokens
from corpus_server.answers.access_log import Answered
from corpus_server.answers.queries import BatchesQuery, parameters
from corpus_server.answers.response import Buffer, ClientLeft, Response, Slices, problem
from corpus_server.answers.service import Service
from corpus_server.errors import CorpusServerError
from corpus_server.http.sending import Descriptor, send
from corpus_server.read import wire
from corpus_server.read.timing import OF_THREAD

ROUTES: dict[bytes, Callable[[Service, BatchesQuery, RequestHead], Slices[Response]]] = {
    b"/v1/batches": tokens.batches,
    b"/v1/indices": tokens.indices,
}
"""What the door answers itself; the application has the same paths as routes."""

PATIENCE_SECONDS = 0.02
"""How long a thread waits for one reader before it leaves the rest to the loop. A fast reader has taken 8 MiB
in less than half of it."""

_log = logging.getLogger("corpus_server")


def respond(service: Service, request: RequestHead, query: BatchesQuery | None = None) -> Slices[Response]:
    """Make the response to a request for one of `ROUTES`; an error becomes a problem document.

    Args:
        query: what the request's query string says, if that is known.
    """
    try:
        if query is None:
            query = BatchesQuery.model_validate(parameters(request.query_string))
        return (yield from ROUTES[request.path](service, query, request))
    except ValidationError as error:
        return problem(error, request.request_id)
    except CorpusServerError as error:
        log_error(error)
        return problem(error, request.request_id)
    except Exception as error:  # noqa: BLE001 - a connection must not be left without a response
        _log.exception("%s failed", request.path.decode("latin-1"))
        return problem(error, request.request_id)


def log_error(error: CorpusServerError) -> None:
    """Log an error that is the server's own; being busy is none, and staging logs its own."""
    if error.status >= 500 and error.retry_after_seconds is None:
        _log.error("%s: %s", error.slug, error.detail)


class Exchange:
    """A request and its response.

    `advance` belongs to one gather thread at a time, everything else to the event loop's thread.

    Args:
        request: for one of `ROUTES`.
        slot: that the response was admitted to.
        headers: further headers of the response.
        close: whether the connection ends with the response; may be set later, too.

    Attributes:
        began: `time.monotonic` second at which the request was complete.
        cancelled: set by the loop when the client has left; the thread then stops at the next slice.
        waiting: what the response waits for; no thread need be at work until that is done.
        done: whether the whole response was handed to the kernel or to the loop.
        status: of the response, once its head was sent.
        sent_bytes: bytes of the body that were handed over.
    """

    def __init__(
        self,
        service: Service,
        request: RequestHead,
        slot: Slot,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        close: bool,
    ) -> None:
        self._service = service
        self._request = request
        self._work = respond(service, request)
        self._headers = headers
        self._groups: Iterator[list[Buffer]] | None = None
        self.caller = request.caller
        self.close = close
        self.slot = slot
        self.began = time.monotonic()
        self._waits_since: float | None = self.began  # for a thread, or for shards
        self._wait_seconds = 0.0
        self._locate_seconds = self._make_seconds = self._send_seconds = 0.0
        self._response: Response | None = None
        self.cancelled = False
        self.waiting: Future[None] | None = None
        self.done = False
        self.status = 0
        self.sent_bytes = 0
        metrics.ACTIVE.number += 1

    def advance(self, to: Descriptor, patience: float) -> Sequence[Buffer]:
        """Make the response, then read and send until all is sent or the reader falls behind.

        Args:
            to: the connection; closed at the end.
            patience: seconds that the reader is waited for; the time for reading the disk does not count.

        Returns:
            What the reader has not taken; the loop sends it and then calls again, unless `done`. Nothing if
            the response is `waiting`; the loop calls again after that.

        Raises:
            ClientLeft: the connection is closed.
            CorpusChanged, ReadFailed: reading failed after the head was sent.
        """
        now = time.monotonic()
        if self._waits_since is not None:
            self._wait_seconds += now - self._waits_since
            self._waits_since = None
        located = OF_THREAD.locate_seconds
        with to:
            while True:
                group = self._next_group()
                began = time.monotonic()
                self._make_seconds += began - now
                if self.waiting is not None:
                    self._waits_since = began
                if self.done or self.waiting is not None:
                    break
                rest = send(to, group, began + patience)
                now = time.monotonic()
                self._send_seconds += now - began
                patience -= now - began
                del group  # its memory serves the next piece
                if rest:
                    break
        self._locate_seconds += OF_THREAD.locate_seconds - located
        return () if self.done or self.waiting is not None else rest

    def finish(self) -> None:
        """Give up what is left, give the slot back and count the response; no thread may be at work."""
        self._work.close()
        self.slot.release()
        metrics.ACTIVE.number -= 1
        response = self._response
        if response is None:
            return  # the client left before
        seconds = time.monotonic() - self.began
        if self.done and response.source is not None:
            metrics.count_tokens(response.source, response.num_tokens)
        if self.done and response.reader is not None:
            making = self._wait_seconds + self._make_seconds
            response.reader.sent(response.num_steps, making_seconds=making, sending_seconds=seconds - making)
        gather = self._make_seconds - self._locate_seconds
        stages = (self._wait_seconds, self._locate_seconds, gather, self._send_seconds)
        answered = Answered(
            request=self._request,
            route=self._request.path.decode("ascii"),
            via="door",
            status=response.status,
            sent_bytes=self.sent_bytes,
            seconds=seconds,
            problem_type=response.problem_type,
            stages=stages,
        )
        self._service.requests.done(answered)

    def _next_group(self) -> Sequence[Buffer]:
        """Return the next parts to be sent; the first ones begin with the head."""
        head = b""
        if self._groups is None:
            response = self._make()
            if response is None:
                return ()
            head = self._begin(response)
            self._groups = iter(response.body)
        if self.cancelled:
            raise ClientLeft("the client left")
        group = next(self._groups, None)
        if group is None:
            self.done = not head
            return [head] if head else ()
        self.sent_bytes += sum(map(len, group))
        return [head, *group] if head else group

    def _begin(self, response: Response) -> bytes:
        """Return the head of the response."""
        self.status = response.status
        self._response = response
        response.headers[wire.TIMING] = wire.timing_value(time.monotonic() - self.began)
        return response.head(self._headers, request_id=self._request.request_id, close=self.close)

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
