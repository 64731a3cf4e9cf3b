"""An HTTP response as the core makes it: status, headers and body, for any server that sends it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import numpy as np
import orjson
import xxhash
from pydantic import ValidationError

from corpus_server.admission.request import REQUEST_ID, RequestHead
from corpus_server.errors import CorpusServerError, InvalidParameter, Unauthorized
from corpus_server.read import wire
from corpus_server.read.bound_plan import Source
from corpus_server.read.reading import PIECE_BYTES, Reading, hash_slices, num_bytes, read_pieces
from corpus_server.readers.registry import Reader

Buffer = bytes | memoryview
T = TypeVar("T")

Slices = Generator[Future[None] | None, None, T]
"""Work in slices: it yields whenever it may be stopped, at least every 50 ms or so of CPU, and returns its
result. Whoever drives it stops between slices when the caller has left. If it yields a future, it has nothing
to do until that is done, and need not keep a thread."""


class ClientLeft(Exception):
    """Whoever asked has closed the connection, or takes nothing any more."""


_MAX_ECHO = 200  # characters of a received value that are sent back


@dataclass(slots=True)
class Response:
    """A response that is ready to be sent.

    Args:
        status: HTTP status.
        headers: values by name; `Content-Length` is always among them, except for 304.
        body: groups of parts, each group at most about 900 KiB; the next group is read when it is asked
            for, and reading may then fail with CorpusChanged or ReadFailed.
        check_unchanged: raises CorpusChanged if a file that was read has changed since: a response that
            was kept for a while must not be sent then.
        source, num_tokens: whose tokens the body holds, and how many.
        reader, num_steps: whose steps of a plan the body holds, or says where they lie, and how many.
        problem_type: of a problem document.
    """

    status: int
    headers: dict[str, str]
    body: Iterable[list[Buffer]] = ()
    check_unchanged: Callable[[], None] = lambda: None
    source: Source | None = None
    num_tokens: int = 0
    reader: Reader | None = None
    num_steps: int = 0
    problem_type: str = ""

    @classmethod
    def whole(cls, content: bytes, headers: Mapping[str, str], *, status: int = 200) -> Response:
        """Return a response whose body is in memory."""
        return cls(status, {**headers, "Content-Length": str(len(content))}, ([content],))

    @property
    def num_bytes(self) -> int:
        """Bytes of the body."""
        return int(self.headers.get("Content-Length", "0"))

    def head(self, request: RequestHead, more: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return status line and headers, as a connection sends them.

        Args:
            request: that is answered.
            more: headers of the connection.
        """
        headers = {**self.headers, **common_headers(request)}
        lines = [status_line(self.status), *(f"{name}: {value}\r\n" for name, value in headers.items())]
        return b"".join(["".join(lines).encode("latin-1"), *(b"%b: %b\r\n" % each for each in more), b"\r\n"])


# Not frozen: making one would cost as much as counting it.
@dataclass(kw_only=True, slots=True)
class Answered:
    """A request and its response, which was sent or cut.

    Args:
        request: what is known of its head.
        route: template of the path, `unknown` for none, `refused` for what its head alone decided.
        via: which path answered, `fast-path` or `application`.
        status: of the response.
        sent_bytes: of its body.
        seconds: from the request's head to the last byte handed to the kernel.
        problem_type: of a problem document.
        stages: seconds of each of `metrics.STAGES`, if they are known.
    """

    request: RequestHead
    route: str
    via: str
    status: int
    sent_bytes: int
    seconds: float = 0.0
    problem_type: str = ""
    stages: Sequence[float] = ()


def common_headers(request: RequestHead) -> dict[str, str]:
    """Return the headers that every response has, whichever way answers. A new one is added here."""
    return {REQUEST_ID: request.request_id}


def status_line(status: int) -> str:
    """Return the first line of a response."""
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"


_PHRASES = {status.value: status.phrase for status in HTTPStatus}


def array_response(
    reading: Reading,
    headers: Mapping[str, str],
    chosen: wire.Format,
    checksum: wire.ChecksumPlace,
    request: RequestHead,
) -> Slices[Response]:
    """Make the response that holds a reading's bytes.

    The first piece is read here, so that a shard that changed is an error response and no cut connection.

    Args:
        headers: what decides caching.
        chosen: `raw` for the bare array, or `npy`.
        checksum: its place; in the header, everything is read and hashed before the first byte is sent,
            and what exceeds one piece is read twice.
        request: for a HEAD nothing is read.
    """
    size = num_bytes(reading)
    prefix = wire.npy_header(reading.shape, reading.dtype) if chosen == "npy" else b""
    length = len(prefix) + size + (wire.TAIL_BYTES if checksum == "tail" else 0)
    headers = {
        **headers,
        **wire.array_headers(reading.shape, reading.dtype),
        "Content-Length": str(length),
        "Content-Type": wire.MEDIA_TYPES[chosen],
    }
    if checksum == "tail":
        headers[wire.CHECKSUM] = wire.TAIL
    if request.method == "HEAD":
        return Response(200, headers)
    digest = xxhash.xxh3_64(prefix)
    pieces = read_pieces(reading)
    if checksum == "true":
        if size <= PIECE_BYTES:
            kept = list(pieces)
            for piece in kept:
                digest.update(piece)
            pieces = iter(kept)
        else:
            yield from hash_slices(reading, digest)
        headers[wire.CHECKSUM] = wire.checksum_value(digest)
    first = next(pieces, memoryview(b""))
    body = _groups(prefix, first, pieces, size, digest if checksum == "tail" else None)
    return Response(200, headers, body, reading.check_unchanged)


