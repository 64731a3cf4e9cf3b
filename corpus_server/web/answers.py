"""Token answers: read, hashed and sent by a thread, within limits.

    loop thread            gather thread
    admit            ->    locate; then piece by piece: gather, hash, send
    send the rest    <-    (of a piece that a slow reader did not take)

The event loop never touches a map, so a page fault of one answer stalls no other connection. An answer
holds one piece of memory, whatever its size.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

import xxhash
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from corpus_server import wire
from corpus_server.errors import AnswerTooLarge, CorpusServerError, Overloaded
from corpus_server.reading import Reading, checksum, num_bytes, pieces, read_piece
from corpus_server.settings import Settings
from corpus_server.web.connection import (
    PATIENCE_SECONDS,
    Connection,
    Descriptor,
    ReaderGone,
    connection_of,
    send,
)
from corpus_server.web.threads import Threads

PIECE_BYTES = 1024 * 1024
"""Stays in the processor's cache between gather, hash and send; half as much costs a tenth more."""

T = TypeVar("T")
Head = Callable[[str | None, float], bytes]

_log = logging.getLogger("corpus_server")


class Answering:
    """Answers tokens within the limits of a process.

    Args:
        settings: limits.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._threads = Threads(settings.gather_threads, "gather")
        self._ahead = Threads(1, "ahead")
        self.num_active = 0

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._threads.close()
        self._ahead.close()

    @property
    def has_room(self) -> bool:
        """Whether another answer may begin."""
        return self.num_active < self._settings.max_concurrent_answers

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work in a gather thread."""
        return await self._threads.run(work)

    def run_ahead(self, job: Callable[[], None]) -> None:
        """Run a job that nobody waits for, and which must not raise, in a thread for such jobs.

        One is enough: they compute more than they wait, and two would wait for the interpreter's lock.
        """
        self._ahead.put(job)

    async def run_admitted(self, work: Callable[[], T]) -> T:
        """Run the blocking work of an answer that is made whole; it counts as one under way.

        Raises:
            Overloaded: at `max_concurrent_answers`.
        """
        with self.admitted():
            return await self.run(work)

    def check_size(self, size_bytes: int, parameter: str) -> None:
        """Refuse an answer before anything of it is computed.

        Raises:
            AnswerTooLarge: above `max_answer_bytes`.
        """
        limit = self._settings.max_answer_bytes
        if size_bytes > limit:
            raise AnswerTooLarge(
                f"the answer would hold {size_bytes} bytes, this server sends at most {limit}; ask for less",
                parameter=parameter,
                received=size_bytes,
                accepted=f"at most {limit} bytes",
                remedy=f"a smaller {parameter}, or --max-answer-bytes when starting the server",
            )

    def check_text_size(self, num_tokens: int, parameter: str) -> None:
        """Refuse a JSON or text answer of too many tokens.

        Raises:
            AnswerTooLarge: above `max_text_tokens`.
        """
        limit = self._settings.max_text_tokens
        if num_tokens > limit:
            raise AnswerTooLarge(
                f"format json or text holds at most {limit} tokens, this answer would hold {num_tokens}",
                parameter=parameter,
                received=num_tokens,
                accepted=f"at most {limit} tokens",
                remedy="format=raw or format=npy, or ask for less",
            )

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count an answer as under way.

        Raises:
            Overloaded: at `max_concurrent_answers`.
        """
        if not self.has_room:
            limit = self._settings.max_concurrent_answers
            raise Overloaded(f"{limit} answers are under way in this process")
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    async def deliver(self, delivery: Delivery, connection: Connection, head: Head) -> None:
        """Send an answer from threads; a failure in its midst cuts the connection, which the length betrays.

        Args:
            delivery: what is sent.
            connection: to whom.
            head: makes status line and headers of the checksum that belongs there, and of the seconds that
                the answer took until it could begin.

        Raises:
            Overloaded, CorpusChanged, ReadFailed: nothing was sent.
        """
        timeout = self._settings.send_timeout_seconds
        delivery.asked_at = time.perf_counter()
        with self.admitted():
            async with _cut_on_failure(delivery, connection):
                await connection.push((), timeout)  # what an earlier answer may have left
                if delivery.at_hand:
                    rest = delivery.start(connection.open(), head, patience_seconds=0.0)
                else:
                    rest = await self._threads.run(partial(delivery.start, connection.open(), head))
                await connection.push(rest, timeout)
                while not delivery.done:
                    rest = await self._threads.run(partial(delivery.go_on, connection.open()))
                    await connection.push(rest, timeout)

    def deliver_at_once(
        self, delivery: Delivery, connection: Connection, head: Head
    ) -> Coroutine[None, None, None] | None:
        """Send an answer that is at hand, waiting for nothing; return what sends what was not taken.

        Args:
            delivery, connection, head: as for `deliver`; nothing is on its way to the connection.
        """
        delivery.asked_at = time.perf_counter()
        try:
            rest = delivery.start(connection.open(), head, patience_seconds=0.0)
        except ReaderGone:
            connection.cut()
            return None
        if rest:
            return self._deliver_rest(delivery, connection, rest)
        connection.sent_bytes = delivery.sent_bytes
        connection.complete()
        return None

    async def _deliver_rest(
        self, delivery: Delivery, connection: Connection, rest: Sequence[bytes | memoryview]
    ) -> None:
        self.num_active += 1  # it has begun, whatever the limit
        try:
            async with _cut_on_failure(delivery, connection):
                await connection.push(rest, self._settings.send_timeout_seconds)
        finally:
            self.num_active -= 1

    def tokens(
        self,
        request: Request,
        reading: Reading,
        *,
        npy: bool,
        checksum: wire.ChecksumPlace,
        headers: dict[str, str],
    ) -> Response:
        """Return the answer that holds a reading's bytes; it reads, and may fail, when it is called.

        Raises:
            AnswerTooLarge: at once.
        """
        size = num_bytes(reading)
        self.check_size(size, "count")
        prefix = wire.npy_header(reading.shape, reading.dtype) if npy else b""
        length = len(prefix) + size + (wire.TAIL_BYTES if checksum == "tail" else 0)
        headers = {
            **headers,
            **wire.array_headers(reading.shape, reading.dtype),
            "Content-Length": str(length),
            "Content-Type": wire.MEDIA_TYPES["npy" if npy else "raw"],
        }
        if checksum == "tail":
            headers[wire.CHECKSUM] = wire.TAIL
        if request.method == "HEAD":
            return Response(headers=headers)
        return TokenResponse(self, Delivery(reading, prefix, checksum), headers)


@asynccontextmanager
async def _cut_on_failure(delivery: Delivery, connection: Connection) -> AsyncIterator[None]:
    """End an answer: whole, refused before anything of it was sent, or by cutting the connection."""
    try:
        yield
    except CorpusServerError as error:
        if not delivery.started:
            raise
        _log.error("%s: %s; an answer under way was cut", error.slug, error.detail)
        await connection.abort()
    except ReaderGone as gone:
        _log.log(logging.WARNING if gone.stalled else logging.DEBUG, "dropped a reader that %s", gone)
        await connection.abort()
    except BaseException:
        await connection.abort()
        raise
    else:
        connection.complete()
    finally:
        connection.sent_bytes = max(delivery.sent_bytes, 0)


class Delivery:
    """The part of an answer that blocks; each of its calls belongs in a thread.

    Args:
        reading: what is sent, after `prefix`.
        checksum: in the header, it costs reading everything before the first byte goes out, and what is
            more than one piece is read twice.

    Attributes:
        reading: of the array.
        at_hand: whether all of it is in memory, so that sending it blocks for no disk.
        asked_at: `time.perf_counter` seconds.
        started: whether anything was sent.
        sent_bytes: of the body.
    """

    def __init__(self, reading: Reading, prefix: bytes, checksum: wire.ChecksumPlace) -> None:
        self.reading = reading
        self._prefix = prefix
        self._checksum = checksum
        self._pieces = deque(pieces(reading, PIECE_BYTES))
        self._unsent: list[bytes | memoryview] = []
        self._digest = xxhash.xxh3_64()
        self.at_hand = False
        self.asked_at = 0.0
        self.started = False
        self.sent_bytes = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to be taken."""
        return not self._unsent and not self._pieces

    def prepare(self) -> str | None:
        """Read what must be read before the headers are sent; return the checksum that belongs there.

        Raises:
            CorpusChanged, ReadFailed: in time to be the answer.
        """
        self._unsent = [self._prefix] if self._prefix else []
        if self._checksum == "true" and len(self._pieces) > 1:
            return wire.checksum_value(checksum(self.reading, PIECE_BYTES, self._prefix))
        self._read_next()
        if self._checksum != "true":
            return None
        for part in self._unsent:
            self._digest.update(part)
        return wire.checksum_value(self._digest)

    def take(self) -> list[bytes | memoryview]:
        """Return the next parts of the body."""
        if not self._unsent:
            self._read_next()
        parts, self._unsent = self._unsent, []
        return parts

    def again(self) -> Delivery:
        """Return a delivery of the same, all of which was read by `prepare`.

        Raises:
            CorpusChanged, ReadFailed: it must not be sent any more.
        """
        self.reading.check_unchanged()
        again = object.__new__(Delivery)
        again.__dict__.update(self.__dict__)
        again._unsent = list(self._unsent)
        again.at_hand = True
        return again

    def start(
        self,
        to: Descriptor,
        head: Head,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> Sequence[bytes | memoryview]:
        """Prepare, send from the head on, which is made of the checksum, and `go_on`."""
        with to:
            value = None if self.at_hand else self.prepare()
            first = head(value, time.perf_counter() - self.asked_at)
            self._unsent.insert(0, first)
            self.sent_bytes = -len(first)
            return self.go_on(to, patience_seconds=patience_seconds)

    def go_on(
        self, to: Descriptor, *, patience_seconds: float = PATIENCE_SECONDS
    ) -> Sequence[bytes | memoryview]:
        """Read and send until all is sent or the reader falls behind; return what it has not taken.

        Raises:
            CorpusChanged, ReadFailed: not all can be sent.
            ReaderGone: nobody is there to take it.
        """
        with to:
            while not self.done:
                parts = self.take()
                began = time.monotonic()
                self.started = True
                rest = send(to, parts, began + patience_seconds)
                patience_seconds -= time.monotonic() - began
                self.sent_bytes += sum(map(len, parts))
                if rest:
                    self.reading.forget()  # locating again is little beside what such a reader takes
                    return rest
            return ()

    def _read_next(self) -> None:
        if self._pieces:
            piece = read_piece(self.reading, self._pieces.popleft())
            self._unsent.append(piece)
            if self._checksum == "tail":
                self._digest.update(piece)
        if self._checksum == "tail" and not self._pieces:
            self._unsent.append(wire.checksum_tail(self._digest))


class TokenResponse(Response):
    """Reads and sends when it is called; raises only as long as nothing was sent."""

    def __init__(self, answering: Answering, delivery: Delivery, headers: dict[str, str]) -> None:
        self._answering = answering
        self._delivery = delivery
        self.reading = delivery.reading
        super().__init__(headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer.

        Raises:
            Overloaded, CorpusChanged, ReadFailed.
        """
        connection = connection_of(scope)
        if connection is not None:

            def head(value: str | None, seconds: float) -> bytes:
                return connection.head(self._header_lines(value, seconds))

            await self._answering.deliver(self._delivery, connection, head)
            return
        with self._answering.admitted():
            await self._send_messages(self._delivery, send)

    async def _send_messages(self, delivery: Delivery, send: Send) -> None:
        """Send under a server that is not ours, which may keep what it is given."""
        asked_at = time.perf_counter()
        value = await self._answering.run(delivery.prepare)
        headers = self._header_lines(value, time.perf_counter() - asked_at)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not delivery.done:
            for part in await self._answering.run(delivery.take):
                await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _header_lines(self, checksum: str | None, seconds: float) -> list[tuple[bytes, bytes]]:
        lines = [*self.raw_headers, (wire.TIMING.lower().encode(), wire.timing_value(seconds).encode())]
        if checksum is not None:
            lines.append((wire.CHECKSUM.lower().encode(), checksum.encode()))
        return lines
