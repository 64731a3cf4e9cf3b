"""One object decides whether a request may be answered, by the fast path or by the application."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from urllib.parse import unquote_to_bytes

from corpus_server.admission.access import ANYONE, Access, Caller
from corpus_server.admission.request import MAX_HEAD_BYTES, RequestHead
from corpus_server.errors import (
    AnswerTooLarge,
    BadRequest,
    BodyTooLarge,
    Forbidden,
    HeadTooLarge,
    Overloaded,
    TooManyRequests,
    UrlTooLong,
)
from corpus_server.settings import Settings

MAX_URL_BYTES = 8192
"""Bytes of a request's target; the longest that a client of ours sends has about 250."""

MAX_ROWS = 2**22
"""Rows of one response: what 16 MiB, the size that the client asks for, hold of the shortest windows.
Locating them takes about a second, in slices, and for indices 64 MiB."""

MAX_BODY_BYTES = 32 * 2**20
"""Bytes of one request's body; a plan that leaves out 10^6 steps takes about 20 MB of JSON."""

MAX_BODIES_BYTES = MAX_BODY_BYTES
"""Bytes of all large bodies that a process is receiving at the same time: one of the largest, or many."""

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to here are always received: one that never ends costs no more than its connection does. Routes
that read no body drop it."""

STALLED_SECONDS = 2.0
"""A reader that took nothing for so long may be dropped when its slot is needed. A client that was only busy
asks again and gets the same bytes."""

FAIR_SHARE = 4
"""A token may hold at most this many times the slots that are still free. One alone gets four fifths of all,
and several busy ones get the same each: nobody finds all slots taken by another."""

MAX_BYTES = 2**30
"""Bytes of all token responses under way in a process, give or take one: 64 of 16 MiB, the most that a loader
asks for at a time. They leave within seconds; if all readers stop, no more than this stays in memory."""

SMALL_BYTES = 256 * 1024
"""A response up to here is never refused for its bytes, of which the kernel takes most at once: a loader of
small steps must not wait for those of large ones."""

LOOK_SECONDS = 0.1
"""Between two looks for stalled readers. A look passes all slots, and a burst of refusals must not wait for
one each."""

MAX_FOLLOWERS = 32
"""Streams of events of a process. They hold no slot and read one small file for all."""

BURST_SECONDS = 1.0
"""Time over which `max_bytes_per_second` is averaged."""

_OPEN_PATHS = (b"/", b"/healthz", b"/readyz", b"/v1/access")
_OPEN_FOLDER = (
    b"/page/"  # HTML and scripts that hold nothing of a corpus; a browser cannot send a token for them
)
_SCOPES = {
    b"/metrics": "metrics",
    b"/v1/live": "metrics",
    b"/v1/plans": "inspect",
}  # of GET; all other paths of /v1 read

_log = logging.getLogger("corpus_server")


@dataclass(eq=False, slots=True)
class Usage:
    """What a token uses of this process now."""

    num_slots: int = 0
    num_bytes: int = 0  # of responses under way
    paid_until: float = 0.0  # monotonic second until which what it took is within its bytes per second


@dataclass(eq=False, slots=True)
class Slot:
    """The right to have one costly response under way; give it back with `release`."""

    _admission: Admission
    _caller: Caller
    _usage: Usage
    _reader: asyncio.WriteTransport | None
    _unsent_bytes: int = 0
    _unsent_since: float = 0.0
    num_bytes: int = 0  # of the body, once that is known

    def charge(self, num_bytes: int) -> None:
        """Count the body of the response, once its size is known; from any thread.

        Raises:
            Overloaded: it is not small, and all bytes are taken, or the token's share of them.
        """
        limits = self._caller.limits
        with self._admission.lock:
            if num_bytes > SMALL_BYTES:
                self._admission.check_bytes(self._usage)
            self.num_bytes = num_bytes
            self._admission.num_bytes += num_bytes
            self._usage.num_bytes += num_bytes
            if limits.max_bytes_per_second is not None:
                paid_until = max(self._usage.paid_until, time.monotonic())
                self._usage.paid_until = paid_until + num_bytes / limits.max_bytes_per_second

    def release(self) -> None:
        """Give the slot back; idempotent."""
        if self in self._admission.slots:
            self._admission.slots.discard(self)
            self._usage.num_slots -= 1
            with self._admission.lock:
                self._admission.num_bytes -= self.num_bytes
                self._usage.num_bytes -= self.num_bytes

    def drop(self) -> None:
        """Cut the connection of the client and give the slot back."""
        self.release()
        if self._reader is not None:
            self._reader.abort()

    def stalled_seconds(self, now: float) -> float:
        """Return for how long the client was seen to take nothing, 0 if it was not looked at before."""
        unsent_bytes = 0 if self._reader is None else self._reader.get_write_buffer_size()
        if not unsent_bytes or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent_bytes, now
        return now - self._unsent_since


class Admission:
    """The limits of one process.

    The `check_...` methods may be called from any thread, everything else from the event loop's alone.

    Attributes:
        slots: of responses under way.
        num_bytes: of the responses under way whose sizes are known; changed under `lock`.
        closing: the process lets go of its connections: each ends with its next response.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self._settings = settings
        self._access = access
        self._usage: dict[str, Usage] = {}  # by the name of the token
        self.slots: set[Slot] = set()
        self.num_bytes = 0
        self.lock = threading.Lock()
        self._looked_at = -math.inf  # monotonic second of the last look for stalled readers
        self.closing = False
        self._body_bytes = 0
        self._num_followers = 0
        self._short: Counter[str] = Counter()  # short answers that are made now, by the name of the token
        self._address_of: dict[asyncio.BaseTransport, str] = {}  # of every connection
        self._connections: Counter[str] = Counter()  # by address

    def connect(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection; `disconnect` must follow, also after an error.

        Raises:
            Overloaded: there are too many, of all clients or from this address.
        """
        peer = transport.get_extra_info("peername")
        address = peer[0] if isinstance(peer, tuple) else ""  # of a Unix socket
        # Kept: a TLS transport forgets its peer before the connection is reported as lost.
        self._address_of[transport] = address
        self._connections[address] += 1
        most, own = self._settings.max_connections, self._settings.max_connections_per_address
        if len(self._address_of) > most:
            raise Overloaded(f"this process has {most} connections, as many as it may")
        if address and self._connections[address] > own:
            raise Overloaded(f"this process has {own} connections from {address}, as many as it may")

    def disconnect(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection no longer."""
        address = self._address_of.pop(transport)
        self._connections[address] -= 1
        if not self._connections[address]:
            del self._connections[address]

    def check(self, request: RequestHead) -> Caller:
        """Return who asks, and may; notes in the request who asks, also where that one may not.

        Raises:
            UrlTooLong, HeadTooLarge, BodyTooLarge, BadRequest: the head alone decides that.
            Unauthorized: no valid token came.
            Forbidden: the token lacks a scope, or another site's page may have sent this. Which corpora are
                read is known, and checked, only later.
        """
        if len(request.target) > MAX_URL_BYTES:
            raise UrlTooLong(f"the URL must have at most {MAX_URL_BYTES} bytes, got {len(request.target)}")
        if sum(len(name) + len(value) for name, value in request.headers.items()) > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"a request's head must have at most {MAX_HEAD_BYTES} bytes")
        if b"#" in request.target:
            raise BadRequest(
                "a request's target must not hold '#': fragments are not sent to servers (RFC 9110, 7.1)",
                remedy="leave the fragment out, or write %23 for a '#' in a value",
            )
        # As the router reads it: another spelling of a path must not ask for another scope.
        path = unquote_to_bytes(request.path)
        _check_body(request)
        if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER):
            return ANYONE
        caller = request.caller = self._access.caller(request.headers.get("authorization"))
        if request.method == "POST":
            _check_origin(request)
            caller.check("plans")
        else:
            caller.check(_SCOPES.get(path) or ("read" if path.startswith(b"/v1/") else "inspect"))
        return caller

    def admit(self, caller: Caller, reader: asyncio.WriteTransport | None = None) -> Slot:
        """Take a slot for a costly response.

        Stalled readers hold at most half of the slots and of the bytes for long: where more do, and a request
        comes when all are taken, those are dropped that have taken nothing for the longest time.

        Args:
            reader: transport of the client, where it can be cut off.

        Raises:
            Overloaded: all slots are taken, or the token's share of them.
            TooManyRequests: the token is at a limit of its own.
        """
        usage = self._usage.setdefault(caller.name, Usage())
        _check_limits(caller, usage)
        limit = self._settings.max_concurrent_answers
        if len(self.slots) >= limit or self.num_bytes >= MAX_BYTES:
            self._drop_stalled()
        self._check_share("answers", len(self.slots), usage.num_slots, limit)
        slot = Slot(self, caller, usage, reader)
        self.slots.add(slot)
        usage.num_slots += 1
        return slot

    @contextmanager
    def short(self, caller: Caller) -> Iterator[None]:
        """Count a short answer, such as a description, while it is made.

        As many as costly ones: two threads make them, and who comes later would wait for all others.

        Raises:
            Overloaded: as many are being made as may be, or the token has its share of them.
        """
        limit = self._settings.max_concurrent_answers
        self._check_share("answers", self._short.total(), self._short[caller.name], limit)
        self._short[caller.name] += 1
        try:
            yield
        finally:
            self._short[caller.name] -= 1

    def check_bytes(self, usage: Usage) -> None:
        """Raise Overloaded unless a token may have another large response under way, whatever its size."""
        self._check_share("bytes of answers", self.num_bytes, usage.num_bytes, MAX_BYTES)

    def _check_share(self, what: str, num_all: int, num_own: int, limit: int) -> None:
        """Raise Overloaded unless there is room for something more of a token."""
        num_free = limit - num_all
        is_shared = (self._access.num_tokens or 0) > 1
        if num_free <= 0 or (is_shared and num_own >= FAIR_SHARE * num_free):
            raise Overloaded(f"{num_all} {what} are under way in this process")

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
        limit = self._settings.max_answer_bytes
        if size_bytes > limit:
            remedy = f"a smaller {parameter}, or --max-answer-bytes when starting the server"
            raise AnswerTooLarge("an answer", size_bytes, limit, "bytes", parameter=parameter, remedy=remedy)

    def check_rows(self, count: int, rows: int) -> None:
        """Raise AnswerTooLarge for a response of more than `MAX_ROWS` rows."""
        if count * rows > MAX_ROWS:
            remedy = f"ask for at most {MAX_ROWS // rows} steps"
            raise AnswerTooLarge(
                "an answer", count * rows, MAX_ROWS, "rows", parameter="count", remedy=remedy
            )

    def check_shards(self, size_bytes: int) -> None:
        """Raise AnswerTooLarge if the staged shards of a response exceed the cache."""
        limit = self._settings.cache_bytes
        if size_bytes > limit:
            remedy = "ask for fewer steps, or give a larger --cache-bytes when starting the server"
            what = "the cache for the shards of an answer"
            raise AnswerTooLarge(what, size_bytes, limit, "bytes", parameter="count", remedy=remedy)

    def check_text_size(self, num_tokens: int, parameter: str) -> None:
        """Raise AnswerTooLarge for a JSON or text response of more than `max_text_tokens`."""
        limit = self._settings.max_text_tokens
        if num_tokens > limit:
            what, remedy = "an answer of format json or text", "format=raw or format=npy, or ask for less"
            raise AnswerTooLarge(what, num_tokens, limit, "tokens", parameter=parameter, remedy=remedy)

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        looked_at = [(slot.stalled_seconds(now), slot) for slot in self.slots]
        stalled = [each for each in looked_at if each[0] > STALLED_SECONDS]
        stalled.sort(key=itemgetter(0))
        num_bytes = sum(slot.num_bytes for _, slot in stalled)
        while len(stalled) > self._settings.max_concurrent_answers // 2 or num_bytes > MAX_BYTES // 2:
            seconds, slot = stalled.pop()
            num_bytes -= slot.num_bytes
            _log.warning("dropped a reader that took nothing for %.1f s: its slot was needed", seconds)
            slot.drop()


