"""Heads, names and checks of the wire format; no I/O.

An array response is the little-endian C-order body alone; what it is stands in its headers:

    Corpus-Shape: 4,64,1025          Corpus-Dtype: uint16
    Corpus-Plan: <64 hex>            Corpus-Checksum: xxh3-64=tail
    Content-Length: exact, never chunked
    Corpus-Arrays: what follows the array, see `layout.py`
    ETag: "<64 hex>.batches.STEP.COUNT.RANK.WORLD_SIZE.raw+tail"

`tail` says that 8 bytes follow the array, its checksum: so the server sends each piece as it reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

import xxhash

from corpus_client import errors
from corpus_client.network.layout import ITEM_BYTES, Array, Beside, arrays_of, starts
from corpus_client.observe.telemetry import REQUEST_ID_HEADER

SHAPE_HEADER = "corpus-shape"
DTYPE_HEADER = "corpus-dtype"
ARRAYS_HEADER = "corpus-arrays"
PLAN_HEADER = "corpus-plan"
TAG_HEADER = "etag"
CHECKSUM_HEADER = "corpus-checksum"
CHECKSUM_TAIL = "xxh3-64=tail"
TAIL_BYTES = 8
TIMING_HEADER = "server-timing"
PROBLEM_TYPE = "application/problem+json"

DIGEST = re.compile(r"xxh3-64=[0-9a-f]{16}")
"""A receipt: the checksum of a whole global batch's raw tokens."""

SERVER_SECONDS = re.compile(r"\bresponse;dur=(\d+(?:\.\d+)?)")
"""In `Server-Timing` (W3C): milliseconds from the request's arrival to the response's first byte."""
STAGING_SECONDS = re.compile(r"\bstaging;dur=(\d+(?:\.\d+)?)")
"""Of these, how long the server waited for its object store."""

ERRORS = {"unknown-corpus": errors.UnknownCorpus, "unknown-plan": errors.UnknownPlan}
"""The `type` of a problem document -> the error that it becomes, where that is a class of its own."""

ACCESS_REMEDY = "auth= gives the token: as text, the path of a file or a function"

PIECE_ITEMS = 4
"""Of a piece of a row that joins several: row, shard number, start token, tokens."""

MAX_HEAD_BYTES = 65_536
HEAD_END = b"\r\n\r\n"
INFORMATIONAL = b"HTTP/1.1 1"
"""Begins a head that comes before the response's; a proxy may send some unasked (RFC 9110, 15.2)."""

_LENGTH = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_UNFIT_TARGET = re.compile(r"[^!-~]")
_STATUS = re.compile(rb"HTTP/1\.[01] ([2-5]\d\d)(?: [^\r\n]*)?\r\n")

Headers = Mapping[str, str]
"""Of a response: a dict with names in lower case, or any mapping that ignores case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRequest:
    """One GET and exactly what a right response to it is."""

    path: str  # route and query, below the server's base URL
    shape: tuple[int, ...]
    dtype: str  # numpy name
    plan_id: str | None  # what `Corpus-Plan` must say; None: not checked
    verify: bool = True  # whether a checksum is asked for and checked
    # What the `ETag` must say behind the plan's id: the checksum of another step's response is valid, too.
    identity: str | None = None
    beside: tuple[Array, ...] = ()  # behind the array
    is_exact: bool = True  # False: the first size of the shape is the most that a response may have

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the body."""
        return Array(name="", dtype=self.dtype, shape=self.shape), *self.beside

    @property
    def num_bytes(self) -> int:
        """Length of the body without its checksum; the most of one that is not exact."""
        return starts(0, self.arrays)[-1]


