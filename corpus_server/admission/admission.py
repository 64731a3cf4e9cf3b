"""Whether a request may be answered: one list of checks.

A check is a function that returns, or raises an error of `errors.py`. It is asked at one of these moments:

    connection   a client has connected; of the request only its `address` is known
    request      a head has come, on the fast path or to the application; `caller` is known after `token`
    response     a costly response is about to be made, after the query was understood
    slot         ... one of tokens, or one that is streamed

All of them run in the event loop's thread and must not wait. Which corpora a request reads is known only
later: `Caller.check_read`. So are sizes: the methods `check_...` of `Load`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from corpus_server.admission.load import (
    BURST_SECONDS,
    MAX_BODY_BYTES,
    MAX_BYTES,
    SMALL_BODY_BYTES,
    Load,
    Slot,
)
from corpus_server.admission.request import ANYONE, MAX_HEAD_BYTES, SCOPES, Caller, RequestHead
from corpus_server.errors import (
    BadRequest,
    BodyTooLarge,
    Forbidden,
    HeadTooLarge,
    Overloaded,
    TooManyRequests,
    UrlTooLong,
)
from corpus_server.settings import networks

MAX_URL_BYTES = 8192
"""Bytes of a request's target; the longest that a client of ours sends has about 250."""

_HEALTH_PATHS = ("/healthz", "/readyz")
_OPEN_PATHS = ("/", *_HEALTH_PATHS, "/v1/access")
# HTML and scripts that hold nothing of a corpus; a browser cannot send a token for them.
_OPEN_FOLDER = "/page/"
_SCOPE_OF = {path: name for name, scope in SCOPES.items() for path in scope.paths}

Moment = Literal["connection", "request", "response", "slot"]


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
    ask: Callable[[Load, RequestHead], None]


def _connections(load: Load, request: RequestHead) -> None:
    """The process, and the address, have fewer connections than they may have."""
    limit, limit_of_address = load.settings.max_connections, load.settings.max_connections_per_address
    if load.num_connections > limit:
        raise Overloaded(f"this process has {limit} connections, as many as it may")
    if request.address and load.connections[request.address] > limit_of_address:
        raise Overloaded(
            f"this process has {limit_of_address} connections from {request.address}, as many as it may"
        )


def _address(load: Load, request: RequestHead) -> None:
    """The address belongs to a network that is served (`allow`), or the path is `/healthz` or `/readyz`."""
    allow, address = load.settings.allow, request.address
    if allow is None or not address or _is_in(address, allow) or request.decoded_path in _HEALTH_PATHS:
        return
    raise Forbidden(f"{address} is in no network that this server serves", remedy="ask from another network")


def _url(load: Load, request: RequestHead) -> None:
    """The URL is not too long, and has no fragment."""
    if len(request.target) > MAX_URL_BYTES:
        raise UrlTooLong(f"the URL must have at most {MAX_URL_BYTES} bytes, got {len(request.target)}")
    if b"#" in request.target:
        raise BadRequest(
            "a request's target must not hold '#': fragments are not sent to servers (RFC 9110, 7.1)",
            remedy="leave the fragment out, or write %23 for a '#' in a value",
        )


def _head(load: Load, request: RequestHead) -> None:
    """The head is not too long."""
    if sum(len(name) + len(value) for name, value in request.headers.items()) > MAX_HEAD_BYTES:
        raise HeadTooLarge(f"a request's head must have at most {MAX_HEAD_BYTES} bytes")


def _body(load: Load, request: RequestHead) -> None:
    """The body that is announced is not longer than what the route reads."""
    announced = request.headers.get("content-length", "0")
    most = max_body_bytes(request)
    if announced.isdecimal() and int(announced[:20]) > most:  # other spellings are the parser's to refuse
        raise BodyTooLarge(f"the body of this request must have at most {most} bytes, got {announced:.20}")


