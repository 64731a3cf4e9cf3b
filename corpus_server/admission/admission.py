"""Whether a request may be answered: one list of checks, and what is under way in this process.

A check is a function that returns, or raises an error of `errors.py`. It is asked at one of these moments:

    connection   a client has connected; of the request only its `address` is known
    request      a head has come, on the fast path or to the application; `caller` is known after `token`
    response     a costly response is about to be made, after the query was understood

All of them run in the event loop's thread and must not wait. Which corpora a request reads is known only
later: `Caller.check_read`. So are sizes: the methods `check_...` of `Admission`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Literal
from urllib.parse import unquote_to_bytes

from corpus_server.admission.access import Access
from corpus_server.admission.request import ANYONE, MAX_HEAD_BYTES, Caller, RequestHead
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
from corpus_server.settings import Settings, networks

MAX_URL_BYTES = 8192
"""Bytes of a request's target; the longest that a client of ours sends has about 250."""

MAX_BODY_BYTES = 32 * 2**20
"""Bytes of one request's body, and of all large bodies that a process is receiving at the same time; a plan
that leaves out 10^6 steps takes about 20 MB of JSON."""

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to here are always received: one that never ends costs no more than its connection does. Routes
that read no body drop it."""

MAX_ROWS = 2**22
"""Rows of one response: what 16 MiB, the size that the client asks for, hold of the shortest windows.
Locating them takes about a second, in slices, and for indices 64 MiB."""

MAX_FOLLOWERS = 32
"""Streams of events of a process. They hold no slot and read one small file for all."""

MAX_BYTES = 2**30
"""Bytes of all token responses under way in a process, give or take one: 64 of 16 MiB, the most that a loader
asks for at a time. They leave within seconds; if all readers stop, no more than this stays in memory."""

SMALL_BYTES = 256 * 1024
"""A response up to here is never refused for its bytes, because the kernel buffers most of them immediately.
A loader of small steps must not wait for those of large ones."""

FAIR_SHARE = 4
"""A token may hold at most this many times the slots that are still free. One alone gets four fifths of all,
and several busy ones get the same each: nobody finds all slots taken by another."""

BURST_SECONDS = 1.0
"""Time over which `max_bytes_per_second` is averaged."""

STALLED_SECONDS = 2.0
"""A reader that took nothing for so long may be dropped when its slot is needed. A client that was only busy
asks again and gets the same bytes."""

LOOK_SECONDS = 0.1
"""Between two looks for stalled readers. A look passes all slots, and a burst of refusals must not wait for
one each."""

_HEALTH_PATHS = (b"/healthz", b"/readyz")
_OPEN_PATHS = (b"/", *_HEALTH_PATHS, b"/v1/access")
# HTML and scripts that hold nothing of a corpus; a browser cannot send a token for them.
_OPEN_FOLDER = b"/page/"
# Of GET; all other paths of /v1 read.
_SCOPES = {b"/metrics": "metrics", b"/v1/live": "metrics", b"/v1/plans": "inspect"}

_log = logging.getLogger("corpus_server")

Moment = Literal["connection", "request", "response"]


@dataclass(frozen=True, slots=True)
class Check:
    """One reason to refuse.

    Args:
        name: of the check, in the docs.
        at: when it is asked.
        ask: raises an error of `errors.py`, or returns; its docstring says in the docs whom it lets pass.
    """

    name: str
    at: Moment
    ask: Callable[[Admission, RequestHead], None]


def _connections(gate: Admission, request: RequestHead) -> None:
    """The process, and the address, have fewer connections than they may have."""
    most, own = gate.settings.max_connections, gate.settings.max_connections_per_address
    if gate.num_connections > most:
        raise Overloaded(f"this process has {most} connections, as many as it may")
    if request.address and gate.connections[request.address] > own:
        raise Overloaded(f"this process has {own} connections from {request.address}, as many as it may")


def _address(gate: Admission, request: RequestHead) -> None:
    """The address belongs to a network that is served (`allow`), or the path is `/healthz` or `/readyz`."""
    allow, address = gate.settings.allow, request.address
    if allow is None or not address or _is_in(address, allow) or _path(request) in _HEALTH_PATHS:
        return
    raise Forbidden(f"{address} is in no network that this server serves", remedy="ask from another network")


def _url(gate: Admission, request: RequestHead) -> None:
    """The URL is not too long, and has no fragment."""
    if len(request.target) > MAX_URL_BYTES:
        raise UrlTooLong(f"the URL must have at most {MAX_URL_BYTES} bytes, got {len(request.target)}")
    if b"#" in request.target:
        raise BadRequest(
            "a request's target must not hold '#': fragments are not sent to servers (RFC 9110, 7.1)",
            remedy="leave the fragment out, or write %23 for a '#' in a value",
        )


def _head(gate: Admission, request: RequestHead) -> None:
    """The head is not too long."""
    if sum(len(name) + len(value) for name, value in request.headers.items()) > MAX_HEAD_BYTES:
        raise HeadTooLarge(f"a request's head must have at most {MAX_HEAD_BYTES} bytes")


def _body(gate: Admission, request: RequestHead) -> None:
    """The body that is announced is not longer than what the route reads."""
    announced = request.headers.get("content-length", "0")
    most = max_body_bytes(request)
    if announced.isdecimal() and int(announced[:20]) > most:  # other spellings are the parser's to refuse
        raise BodyTooLarge(f"the body of this request must have at most {most} bytes, got {announced:.20}")


def _token(gate: Admission, request: RequestHead) -> None:
    """The token is valid, if the server asks for one and the path is not open to everybody."""
    if gate.access.num_tokens is None or _is_open(request):
        request.caller = ANYONE
    else:
        request.caller = gate.access.caller(request.headers.get("authorization"))


def _origin(gate: Admission, request: RequestHead) -> None:
    """A POST was not sent by a page of another site."""
    # Browsers name the page's site in every POST. With this content type they ask before they send it to
    # another site, and no server of ours agrees.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and "origin" in request.headers and media_type != "application/json":
        raise Forbidden(
            "a request with an Origin header must have Content-Type: application/json",
            remedy="send Content-Type: application/json, or no Origin",
        )


def _scope(gate: Admission, request: RequestHead) -> None:
    """The token has the scope of the path."""
    path = _path(request)
    if request.method == "POST":
        request.caller.check("plans")
    elif not _is_open(request):
        request.caller.check(_SCOPES.get(path) or ("read" if path.startswith(b"/v1/") else "inspect"))


def _token_limits(gate: Admission, request: RequestHead) -> None:
    """The token is below its own limits."""
    name, limits, usage = request.caller.name, request.caller.limits, gate.usage(request.caller)
    if limits.max_requests is not None and usage.num_slots >= limits.max_requests:
        raise TooManyRequests(f"token {name!r} may have {limits.max_requests} responses under way")
    if limits.max_bytes is not None and usage.num_bytes >= limits.max_bytes:
        raise TooManyRequests(f"token {name!r} may have {limits.max_bytes} bytes under way")
    if (seconds := usage.paid_until - time.monotonic() - BURST_SECONDS) > 0:
        detail = f"token {name!r} may take {limits.max_bytes_per_second} bytes per second"
        raise TooManyRequests(detail, retry_after_seconds=math.ceil(seconds))


def _slots(gate: Admission, request: RequestHead) -> None:
    """A slot is free, and the token has not more than its share of them."""
    limit = gate.settings.max_concurrent_answers
    if len(gate.slots) >= limit or gate.num_bytes >= MAX_BYTES:
        gate.drop_stalled()
    gate.check_share("answers", len(gate.slots), gate.usage(request.caller).num_slots, limit)


CHECKS: tuple[Check, ...] = (
    Check("connections", "connection", _connections),
    Check("address", "request", _address),
    Check("url", "request", _url),
    Check("head", "request", _head),
    Check("body", "request", _body),
    Check("token", "request", _token),
    Check("origin", "request", _origin),
    Check("scope", "request", _scope),
    Check("token limits", "response", _token_limits),
    Check("slots", "response", _slots),
)
"""A new check is a function above and a line here. Before `token`, a check is asked of everybody."""


def max_body_bytes(request: RequestHead) -> int:
    """Return how many bytes of body the route of a request takes."""
    takes_plan = request.method == "POST" and _path(request) == b"/v1/plans"
    return MAX_BODY_BYTES if takes_plan else SMALL_BODY_BYTES


def _path(request: RequestHead) -> bytes:
    # As the router reads it: another spelling of a path must not ask for another scope.
    return unquote_to_bytes(request.path)


@lru_cache(maxsize=4096)  # bounded, because clients choose their addresses; 10 us without it
def _is_in(address: str, allow: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # another ASGI server may call a client anything
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped  # an IPv4 client of a socket for both
    return any(found in network for network in networks(allow))


def _is_open(request: RequestHead) -> bool:
    path = _path(request)
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


@dataclass(eq=False, slots=True)
class Usage:
    """What a token uses of this process now."""

    num_slots: int = 0
    num_short: int = 0  # short answers that are made
    num_bytes: int = 0  # of responses under way
    paid_until: float = 0.0  # monotonic second until which what it took is within its bytes per second


@dataclass(eq=False, slots=True)
class Slot:
    """The right to have one costly response under way; give it back with `release`."""

    _gate: Admission
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
        rate = self._caller.limits.max_bytes_per_second
        with self._gate.lock:
            if num_bytes > SMALL_BYTES:
                self._gate.check_share(
                    "bytes of answers", self._gate.num_bytes, self._usage.num_bytes, MAX_BYTES
                )
            self.num_bytes = num_bytes
            self._gate.num_bytes += num_bytes
            self._usage.num_bytes += num_bytes
            if rate is not None:
                self._usage.paid_until = max(self._usage.paid_until, time.monotonic()) + num_bytes / rate

    def release(self) -> None:
        """Give the slot back; idempotent."""
        if self in self._gate.slots:
            self._gate.slots.discard(self)
            self._usage.num_slots -= 1
            with self._gate.lock:
                self._gate.num_bytes -= self.num_bytes
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
    """What is under way in one process, and its limits.

    The `check_...` methods and `Slot.charge` may be called from any thread, everything else from the event
    loop's alone.

    Attributes:
        closing: the process lets go of its connections: each ends with its next response.
        slots: of the costly responses under way.
        num_bytes: of those whose sizes are known; changed under `lock`.
        connections: open ones by address.
    """

    def __init__(self, settings: Settings, access: Access) -> None:
        self.settings = settings
        self.access = access
        self.closing = False
        self.slots: set[Slot] = set()
        self.num_bytes = 0
        self.lock = threading.Lock()
        self.num_connections = 0
        self.connections: Counter[str] = Counter()
        self._usage: dict[str, Usage] = {}  # by the name of the token
        self._num_short = self._num_followers = self._body_bytes = 0
        self._looked_at = -math.inf  # monotonic second of the last look for stalled readers

    def _ask(self, moment: Moment, request: RequestHead) -> None:
        for check in CHECKS:
            if check.at == moment:
                check.ask(self, request)

    def connect(self, address: str) -> None:
        """Count a connection."""
        self.num_connections += 1
        self.connections[address] += 1

    def disconnect(self, address: str) -> None:
        """Count a connection no longer."""
        self.num_connections -= 1
        self.connections[address] -= 1
        if not self.connections[address]:
            del self.connections[address]

    def check_connection(self, address: str) -> None:
        """Raise the error of the first of `CHECKS` that refuses a connection, which is counted."""
        self._ask("connection", RequestHead("", b"", {}, address=address))

    def check(self, request: RequestHead) -> Caller:
        """Return who asks, and may; notes in the request who asks, also where that one may not.

        Raises:
            CorpusServerError: one of the `CHECKS` refuses the request.
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
        usage = self.usage(request.caller)
        slot = Slot(self, request.caller, usage, reader)
        self.slots.add(slot)
        usage.num_slots += 1
        return slot

    def usage(self, caller: Caller) -> Usage:
        """Return what a token uses now."""
        return self._usage.setdefault(caller.name, Usage())

    def check_share(self, what: str, num_all: int, num_own: int, limit: int) -> None:
        """Raise Overloaded unless there is room for something more of a token."""
        num_free = limit - num_all
        is_shared = (self.access.num_tokens or 0) > 1
        if num_free <= 0 or (is_shared and num_own >= FAIR_SHARE * num_free):
            raise Overloaded(f"{num_all} {what} are under way in this process")

    def drop_stalled(self) -> None:
        """Drop readers that have taken nothing for longest, until such hold at most half of the limits."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        looked_at = [(slot.stalled_seconds(now), slot) for slot in self.slots]
        stalled = [each for each in looked_at if each[0] > STALLED_SECONDS]
        stalled.sort(key=itemgetter(0))
        num_bytes = sum(slot.num_bytes for _, slot in stalled)
        while len(stalled) > self.settings.max_concurrent_answers // 2 or num_bytes > MAX_BYTES // 2:
            seconds, slot = stalled.pop()
            num_bytes -= slot.num_bytes
            _log.warning("dropped a reader that took nothing for %.1f s: its slot was needed", seconds)
            slot.drop()

    @contextmanager
    def short(self, caller: Caller) -> Iterator[None]:
        """Count a short answer, such as a description, while it is made.

        As many as costly ones: two threads make them, and who comes later would wait for all others.

        Raises:
            Overloaded: as many are being made as may be, or the token has its share of them.
        """
        usage = self.usage(caller)
        limit = self.settings.max_concurrent_answers
        self.check_share("answers", self._num_short, usage.num_short, limit)
        self._num_short += 1
        usage.num_short += 1
        try:
            yield
        finally:
            self._num_short -= 1
            usage.num_short -= 1

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count a stream of events while it is sent; raise Overloaded if there are `MAX_FOLLOWERS`."""
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
                if self._body_bytes + num_bytes - counted > MAX_BODY_BYTES:
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
        _check("an answer", size_bytes, limit, "bytes", parameter, remedy)

    def check_rows(self, count: int, rows: int) -> None:
        """Raise AnswerTooLarge for a response of more than `MAX_ROWS` rows."""
        remedy = f"ask for at most {MAX_ROWS // max(rows, 1)} steps"
        _check("an answer", count * rows, MAX_ROWS, "rows", "count", remedy)

    def check_shards(self, size_bytes: int) -> None:
        """Raise AnswerTooLarge if the staged shards of a response exceed the cache."""
        remedy = "ask for fewer steps, or give a larger --cache-bytes when starting the server"
        what, limit = "the cache for the shards of an answer", self.settings.cache_bytes
        _check(what, size_bytes, limit, "bytes", "count", remedy)

    def check_text_size(self, num_tokens: int, parameter: str) -> None:
        """Raise AnswerTooLarge for a JSON or text response of more than `max_text_tokens`."""
        what, remedy = "an answer of format json or text", "format=raw or format=npy, or ask for less"
        _check(what, num_tokens, self.settings.max_text_tokens, "tokens", parameter, remedy)


def _check(what: str, size: int, limit: int, unit: str, parameter: str, remedy: str) -> None:
    if size > limit:
        raise AnswerTooLarge(what, size, limit, unit, parameter=parameter, remedy=remedy)