def header_lines(headers: Headers) -> bytes:
    """Return the lines of these headers."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def request_line(target: str) -> bytes:
    """Return the first line of a GET; refuse a target with what a URL spells with percent signs."""
    if _UNFIT_TARGET.search(target):
        raise errors.InvalidArgument(f"url must be percent-encoded ASCII, got {target!r}")
    return f"GET {target} HTTP/1.1\r\n".encode()


def read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return status and headers of a response's head: names in lower case, of repeated ones the last.

    The standard library's parser costs more than receiving a small batch.
    """
    line = _STATUS.match(head)
    if line is None:
        raise errors.ResponseCorrupt(f"must begin with the status line of HTTP/1.1, got {head[:40]!r}")
    lines = head[line.end() : -len(HEAD_END)].decode("latin-1").split("\r\n")
    pairs = (each.partition(":") for each in lines)
    return int(line[1]), {name.lower(): value.strip() for name, _, value in pairs}


def array_path(route: str, *, verify: bool, **parameters: int | str) -> str:
    """Path of a raw array response, with a checksum at its end or without one."""
    parameters |= {"format": "raw", "checksum": "tail" if verify else "false"}
    # `urlencode` would take five times as long, for each request.
    texts = (
        f"{name}={value if isinstance(value, int) else quote_plus(value)}"
        for name, value in parameters.items()
    )
    return f"{route}?{'&'.join(texts)}"


def steps_request(
    route: str,
    shape: tuple[int, int, int],
    dtype: str,
    *,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    verify: bool,
    are_pieces: bool = False,
    beside: Sequence[Beside] = (),
    row_tokens: int = 0,
    **plan: int | str,
) -> ArrayRequest:
    """Return the request for consecutive steps of one rank.

    Args:
        shape: of the response: steps, rows, items of a row.
        step: the first of the steps.
        are_pieces: the response has a line of `PIECE_ITEMS` for each piece of the rows, at most one an item.
        beside: the arrays to send behind that.
        row_tokens: tokens of a row, where the response has other items.
        plan: `plan=ID`, or the parameters that spell a plan in the URL.
    """
    steps = {"step": step, "count": shape[0], "rank": rank, "world_size": world_size}
    names = [each.name for each in beside]
    form = "+".join(("raw+tail" if verify else "raw", *names))
    identity = (route.rpartition("/")[2], *map(str, steps.values()), form)
    named = {"with": ",".join(names)} if names else {}
    return ArrayRequest(
        path=array_path(route, verify=verify, **plan, **steps, **named),
        shape=(math.prod(shape), PIECE_ITEMS) if are_pieces else shape,
        dtype=dtype,
        is_exact=not are_pieces,
        plan_id=str(plan["plan"]) if "plan" in plan else None,
        verify=verify,
        identity=".".join(identity),
        beside=arrays_of(beside, shape[0], (shape[1], row_tokens or shape[2])),
    )


def corpus_path(name: str) -> str:
    """Route of a corpus's description."""
    return f"/v1/corpora/{quote(name, safe='')}"


def tokens_request(corpus: str, start: int, count: int, dtype: str) -> ArrayRequest:
    """Return the request for a range of the corpus's tokens."""
    path = array_path(f"{corpus_path(corpus)}/tokens", verify=True, start=start, count=count)
    return ArrayRequest(path=path, shape=(count,), dtype=dtype, plan_id=None)


def check_headers(headers: Headers, request: ArrayRequest) -> None:
    """Raise `ResponseCorrupt` unless the headers announce exactly the array that was asked for."""
    shape = request.shape
    if not request.is_exact:
        found = (headers.get(SHAPE_HEADER) or "").partition(",")[0]
        if _LENGTH.fullmatch(found) and int(found) <= shape[0]:
            shape = (int(found), *shape[1:])
    num_bytes = starts(math.prod(shape) * ITEM_BYTES[request.dtype], request.beside)[-1]
    expected = {
        "content-length": str(num_bytes + (TAIL_BYTES if request.verify else 0)),
        SHAPE_HEADER: ",".join(map(str, shape)),
        DTYPE_HEADER: request.dtype,
    }
    if request.plan_id is not None:
        expected[PLAN_HEADER] = request.plan_id
    if request.beside:
        expected[ARRAYS_HEADER] = "; ".join(map(str, request.beside))
    if request.verify:
        expected[CHECKSUM_HEADER] = CHECKSUM_TAIL
    for name, value in expected.items():
        if headers.get(name) != value:
            raise errors.ResponseCorrupt(f"{name} must be {value!r}, got {headers.get(name)!r}")
    if request.identity is not None:
        check_tag(headers, request.identity)