def _groups(
    prefix: bytes, piece: memoryview, pieces: Iterator[memoryview], size: int, digest: xxhash.xxh3_64 | None
) -> Iterator[list[Buffer]]:
    """Yield the body piece by piece; the checksum goes with the last piece, to leave in the same write.

    Holds no piece while the next one is read: a response costs the memory of one.
    """
    group: list[Buffer] = [prefix] if prefix else []
    left = size
    while True:
        left -= len(piece)
        group.append(piece)
        if digest is not None:
            digest.update(piece)
            if not left:
                group.append(digest.digest())
        del piece
        yield group
        if not left:
            return
        group = []
        piece = next(pieces)


def json_response(value: object, headers: Mapping[str, str]) -> Response:
    """Return a JSON response; NumPy arrays become lists, and bytes of names that are not UTF-8 `\\udcxx`."""
    try:
        content = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # orjson refuses such names
        content = json.dumps(value, default=_plain).encode()
    return Response.whole(content, {**headers, "Content-Type": wire.MEDIA_TYPES["json"]})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else dataclasses.asdict(value)


def text_response(text: str, headers: Mapping[str, str]) -> Response:
    """Return a plain-text response."""
    return Response.whole(text.encode(), {**headers, "Content-Type": wire.MEDIA_TYPES["text"]})


NO_STORE: Final = {"Cache-Control": "no-store"}
"""Headers of a response that depends on more than its URL and an identity tell: text, say, for which the
corpus may be served with another tokenizer tomorrow."""


def caching(request: RequestHead, identity: str, *, immutable: bool, varies: bool = False) -> dict[str, str]:
    """Return the headers by which a response may be cached.

    Args:
        request: what a token was needed for must not be kept by a cache that others share.
        identity: decides every byte of the response.
        immutable: whether the URL will mean the same identity for ever.
        varies: whether `Accept` decided its format.
    """
    control = wire.IMMUTABLE if immutable else wire.REVALIDATED
    place = "private" if request.caller.is_private else "public"
    headers = {"ETag": f'"{identity}"', "Cache-Control": f"{place}, {control}"}
    if varies:
        headers["Vary"] = "Accept"
    return headers


def not_modified(request: RequestHead, headers: Mapping[str, str]) -> Response | None:
    """Return 304 if the client holds the response already; nothing is read for it.

    Call it only after all parameters were checked: a condition is ignored where the response without it
    would be an error (RFC 9110, 13.2.1).
    """
    given = request.headers.get("if-none-match")
    if given is None or "ETag" not in headers:
        return None
    tags = {tag.strip().removeprefix("W/") for tag in given.split(",")}
    return Response(304, dict(headers)) if headers["ETag"] in tags or "*" in tags else None


def problem(error: Exception, request_id: str) -> Response:
    """Return the problem document (RFC 9457) of an error; fields that are None are left out.

    Args:
        error: of the core, or of pydantic; of any other kind, the log must say what it was.
        request_id: by which the log names the request.
    """
    if isinstance(error, ValidationError):
        error = invalid_parameter(error.errors())
    if not isinstance(error, CorpusServerError):
        error = CorpusServerError("the server failed; its log says why")
    document: dict[str, Any] = {
        "type": error.slug,
        "title": error.slug.replace("-", " ").capitalize(),
        "status": error.status,
        "detail": error.detail,
        "request_id": request_id,
    }
    for name in ("parameter", "received", "accepted", "remedy"):
        if (value := getattr(error, name)) is not None:
            document[name] = _echo(value)
    headers = {"Content-Type": "application/problem+json", "Cache-Control": "no-store"}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = error.challenge
    response = Response.whole(json.dumps(document).encode(), headers, status=error.status)
    response.problem_type = error.slug
    return response


def invalid_parameter(found: Sequence[Mapping[str, Any]]) -> InvalidParameter:
    """Make one error of pydantic's list: which parameter, what came, what is accepted."""
    # A misspelt parameter is unknown and leaves another one missing: the first is what to say.
    first = min(found, key=lambda each: each["type"] != "extra_forbidden")
    name = str(first["loc"][-1]) if first["loc"] else "query"
    received = first.get("input")
    if first["type"] == "extra_forbidden":
        return InvalidParameter(
            f"unknown parameter {name!r}",
            parameter=name,
            received=received,
            remedy="GET /docs lists the parameters of each route",
        )
    if first["type"] == "missing":
        return InvalidParameter(f"{name} is missing", parameter=name)
    context = first.get("ctx") or {}
    accepted = context.get("accepted") or context.get("expected") or context.get("pattern")
    said = f"must be {accepted}" if accepted else first["msg"]
    return InvalidParameter(
        f"{name} {said}, got {_echo(received)!r}", parameter=name, received=received, accepted=accepted
    )


def _echo(value: object) -> object:
    """Return a received value fit to be sent back: JSON, and short."""
    if isinstance(value, bool | int) or value is None:
        return value if value is None or abs(value) < 2**63 else str(value)[:_MAX_ECHO]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."
