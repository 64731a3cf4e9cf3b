"""One object decides whether a request may be answered, by the fast path or by the application."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from corpus_server.admission.access import Access, Caller
from corpus_server.admission.checks import CHECKS, MAX_BODY_BYTES, SMALL_BODY_BYTES, Moment
from corpus_server.admission.load import Load, Slot
from corpus_server.admission.request import RequestHead
from corpus_server.errors import AnswerTooLarge, BodyTooLarge, Overloaded
from corpus_server.settings import Settings

MAX_ROWS = 2**22
"""Rows of one response: what 16 MiB, the size that the client asks for, hold of the shortest windows.
Locating them takes about a second, in slices, and for indices 64 MiB."""

MAX_BODIES_BYTES = MAX_BODY_BYTES
"""Bytes of all large bodies that a process is receiving at the same time: one of the largest, or many."""

MAX_FOLLOWERS = 32
"""Streams of events of a process. They hold no slot and read one small file for all."""


class Admission(Load):
    """What is under way in one process, and its limits.

    The `check_...` methods may be called from any thread, everything else from the event loop's alone.

    Attributes:
        closing: the process lets go of its connections: each ends with its next response.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        super().__init__(settings, access)
        self.closing = False
        self._body_bytes = 0
        self._num_followers = 0
        self._short: Counter[str] = Counter()  # short answers that are made now, by the name of the token
        self._address_of: dict[asyncio.BaseTransport, str] = {}  # of every connection

    def connect(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection and check it; `disconnect` must follow, also after an error."""
        peer = transport.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""  # of a Unix socket
        self._address_of[transport] = address
        self.num_connections += 1
        self.connections[address] += 1
        self._ask("connection", RequestHead("", b"", {}, address=address))

    def disconnect(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection no longer."""
        connections, address = self.connections, self._address_of.pop(transport)
        self.num_connections -= 1
        connections[address] -= 1
        if not connections[address]:
            del connections[address]

    def check(self, request: RequestHead) -> Caller:
        """Return who asks, and may; notes in the request who asks, also where that one may not.

        Raises:
            CorpusServerError: one of the `CHECKS` refuses the request. Which corpora are read is known, and
                checked, only later.
        """
        self._ask("request", request)
        return request.caller

    def admit(self, request: RequestHead, reader: asyncio.WriteTransport | None = None) -> Slot:
        """Take a slot for a costly response.

        Stalled readers hold at most half of the slots and of the bytes for long: where more do, and a request
        comes when all are taken, those are dropped that have taken nothing for the longest time.

        Args:
            reader: transport of the client, where it can be cut off.

        Raises:
            CorpusServerError: one of the `CHECKS` refuses the response.
        """
        self._ask("response", request)
        return self.take(request.caller, reader)

    def _ask(self, moment: Moment, request: RequestHead) -> None:
        for check in CHECKS:
            if check.at == moment:
                check.ask(self, request)

    @contextmanager
    def short(self, caller: Caller) -> Iterator[None]:
        """Count a short answer, such as a description, while it is made.

        As many as costly ones: two threads make them, and who comes later would wait for all others.

        Raises:
            Overloaded: as many are being made as may be, or the token has its share of them.
        """
        limit = self.settings.max_concurrent_answers
        self.check_share("answers", self._short.total(), self._short[caller.name], limit)
        self._short[caller.name] += 1
        try:
            yield
        finally:
            self._short[caller.name] -= 1

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count a stream of events until it ends; raise Overloaded if there are `MAX_FOLLOWERS`."""
        if self._num_followers >= MAX_FOLLOWERS:
            raise Overloaded(f"this process sends {MAX_FOLLOWERS} streams of events, as many as it may")
        self._num_followers += 1
        try:
            yield
        finally:
            self._num_followers -= 1

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of one request's body while it is received and worked on.

        Yields:
            A function to be called with the size of the body so far; it raises BodyTooLarge or Overloaded.
        """
        counted = 0

        def count(num_bytes: int) -> None:
            nonlocal counted
            if num_bytes > MAX_BODY_BYTES:
                raise BodyTooLarge(f"a plan must have at most {MAX_BODY_BYTES} bytes")
            if num_bytes > SMALL_BODY_BYTES:
                if self._body_bytes + num_bytes - counted > MAX_BODIES_BYTES:
                    raise Overloaded(f"{self._body_bytes} bytes of other bodies are being received")
                self._body_bytes += num_bytes - counted
                counted = num_bytes

        try:
            yield count
        finally:
            self._body_bytes -= counted

    def check_size(self, size_bytes: int, parameter: str) -> None:
        """Raise AnswerTooLarge above `max_answer_bytes`, before anything of the response is computed."""
        remedy = f"a smaller {parameter}, or --max-answer-bytes when starting the server"
        limit = self.settings.max_answer_bytes
        _check("an answer", size_bytes, limit, "bytes", parameter=parameter, remedy=remedy)

    def check_rows(self, count: int, rows: int) -> None:
        """Raise AnswerTooLarge for a response of more than `MAX_ROWS` rows."""
        remedy = f"ask for at most {MAX_ROWS // max(rows, 1)} steps"
        _check("an answer", count * rows, MAX_ROWS, "rows", parameter="count", remedy=remedy)

    def check_shards(self, size_bytes: int) -> None:
        """Raise AnswerTooLarge if the staged shards of a response exceed the cache."""
        remedy = "ask for fewer steps, or give a larger --cache-bytes when starting the server"
        what, limit = "the cache for the shards of an answer", self.settings.cache_bytes
        _check(what, size_bytes, limit, "bytes", parameter="count", remedy=remedy)

    def check_text_size(self, num_tokens: int, parameter: str) -> None:
        """Raise AnswerTooLarge for a JSON or text response of more than `max_text_tokens`."""
        what, remedy = "an answer of format json or text", "format=raw or format=npy, or ask for less"
        _check(what, num_tokens, self.settings.max_text_tokens, "tokens", parameter=parameter, remedy=remedy)


def _check(what: str, size: int, limit: int, unit: str, *, parameter: str, remedy: str) -> None:
    if size > limit:
        raise AnswerTooLarge(what, size, limit, unit, parameter=parameter, remedy=remedy)
