"""Token answers: read in a thread, sent from reused memory under flow control.

    loop thread                     gather thread
    admit, lease a buffer     ->    read pages, gather, hash
    headers, body             <-
    wait until the kernel has it, release the buffer

The event loop never touches a map, so a page fault of one answer stalls no other connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from corpus_server import wire
from corpus_server.errors import AnswerTooLarge, CorpusServerError, Overloaded
from corpus_server.reading import ByteArray, Reading, checksum, num_bytes, pieces, read_piece
from corpus_server.settings import Settings
from corpus_server.web.buffers import BufferPool
from corpus_server.web.protocol import abort_connection, drains_fully

T = TypeVar("T")

_log = logging.getLogger("corpus_server")


class Answering:
    """Answers tokens within the limits of a process.

    Args:
        settings: limits.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool = BufferPool(settings.buffer_bytes)
        self._threads = ThreadPoolExecutor(settings.gather_threads, thread_name_prefix="gather")
        self.num_active = 0

    def close(self) -> None:
        """Stop the threads; idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work in a gather thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_admitted(self, work: Callable[[], T]) -> T:
        """Run the blocking work of an answer that is made whole; it counts as one under way.

        Raises:
            Overloaded: at `max_concurrent_answers`.
        """
        self.admit()
        try:
            return await self.run(work)
        finally:
            self.leave()

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

    def admit(self) -> None:
        """Count one more answer under way; `leave` must follow.

        Raises:
            Overloaded: at `max_concurrent_answers`.
        """
        limit = self._settings.max_concurrent_answers
        if self.num_active >= limit:
            raise Overloaded(f"{limit} answers are under way in this process")
        self.num_active += 1

    def leave(self) -> None:
        """Count one answer less."""
        self.num_active -= 1

    async def tokens(
        self, request: Request, reading: Reading, *, npy: bool, checksummed: bool, headers: dict[str, str]
    ) -> Response:
        """Return the answer that holds a reading's bytes.

        Raises:
            AnswerTooLarge, Overloaded, CorpusChanged, ReadFailed: before a byte is sent.
        """
        size = num_bytes(reading)
        self.check_size(size, "count")
        prefix = wire.npy_header(reading.shape, reading.dtype) if npy else b""
        headers = {
            **headers,
            **wire.array_headers(reading.shape, reading.dtype),
            "Content-Length": str(len(prefix) + size),
            "Content-Type": wire.MEDIA_TYPES["npy" if npy else "raw"],
        }
        if request.method == "HEAD":
            return Response(headers=headers)
        self.admit()
        buffer = self._pool.lease(size, unit_bytes=reading.unit_tokens * reading.dtype.itemsize)
        answer = _TokenResponse(self, reading, buffer, prefix, headers, self._settings.send_timeout_seconds)
        try:
            await answer.prepare(checksummed)
        except BaseException:
            answer.release()
            raise
        return answer

    def give_back(self, buffer: ByteArray) -> None:
        """Take back a buffer that nothing reads any more."""
        self._pool.release(buffer)
        self.leave()


class _TokenResponse(Response):
    """Sends a reading piece by piece through one leased buffer."""

    def __init__(
        self,
        answering: Answering,
        reading: Reading,
        buffer: ByteArray,
        prefix: bytes,
        headers: dict[str, str],
        timeout_seconds: float,
    ) -> None:
        self._answering = answering
        self._reading = reading
        self._buffer = buffer
        self._prefix = prefix
        self._timeout_seconds = timeout_seconds
        self._pieces = list(pieces(reading, buffer.nbytes))
        self._first: memoryview | None = None
        self._released = False
        super().__init__(headers=headers)

    async def prepare(self, checksummed: bool) -> None:
        """Read what must be known before the headers go out: the checksum, and that it can be read."""
        if checksummed:
            digest = await self._answering.run(lambda: checksum(self._reading, self._buffer, self._prefix))
            self.headers[wire.CHECKSUM] = wire.checksum_value(digest)
            if len(self._pieces) == 1:
                size = num_bytes(self._reading)
                self._first = self._buffer.data[:size]
        if self._pieces and self._first is None:
            self._first = await self._read(0)

    def release(self) -> None:
        """Give the buffer back; idempotent."""
        if not self._released:
            self._released = True
            self._first = None
            self._answering.give_back(self._buffer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; a failure in its midst cuts the connection, which the length betrays."""
        reusable = drains_fully(scope)
        try:
            async with asyncio.timeout(None) as deadline:
                loop = asyncio.get_running_loop()

                async def push(message: dict[str, object]) -> None:
                    deadline.reschedule(loop.time() + self._timeout_seconds)
                    await send(message)

                await push({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                if self._prefix:
                    await push({"type": "http.response.body", "body": self._prefix, "more_body": True})
                for number in range(len(self._pieces)):
                    body = self._first if number == 0 else await self._read(number)
                    # Only a transport that reports when it is empty may send from reused memory.
                    content = body if reusable else bytes(body or b"")
                    await push({"type": "http.response.body", "body": content, "more_body": True})
                    # An empty body returns once everything before it has left for the kernel.
                    last = number + 1 == len(self._pieces)
                    await push({"type": "http.response.body", "body": b"", "more_body": not last})
                if not self._pieces:
                    await push({"type": "http.response.body", "body": b"", "more_body": False})
        except CorpusServerError as error:
            _log.error("%s: %s; an answer under way was cut", error.slug, error.detail)
            await abort_connection(scope)
        except TimeoutError:
            _log.warning(
                "dropped a reader that took nothing for %g s: %s", self._timeout_seconds, _address(scope)
            )
            await abort_connection(scope)
        except BaseException:
            await abort_connection(scope)
            raise
        finally:
            self.release()

    async def _read(self, number: int) -> memoryview:
        piece = self._pieces[number]
        return await self._answering.run(lambda: read_piece(self._reading, piece, self._buffer))


def _address(scope: Scope) -> str:
    """Return where a request came from."""
    host, port = scope["client"] or ("unknown", 0)
    return f"{host}:{port}"
