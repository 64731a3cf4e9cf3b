"""Names and checks of the wire format; no I/O.

An array answer is the little-endian C-order body alone; what it is stands in its headers:

    Corpus-Shape: 4,64,1025          Corpus-Dtype: uint16
    Corpus-Plan: <64 hex>            Corpus-Checksum: xxh3-64=tail
    Content-Length: exact, never chunked

`tail` says that 8 bytes follow the array, its checksum: so the server sends each piece as it reads it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, quote_plus

import xxhash

from corpus_client import errors

SHAPE_HEADER = "Corpus-Shape"
DTYPE_HEADER = "Corpus-Dtype"
PLAN_HEADER = "Corpus-Plan"
CHECKSUM_HEADER = "Corpus-Checksum"
CHECKSUM_TAIL = "xxh3-64=tail"
TAIL_BYTES = 8
TIMING_HEADER = "Server-Timing"
PROBLEM_TYPE = "application/problem+json"

DIGEST = re.compile(r"xxh3-64=[0-9a-f]{16}")
"""A receipt: the checksum of a whole global batch's raw tokens."""

SERVER_SECONDS = re.compile(r"\banswer;dur=(\d+(?:\.\d+)?)")
"""In `Server-Timing` (W3C): milliseconds from the request's arrival to the answer's first byte."""

ITEM_BYTES: dict[str, int] = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
"""Bytes of one item, by the name in `Corpus-Dtype`."""

ERRORS: dict[str, type[errors.ServerError]] = {
    error.slug: error
    for error in (
        errors.InvalidParameter,
        errors.InvalidPlan,
        errors.AnswerTooLarge,
        errors.TextUnavailable,
        errors.UnknownCorpus,
        errors.UnknownPlan,
        errors.UnknownDocument,
        errors.NotFound,
        errors.MethodNotAllowed,
        errors.FingerprintMismatch,
        errors.CorpusChanged,
        errors.ReadFailed,
        errors.Overloaded,
        errors.InternalError,
    )
}
"""The `type` slug of a problem document -> the error that it becomes."""


class Headers(Protocol):
    """What both HTTP libraries' header objects have in common; names in any case."""

    def get(self, name: str, /) -> str | None:
        """The header's value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayRequest:
    """One GET and exactly what a right answer to it is.

    Args:
        path: route and query, below the server's base URL.
        shape: of the array in the body.
        dtype: numpy name of its items.
        plan_id: what `Corpus-Plan` must say; None: not checked.
        verify: whether a checksum is asked for and checked.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    plan_id: str | None
    verify: bool = True

    @property
    def num_bytes(self) -> int:
        """Exact length of the array in the body."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def array_path(route: str, *, verify: bool, **parameters: int | str) -> str:
    """Path of a raw array answer, with a checksum at its end or without one."""
    parameters |= {"format": "raw", "checksum": "tail" if verify else "false"}
    pairs = [
        f"{name}={value if isinstance(value, int) else quote_plus(value)}"
        for name, value in parameters.items()
    ]
    return f"{route}?{'&'.join(pairs)}"


def corpus_path(name: str) -> str:
    """Route of a corpus's description."""
    return f"/v1/corpora/{quote(name, safe='')}"


def plan_path(plan_id: str, question: str, *, step: int) -> str:
    """Route of what a plan says about a training step: its `usage` or `receipt`."""
    return f"/v1/plans/{plan_id}/{question}?step={step}"


def check_headers(headers: Headers, request: ArrayRequest) -> None:
    """Raise `AnswerCorrupt` unless the headers announce exactly the array that was asked for."""
    expected = {
        "Content-Length": str(request.num_bytes + (TAIL_BYTES if request.verify else 0)),
        SHAPE_HEADER: ",".join(map(str, request.shape)),
        DTYPE_HEADER: request.dtype,
    }
    if request.plan_id is not None:
        expected[PLAN_HEADER] = request.plan_id
    if request.verify:
        expected[CHECKSUM_HEADER] = CHECKSUM_TAIL
    for name, value in expected.items():
        if headers.get(name) != value:
            raise errors.AnswerCorrupt(f"{name} must be {value!r}, got {headers.get(name)!r}")


def check_tail(digest: xxhash.xxh3_64, tail: bytes) -> None:
    """Raise `AnswerCorrupt` unless the array received has the checksum that followed it."""
    if digest.digest() != tail:
        raise errors.AnswerCorrupt(f"the array's checksum must be {tail.hex()}, got {digest.hexdigest()}")


def checked_array(body: bytes) -> bytes:
    """Return the array of a whole body that ends with a checksum."""
    array, tail = body[:-TAIL_BYTES], body[-TAIL_BYTES:]
    check_tail(xxhash.xxh3_64(array), tail)
    return array


def server_seconds(headers: Headers) -> float:
    """How long the server says it took to begin its answer; 0 where it does not say."""
    found = SERVER_SECONDS.search(headers.get(TIMING_HEADER) or "")
    return float(found[1]) / 1e3 if found else 0.0


def error_from_answer(status: int, headers: Headers, body: bytes) -> errors.ServerError:
    """The error that an answer other than 2xx stands for."""
    retry_after = _seconds(headers.get("Retry-After"))
    content_type = (headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    problem = _json_object(body) if content_type == PROBLEM_TYPE else {}
    slug = problem.get("type")
    kind = ERRORS.get(slug, errors.ServerError) if isinstance(slug, str) else errors.ServerError
    detail = problem.get("detail") or problem.get("title") or _excerpt(body)
    return kind(
        f"HTTP {status}: {detail}" if kind is errors.ServerError else str(detail),
        status=status,
        parameter=_text(problem.get("parameter")),
        received=problem.get("received"),
        accepted=_text(problem.get("accepted")),
        remedy=_text(problem.get("remedy")),
        retry_after_seconds=retry_after,
    )


def _json_object(body: bytes) -> dict[str, object]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return repr(text) if text else "no explanation"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _seconds(value: str | None) -> float | None:
    """`Retry-After` in seconds; its date form is not worth a clock comparison and reads as 1 s."""
    if value is None:
        return None
    return float(value) if value.isascii() and value.isdigit() else 1.0
