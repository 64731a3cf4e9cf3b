"""An HTTP response as the core makes it: status, headers and body, for any server that sends it.

The client's `corpus_client.network.wire` knows the same names of headers and dtypes, and the same checksum.
Golden bytes in `tests/contract` hold the two together.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, get_args

import numpy as np
import orjson
import xxhash
from pydantic import ValidationError

from corpus_server.admission.request import REQUEST_ID, RUN_PATTERN, RequestHead
from corpus_server.errors import CorpusServerError, InvalidParameter, Unauthorized
from corpus_server.read.bound_plan import Source
from corpus_server.read.reading import PIECE_BYTES, Reading, hash_slices, num_bytes, read_pieces
from corpus_server.readers.registry import Reader

SHAPE_HEADER = "Corpus-Shape"
DTYPE_HEADER = "Corpus-Dtype"
PLAN_HEADER = "Corpus-Plan"
PLAN_STEP_HEADER = "Corpus-Plan-Step"
CHECKSUM_HEADER = "Corpus-Checksum"
ARRAYS_HEADER = "Corpus-Arrays"
RANGE_HEADER = "Corpus-Range"
TIMING_HEADER = "Server-Timing"

HEADERS: Final = {
    "ETag": "identity of the body, see below",
    "Cache-Control": "see [caching](#caching)",
    "Vary": "`Accept`, if that header could choose another format",
    PLAN_HEADER: "id of the plan, also for an inline plan",
    PLAN_STEP_HEADER: "plan step of the first step, if skipped steps make it differ from `step`",
    SHAPE_HEADER: "sizes of the axes, comma-separated, see [array responses](#array-responses)",
    DTYPE_HEADER: "type of the numbers, see [array responses](#array-responses)",
    ARRAYS_HEADER: "see [arrays beside the tokens](#arrays-beside-the-tokens)",
    CHECKSUM_HEADER: "see [array responses](#array-responses)",
    RANGE_HEADER: "`START-STOP`, half-open, of tokens and documents",
    TIMING_HEADER: "`answer;dur=1.767`: milliseconds from the end of the request's head to the beginning of "
    "the response",
    REQUEST_ID: "of every response: the request's own, see [errors](#errors)",
    "Retry-After": "seconds; with 429, and with 503 `overloaded`, `not-staged`, `store-failed`, `cache-full` "
    "and `state-unavailable`",
    "WWW-Authenticate": "with 401",
    "Corpus-Access": "of `/v1/access`: `granted`, or `unknown` if no cache may answer",
    "Allow": "with 405",
    "Connection": "`close`: the connection ends with this response",
}
"""Of responses, with their meanings in docs/http.md."""

TAIL = "xxh3-64=tail"
"""Value of the checksum header where the checksum follows the array: 8 bytes, the last of the body."""

TAIL_BYTES = 8

ChecksumPlace = Literal["true", "tail", "false"]
Format = Literal["raw", "npy", "json", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)

MEDIA_TYPES: Mapping[Format, str] = {
    "raw": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
}

IMMUTABLE = "max-age=31536000, immutable"
"""`Cache-Control` where a plan's id stands for the content of its corpora."""

REVALIDATED = "no-cache"
"""`Cache-Control` where a corpus is named, which another corpus may be called tomorrow: a 304 says if not."""

Buffer = bytes | memoryview
T = TypeVar("T")

_JOINED_BYTES = 64 * 1024
"""Arrays behind the tokens up to this size leave in the same write as the last piece of the tokens."""

Slices = Generator[Future[None] | None, None, T]
"""Work in slices: it yields whenever it may be stopped, at least every 50 ms or so of CPU, and returns its
result. Whoever drives it stops between slices when the caller has left. If it yields a future, it has nothing
to do until that is done, and need not keep a thread."""


class ClientLeft(Exception):
    """Whoever asked has closed the connection, or takes nothing any more."""