def _token(load: Load, request: RequestHead) -> None:
    """The token is valid, if the server asks for one and the path is not open to everybody."""
    if load.access.num_tokens is None or _is_open(request):
        request.caller = ANYONE
    else:
        request.caller = load.access.caller(request.headers.get("authorization"))


def _origin(load: Load, request: RequestHead) -> None:
    """A POST was not sent by a page of another site."""
    # Browsers name the page's site in every POST. With this content type they ask before they send it to
    # another site, and no server of ours agrees.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and "origin" in request.headers and media_type != "application/json":
        raise Forbidden(
            "a request with an Origin header must have Content-Type: application/json",
            remedy="send Content-Type: application/json, or no Origin",
        )


def _scope(load: Load, request: RequestHead) -> None:
    """The token has the scope of the path."""
    path = request.decoded_path
    if request.method == "POST":
        request.caller.check("plans")
    elif not _is_open(request):
        request.caller.check(_SCOPE_OF.get(path) or ("read" if path.startswith("/v1/") else "inspect"))


def _token_limits(load: Load, request: RequestHead) -> None:
    """The token is below its own limits."""
    caller, usage = request.caller, load.usage[request.caller.name]
    if caller.max_requests is not None and usage.num_slots >= caller.max_requests:
        raise TooManyRequests(f"token {caller.name!r} may have {caller.max_requests} responses under way")
    if caller.max_bytes is not None and usage.num_bytes >= caller.max_bytes:
        raise TooManyRequests(f"token {caller.name!r} may have {caller.max_bytes} bytes under way")
    if (seconds := usage.paid_until - time.monotonic() - BURST_SECONDS) > 0:
        detail = f"token {caller.name!r} may take {caller.max_bytes_per_second} bytes per second"
        raise TooManyRequests(detail, retry_after_seconds=math.ceil(seconds))


def _slots(load: Load, request: RequestHead) -> None:
    """A slot is free, and the token has not more than its share of them."""
    limit = load.settings.max_concurrent_responses
    if len(load.slots) >= limit or load.num_bytes >= MAX_BYTES:
        load.drop_stalled()
    load.check_share("responses", len(load.slots), load.usage[request.caller.name].num_slots, limit)


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
    Check("slots", "slot", _slots),
)
"""A new check is a function above and a line here. Before `token`, a check is asked of everybody."""


def max_body_bytes(request: RequestHead) -> int:
    """Return how many bytes of body the route of a request takes."""
    takes_plan = request.method == "POST" and request.decoded_path == "/v1/plans"
    return MAX_BODY_BYTES if takes_plan else SMALL_BODY_BYTES


@lru_cache(maxsize=4096)  # bounded, because clients choose their addresses; 10 us without it
def _is_in(address: str, allow: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # another ASGI server may call a client anything
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped  # an IPv4 client of a socket for both
    return any(ip in network for network in networks(allow))


def _is_open(request: RequestHead) -> bool:
    path = request.decoded_path
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


class Admission(Load):
    """Asks the checks: for the fast path, the application and new connections; in the event loop's thread.

    Attributes:
        closing: the process lets go of its connections: each ends with its next response.
    """

    closing = False

    def check(self, request: RequestHead, at: Moment = "request") -> Caller:
        """Return who asks, and may; notes in the request who asks, also where that one may not.

        Raises:
            CorpusServerError: the first of the `CHECKS` of this moment that refuses.
        """
        for check in CHECKS:
            if check.at == at:
                check.ask(self, request)
        return request.caller

    def admit(self, request: RequestHead, reader: asyncio.WriteTransport | None = None) -> Slot:
        """Take a slot for a costly response.

        Args:
            reader: transport of the client, where it can be cut off.

        Raises:
            CorpusServerError: one of the `CHECKS` refuses the response.
        """
        self.check(request, "response")
        self.check(request, "slot")
        usage = self.usage[request.caller.name]
        slot = Slot(self, request.caller, usage, reader)
        self.slots.add(slot)
        usage.num_slots += 1
        return slot