def max_body_bytes(request: RequestHead) -> int:
    """Return how many bytes of body the route of a request takes."""
    takes_plan = request.method == "POST" and unquote_to_bytes(request.path) == b"/v1/plans"
    return MAX_BODY_BYTES if takes_plan else SMALL_BODY_BYTES


def _check_body(request: RequestHead) -> None:
    """Raise BodyTooLarge for a body whose announced size exceeds what its route reads."""
    announced = request.headers.get("content-length", "0")
    most = max_body_bytes(request)
    if announced.isdecimal() and int(announced[:20]) > most:  # other spellings are the parser's to refuse
        raise BodyTooLarge(f"the body of this request must have at most {most} bytes, got {announced:.20}")


def _check_origin(request: RequestHead) -> None:
    """Raise Forbidden for what a page of another site can have a browser send without asking first.

    Browsers name the page's site in every POST. With this content type they ask before they send it to
    another site, and no server of ours agrees.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if "origin" in request.headers and media_type != "application/json":
        raise Forbidden(
            "a request with an Origin header must have Content-Type: application/json",
            remedy="send Content-Type: application/json, or no Origin",
        )


def _check_limits(caller: Caller, usage: Usage) -> None:
    """Raise TooManyRequests if a token is at a limit of its own: what it has asked for before is counted."""
    limits = caller.limits
    if limits.max_requests is not None and usage.num_slots >= limits.max_requests:
        raise TooManyRequests(f"token {caller.name!r} may have {limits.max_requests} responses under way")
    if limits.max_bytes is not None and usage.num_bytes >= limits.max_bytes:
        raise TooManyRequests(f"token {caller.name!r} may have {limits.max_bytes} bytes under way")
    if (seconds := usage.paid_until - time.monotonic() - BURST_SECONDS) > 0:
        detail = f"token {caller.name!r} may take {limits.max_bytes_per_second} bytes per second"
        raise TooManyRequests(detail, retry_after_seconds=math.ceil(seconds))