_PATTERNS = {
    "^[0-9a-f]{64}$": "the 64 digits (0-9, a-f) of a plan's id",
    RUN_PATTERN: "1 to 64 letters, digits, '.', '_' or '-'",
}
"""What people are told instead of a regular expression."""

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
        num_documents: of the source's one corpus, asked for by their number, that the body holds.
        reader, num_steps: whose steps of a plan the body holds, or says where they lie, and how many.
        problem_type: of a problem document.
    """

    status: int
    headers: dict[str, str]
    body: Iterable[list[Buffer]] = ()
    check_unchanged: Callable[[], None] = lambda: None
    source: Source | None = None
    num_tokens: int = 0
    num_documents: int = 0
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
    chosen: Format,
    checksum: ChecksumPlace,
    request: RequestHead,
    beside: Mapping[str, Reading] = MappingProxyType({}),
) -> Slices[Response]:
    """Make the response that holds a reading's bytes.

    The first piece is read here, and a row of each array beside it, so that a shard or a mask that changed
    is an error response and no cut connection.

    Args:
        headers: what decides caching.
        chosen: `raw` for the bare array, or `npy`.
        checksum: its place; in the header, everything is read and hashed before the first byte is sent,
            and what exceeds one piece is read twice.
        request: for a HEAD nothing is read.
        beside: arrays that follow in a raw body, by name.
    """
    readings = reading, *beside.values()
    size = num_bytes(*readings)
    prefix = npy_header(reading.shape, reading.dtype) if chosen == "npy" else b""
    length = len(prefix) + size + (TAIL_BYTES if checksum == "tail" else 0)
    headers = {
        **headers,
        **array_headers(reading.shape, reading.dtype),
        **beside_headers(beside),
        "Content-Length": str(length),
        "Content-Type": MEDIA_TYPES[chosen],
    }
    if checksum == "tail":
        headers[CHECKSUM_HEADER] = TAIL
    if request.method == "HEAD":
        return Response(200, headers)
    digest = xxhash.xxh3_64(prefix)
    pieces = read_pieces(*readings)
    if checksum == "true":
        if size <= PIECE_BYTES:
            kept = list(pieces)
            for piece in kept:
                digest.update(piece)
            pieces = iter(kept)
        else:
            yield from hash_slices(reading, digest, *beside.values())
        headers[CHECKSUM_HEADER] = checksum_value(digest)
    else:
        for each in beside.values():
            each.read(0, 1)
    first = next(pieces, memoryview(b""))
    joined = size - num_bytes(reading) if beside else 0
    if joined > _JOINED_BYTES:
        joined = 0
    body = _groups(prefix, first, pieces, size, joined, digest if checksum == "tail" else None)
    return Response(200, headers, body, reading.check_unchanged)


def _groups(
    prefix: bytes,
    piece: memoryview,
    pieces: Iterator[memoryview],
    size: int,
    joined: int,
    digest: xxhash.xxh3_64 | None,
) -> Iterator[list[Buffer]]:
    """Yield the body piece by piece; the checksum goes with the last piece, to leave in the same write.

    So do the last `joined` bytes. Holds no piece while tokens are read: a response costs the memory of one.
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
        if not 0 < left <= joined:
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
    return Response.whole(content, {**headers, "Content-Type": MEDIA_TYPES["json"]})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else dataclasses.asdict(value)


def text_response(text: str, headers: Mapping[str, str]) -> Response:
    """Return a plain-text response."""
    return Response.whole(text.encode(), {**headers, "Content-Type": MEDIA_TYPES["text"]})


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
    control = IMMUTABLE if immutable else REVALIDATED
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
    pattern = context.get("pattern", "")
    accepted = context.get("accepted") or context.get("expected") or _PATTERNS.get(pattern, pattern) or None
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


def array_headers(shape: Sequence[int], dtype: np.dtype[np.integer]) -> dict[str, str]:
    """Return the headers that describe an array: `4,64,1025` and `uint16`."""
    return {SHAPE_HEADER: _sizes(shape), DTYPE_HEADER: _name(dtype)}


def beside_headers(beside: Mapping[str, Reading]) -> dict[str, str]:
    """Return the header that describes arrays behind the first one: `sources uint16 4,64`."""
    if not beside:
        return {}
    described = [f"{name} {_name(each.dtype)} {_sizes(each.shape)}" for name, each in beside.items()]
    return {ARRAYS_HEADER: "; ".join(described)}


def checksum_value(digest: xxhash.xxh3_64) -> str:
    """Return the value of the checksum header: `xxh3-64=` and 16 hex digits."""
    return f"xxh3-64={digest.hexdigest()}"


def timing_value(seconds: float) -> str:
    """Return the value of `Server-Timing` (W3C): `answer;dur=` and milliseconds."""
    return f"answer;dur={seconds * 1e3:.3f}"


def npy_header(shape: Sequence[int], dtype: np.dtype[np.integer]) -> bytes:
    """Return the bytes that make raw tokens an NPY file (format 1.0, C order, little-endian)."""
    prefix = io.BytesIO()
    fields = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(prefix, fields)
    return prefix.getvalue()


def negotiate(accept: str | None, default: Format) -> Format:
    """Return the answer's format for an `Accept` header: the known type of the highest weight.

    Of equal weights the first counts (RFC 9110, 12.5.1); where no type is known, the default.
    """
    chosen, best = default, 0.0
    for item in (accept or "").split(","):
        media_type, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = next((_weight(part[2:]) for part in parameters if part.startswith("q=")), 1.0)
        for name in FORMATS:
            if weight > best and media_type == MEDIA_TYPES[name].partition(";")[0]:
                chosen, best = name, weight
    return chosen


def _sizes(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


@cache
def _name(dtype: np.dtype[np.integer]) -> str:
    return dtype.name  # NumPy spells it anew each time, in 5 microseconds


def _weight(text: str) -> float:
    """Return a weight in [0, 1]; one that cannot be read counts as not given."""
    try:
        return min(1.0, float(text))
    except ValueError:
        return 1.0
