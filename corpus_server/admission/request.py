"""The head of a request: what the door and the application know of it before they answer."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import httptools

from corpus_server.admission.access import ANYONE, Caller

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's head, for the door and for the ordinary protocol."""

REQUEST_ID = "X-Request-Id"
"""Header of every request that a client wants to find again, and of every response."""

_ID = r"[A-Za-z0-9._-]{1,128}"
_GOOD_ID = re.compile(_ID)
# Up to a line that is no continuation, which would otherwise continue the line before.
_ID_LINE = re.compile(rb"\r\n(?i:x-request-id):[ \t]*(" + _ID.encode() + rb")[ \t]*(?=\r\n[^ \t])")
_TRACE_LINE = re.compile(rb"\r\ntraceparent: ([0-9a-f-]{55})(?=\r\n[^ \t])")

# Ids that the server makes: 48 random bits of the process, and a number.
_PREFIX, _numbers = secrets.token_hex(6), itertools.count(1)

_ANSWERED_ELSEWHERE = {"content-length", "transfer-encoding", "expect", "upgrade"}
"""Headers that announce a body or another protocol: such a request is the ordinary protocol's."""


# Not frozen: to make one and two changed copies of it would cost a fifth of a refusal.
@dataclass(slots=True)
class RequestHead:
    """A request without its body.

    Args:
        method: in capitals.
        target: path and query string as they were sent.
        headers: values by lower-case name.
        keep_alive: whether the client may send another request on the connection.
        address: IP address of the client, "" on a Unix socket.
        caller: who asks, as the gate has found.
        request_id: names the request in logs and in its response.
        trace_parent: W3C `traceparent`, "" if none came.
        charge: is told the bytes of the response before anything is read for it; raises Overloaded if they
            are too many now.
    """

    method: str
    target: bytes
    headers: Mapping[str, str]
    keep_alive: bool = True
    address: str = ""
    caller: Caller = ANYONE
    request_id: str = ""
    trace_parent: str = ""
    charge: Callable[[int], None] = field(default=lambda _: None, compare=False)

    @property
    def path(self) -> bytes:
        """The target up to its query string."""
        return self.target.partition(b"?")[0]

    @property
    def query_string(self) -> bytes:
        """The target behind its first question mark."""
        return self.target.partition(b"?")[2]


def request_id(given: str | None) -> str:
    """Return the id that a client has given its request, or a new one if that is not well formed."""
    if given is not None and _GOOD_ID.fullmatch(given):
        return given
    return f"{_PREFIX}-{next(_numbers):x}"


def request_id_in(received: bytes) -> str:
    """Return the id of a request of which only bytes are known, which need not be a head."""
    found = _ID_LINE.search(received)
    return request_id(None if found is None else found[1].decode())


def without_ids(text: bytes) -> tuple[bytes, str, str]:
    """Take out of a head's text what names this one request: a request that is repeated has the same rest.

    Returns:
        The rest, the request's id and its `traceparent`. Of an id that is not well formed, and of a header
        that came twice, something stays in the rest, which is a good head all the same.
    """
    trace_parent = ""
    if (found := _TRACE_LINE.search(text)) is not None:
        text, trace_parent = text[: found.start()] + text[found.end() :], found[1].decode()
    if (found := _ID_LINE.search(text)) is None:
        return text, request_id(None), trace_parent
    return text[: found.start()] + text[found.end() :], found[1].decode(), trace_parent


def parse_simple_get(text: bytes) -> RequestHead | None:
    """Parse one head that ends `text`; return None for anything but a plain, bodiless GET.

    Plain means HTTP/1.1, exactly one `Host`, no header twice, no body and no upgrade. What is not plain may
    still be right: the caller leaves the verdict to the ordinary protocol, so there is one place that
    refuses.
    """
    parts = _Parts()
    try:
        parts.parser.feed_data(text)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in parts.headers}
    plain = (
        parts.num_messages == 1
        and parts.parser.get_method() == b"GET"
        and parts.parser.get_http_version() == "1.1"
        and len(headers) == len(parts.headers)
        and "host" in headers
        and not headers.keys() & _ANSWERED_ELSEWHERE
    )
    return RequestHead("GET", parts.target, headers, parts.keep_alive) if plain else None


class _Parts:
    """What the parser calls back."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.keep_alive = True
        self.target = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.num_messages = 0

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        # Asked here: with the end of the message the parser forgets what the headers said.
        self.keep_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self.num_messages += 1
