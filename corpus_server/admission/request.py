"""What is known of a request before it is answered: its head, who asks, and what no head may say."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from corpus_server.errors import BadRequest, Forbidden

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request's head."""

READ_ALL = "read:*"


class Scope(NamedTuple):
    """What a token may do besides reading corpora.

    Attributes:
        paths: that a GET needs it for; of `/v1` all others read.
        allows: its row in docs/operations.md.
    """

    paths: tuple[str, ...]
    allows: str


SCOPES: Final = {
    "plans": Scope((), "`POST /v1/plans`, for corpora that the token may read. A loader needs it"),
    "inspect": Scope(("/v1/plans",), "the list of all plans, `/docs` and `/openapi.json`"),
    "metrics": Scope(
        ("/metrics", "/v1/live"), "`/metrics` and `/v1/live`, which name all corpora, plans and runs"
    ),
}
"""By name; a new scope is a line here. `read:NAME` and `read:*` are the others."""

REQUEST_ID = "X-Request-Id"
"""Header of every request that a client wants to find again, and of every response."""

RUN = "Corpus-Run"
"""Header with the name of the run that asks: for people; it decides no byte of a response."""

TRAINED_STEP = "Corpus-Trained-Step"
"""Header with the last step that a loader had yielded when it sent the request."""

RUN_PATTERN = "^[A-Za-z0-9._-]{1,64}$"

_GOOD_RUN = re.compile(RUN_PATTERN[1:-1])
_GOOD_STEP = re.compile(r"[0-9]{1,13}", re.ASCII)

_ID = r"[A-Za-z0-9._-]{1,128}"
_GOOD_ID = re.compile(_ID)
# Up to a line that is no continuation, which would otherwise continue the line before.
_ID_LINE = re.compile(rb"\r\n(?i:x-request-id):[ \t]*(" + _ID.encode() + rb")[ \t]*(?=\r\n[^ \t])")

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, with the keys of its token's table, see `KEYS` in `access.py`; None for no limit of its own.

    Args:
        name: of the token.
        scopes: what it may do.
        expires: Unix seconds after which it is refused.
        is_private: whether responses to it must not be kept by caches that others share.
    """

    name: str
    scopes: frozenset[str]
    expires: float = float("inf")
    max_requests: int | None = None
    max_bytes: int | None = None
    max_bytes_per_second: int | None = None
    max_plans: int | None = None
    is_private: bool = True

    def check(self, scope: str) -> None:
        """Raise Forbidden unless the token has a scope; `read` stands for any corpus."""
        if scope == "read" and not any(each.startswith("read:") for each in self.scopes):
            raise self._lacks("read:NAME")
        if scope != "read" and scope not in self.scopes:
            raise self._lacks(scope)

    def may_read(self, corpus: str) -> bool:
        """Tell whether the token may read a corpus."""
        return READ_ALL in self.scopes or f"read:{corpus}" in self.scopes

    def check_read(self, corpora: Iterable[str]) -> None:
        """Raise Forbidden unless the token may read all corpora; does not tell whether they exist."""
        for name in corpora:
            if not self.may_read(name):
                raise self._lacks(f"read:{name}")

    def _lacks(self, scope: str) -> Forbidden:
        return Forbidden(f"token {self.name!r} lacks the scope {scope}", remedy="use another token")


ANYONE = Caller("anyone", frozenset((READ_ALL, *SCOPES)), is_private=False)
"""Whoever asks a server that has no tokens."""


# Not frozen: to make one and two changed copies of it would cost a fifth of a refusal.
@dataclass(slots=True)
class RequestHead:
    """A request without its body.

    Args:
        method: in capitals.
        target: path and query string as they were sent.
        headers: values by lower-case name; those of a name that came several times, joined by commas.
        keep_alive: whether the client may send another request on the connection.
        address: IP address of the client, "" on a Unix socket.
        caller: who asks, as the admission has found.
        request_id: names the request in logs and in its response.
        trace_parent: W3C `traceparent`, "" if none came.

    Attributes:
        path, query_string: the target up to its first question mark, and behind it.
        decoded_path: the path as both the router and the checks read it: no spelling is another path to one
            of them.
    """

    method: str
    target: bytes
    headers: Mapping[str, str]
    keep_alive: bool = True
    address: str = ""
    caller: Caller = ANYONE
    request_id: str = ""
    trace_parent: str = ""
    path: bytes = field(init=False)
    query_string: bytes = field(init=False)
    decoded_path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path, _, self.query_string = self.target.partition(b"?")
        path = self.path.decode("latin-1")
        self.decoded_path = unquote(path) if "%" in path else path

    @classmethod
    def of(
        cls, method: str, target: bytes, lines: Iterable[tuple[bytes, bytes]], *, address: str
    ) -> RequestHead:
        """Return a head with its names; `check_unambiguous` says whether it may be answered.

        Args:
            lines: names and values of the headers, in order; names in lower case.
            address: IP address of the client, "" on a Unix socket.
        """
        headers: dict[str, str] = {}
        for name, value in lines:
            known, more = name.decode("latin-1"), value.decode("latin-1").rstrip(" \t")
            headers[known] = f"{headers[known]}, {more}" if known in headers else more
        return cls(
            method,
            target,
            headers,
            address=address,
            request_id=request_id(headers.get("x-request-id")),
            trace_parent=headers.get("traceparent", ""),
        )

    @property
    def run(self) -> str:
        """Name of the run that asks; "" if it gives none, or one that is not well formed."""
        name = self.headers.get("corpus-run", "")
        return name if _GOOD_RUN.fullmatch(name) else ""

    @property
    def trained_step(self) -> int | None:
        """The last step that the loader had yielded; None if it does not say."""
        step = self.headers.get("corpus-trained-step", "")
        return int(step) if _GOOD_STEP.fullmatch(step) else None


def check_unambiguous(version: str, names: list[bytes]) -> None:
    """Raise BadRequest for a head that a proxy in front may have read in another way.

    Args:
        version: of HTTP, such as `1.1`.
        names: of the headers, in lower case; a name that came twice is there twice.
    """
    if version not in ("1.0", "1.1"):
        raise BadRequest(f"the request must be HTTP/1.0 or 1.1, got {version}")
    if names.count(b"host") > 1 or (version == "1.1" and b"host" not in names):
        raise BadRequest("a request must have one Host header (RFC 9112, 3.2)")
    if names.count(b"authorization") > 1:
        raise BadRequest("a request must have one Authorization header, got several")
    if b"transfer-encoding" in names and b"content-length" in names:
        raise BadRequest("a request must not have both Transfer-Encoding and Content-Length (RFC 9112, 6.1)")


def request_id(given: str | None) -> str:
    """Return the id that a client has given its request, or a new one if that is not well formed."""
    if given is not None and _GOOD_ID.fullmatch(given):
        return given
    return f"{_prefix(os.getpid())}-{next(_numbers):x}"


@lru_cache(maxsize=1)
def _prefix(pid: int) -> str:
    """Return 48 random bits of this process, not those of the process that it was forked from."""
    return secrets.token_hex(6)


def request_id_in(received: bytes) -> str:
    """Return the id of a request of which only bytes are known; what follows its head is not looked at."""
    head, end, _ = received.partition(b"\r\n\r\n")
    found = _ID_LINE.search(head + end)
    return request_id(None if found is None else found[1].decode())