def array_bytes(headers: Headers, request: ArrayRequest) -> int:
    """Return the length of the body without its checksum, of a response with right headers."""
    return int(headers["content-length"]) - (TAIL_BYTES if request.verify else 0)


def check_tag(headers: Headers, identity: str) -> None:
    """Raise `ResponseCorrupt` if the `ETag` names another response: other steps, rank or world size.

    A proxy may strip the tag or weaken it (W/); the other checks are left then.
    """
    tag = headers.get(TAG_HEADER)
    expected = f'"{headers.get(PLAN_HEADER)}.{identity}"'
    if tag is not None and tag.removeprefix("W/") != expected:
        raise errors.ResponseCorrupt(f"{TAG_HEADER} must be {expected}, got {tag}")


def check_tail(digest: xxhash.xxh3_64, tail: bytes) -> None:
    """Raise `ResponseCorrupt` unless the array received has the checksum that followed it."""
    if digest.digest() != tail:
        raise errors.ResponseCorrupt(f"the array's checksum must be {tail.hex()}, got {digest.hexdigest()}")


def checked_array(body: bytes) -> bytes:
    """Return the array of a whole body that ends with a checksum."""
    array, tail = body[:-TAIL_BYTES], body[-TAIL_BYTES:]
    check_tail(xxhash.xxh3_64(array), tail)
    return array


def server_seconds(headers: Headers, said: re.Pattern[str] = SERVER_SECONDS) -> float:
    """How long the server says it took to begin its response; 0 where it does not say."""
    found = said.search(headers.get(TIMING_HEADER) or "")
    return float(found[1]) / 1e3 if found else 0.0


MAX_RETRY_AFTER_SECONDS = 60.0


def error_from_response(status: int, headers: Headers, body: bytes) -> errors.ServerError:
    """The error that a response other than 2xx stands for."""
    content_type = (headers.get("content-type") or "").partition(";")[0].strip().lower()
    problem: dict[str, object] = {}
    if content_type == PROBLEM_TYPE:
        with suppress(ValueError, TypeError):
            problem = dict(json.loads(body))
    # A proxy in front may deny access in words of its own, so here the status decides.
    denied = status in (401, 403)
    slug, detail = _text(problem.get("type")) or "", problem.get("detail")
    kind = errors.AccessDenied if denied else ERRORS.get(slug, errors.ServerError)
    remedy = ACCESS_REMEDY if denied else None
    if 300 <= status < 400 and (location := headers.get("location")):
        remedy = f"redirects are not followed, and this one leads to {location}; give the server's own URL"
    is_text = content_type in (PROBLEM_TYPE, "application/json", "") or content_type.startswith("text/")
    excerpt = body[:200].decode("utf-8", "replace").strip() if is_text else ""
    told = detail or problem.get("title") or (repr(excerpt) if excerpt else "")
    if not told:
        told = "no response of corpus-server, which explains its errors"
        remedy = remedy or "does a proxy or another program answer at this URL?"
    return kind(
        str(told) if detail and not denied else f"HTTP {status}: {told}",
        status=status,
        kind=slug,
        parameter=_text(problem.get("parameter")),
        received=problem.get("received"),
        accepted=_text(problem.get("accepted")),
        remedy=_text(problem.get("remedy", remedy)),
        retry_after_seconds=_seconds(headers.get("retry-after")),
        request_id=_text(problem.get("request_id", headers.get(REQUEST_ID_HEADER))),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _seconds(value: str | None) -> float | None:
    """`Retry-After` in seconds, bounded; its date form is not worth a clock comparison and reads as 1 s."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()):
        return 1.0
    # A server that is back sooner than it thought must not be left alone for hours.
    return MAX_RETRY_AFTER_SECONDS if len(value) > 9 else min(float(value), MAX_RETRY_AFTER_SECONDS)
