"""Problem documents (RFC 9457): what a client is told of an error."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from pydantic import ValidationError
from typing_extensions import TypedDict

from corpus_server.admission.request import RUN_PATTERN
from corpus_server.described import described_keys
from corpus_server.errors import CorpusServerError, InvalidParameter, Unauthorized, UnreadableCorpus
from corpus_server.plan_store import PLAN_ID_FORM, PLAN_ID_PATTERN
from corpus_server.responses.question import NAMES_OF_QUERY
from corpus_server.responses.response import FORMATS, Response

_PATTERNS = {PLAN_ID_PATTERN: PLAN_ID_FORM, RUN_PATTERN: "1 to 64 letters, digits, '.', '_' or '-'"}
"""What people are told instead of a regular expression."""

PROBLEM_TYPE = "application/problem+json"
_LENGTHS = {
    "min_length": "a text of {} character{} or more",
    "max_length": "a text of at most {} character{}",
}

_MAX_ECHO = 200  # characters of a received value that are sent back


@described_keys
class Problem(TypedDict):
    """RFC 9457 problem document."""

    type: str
    """Stable name of the error, for programs."""
    title: str
    status: int
    detail: str
    request_id: str
    """The request's id, as in its `X-Request-Id` and the log."""
    parameter: NotRequired[str]
    received: NotRequired[Any]
    accepted: NotRequired[str]
    remedy: NotRequired[str]


def problem(error: Exception, request_id: str) -> Response:
    """Return the problem document (RFC 9457) of an error; fields that are None are left out.

    Args:
        error: of the core, or of pydantic; of any other kind, the log must say what it was.
        request_id: by which the log names the request.
    """
    if isinstance(error, ValidationError):
        error = invalid_parameter(error.errors(), error.title)
    if not isinstance(error, CorpusServerError):
        error = CorpusServerError("the server failed; its log says why")
    if isinstance(error, UnreadableCorpus):
        error = error.for_clients()
    document: Problem = {
        "type": error.slug,
        "title": error.slug.replace("-", " ").capitalize(),
        "status": error.status,
        "detail": error.detail,
        "request_id": request_id,
    }
    if error.parameter is not None:
        document["parameter"] = _short(error.parameter)
    if error.received is not None:
        document["received"] = _echo(error.received)
    if error.accepted is not None:
        document["accepted"] = _short(error.accepted)
    if error.remedy is not None:
        document["remedy"] = _short(error.remedy)
    headers = {"Content-Type": PROBLEM_TYPE, "Cache-Control": "no-store"}
    if error.retry_after_seconds is not None:
        headers["Retry-After"] = str(error.retry_after_seconds)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = error.challenge
    response = Response.whole(json.dumps(document).encode(), headers, status=error.status)
    response.problem_type = error.slug
    return response


def invalid_parameter(found: Sequence[Mapping[str, Any]], query: str = "") -> InvalidParameter:
    """Make one error of pydantic's list: which parameter, what came, what is accepted.

    Args:
        query: the class of the parameters, by which `NAMES_OF_QUERY` knows them.
    """
    # A misspelt parameter is unknown and leaves another one missing: the first is what to say.
    first = min(found, key=lambda each: each["type"] != "extra_forbidden")
    name = str(first["loc"][-1]) if first["loc"] else "query"
    received = first.get("input")
    if first["type"] == "extra_forbidden":
        return _unknown_parameter(name, received, NAMES_OF_QUERY.get(query, []))
    if first["type"] == "missing":
        return InvalidParameter(f"{name} is missing", parameter=name)
    context = first.get("ctx") or {}
    pattern = context.get("pattern", "")
    accepted = context.get("accepted") or context.get("expected") or _PATTERNS.get(pattern, pattern) or None
    for limit, words in _LENGTHS.items():
        if limit in context:
            accepted = words.format(context[limit], "" if context[limit] == 1 else "s")
    return InvalidParameter(
        f"{name} must be {accepted or 'of another form'}, got {_echo(received)!r}",
        parameter=name,
        received=received,
        accepted=accepted,
    )


def _unknown_parameter(name: str, received: object, known: Sequence[str]) -> InvalidParameter:
    meant = difflib.get_close_matches(name.lower()[:40], known, n=1)
    if "format" in known and name in FORMATS:
        meant = [f"format={name}"]
    return InvalidParameter(
        f"unknown parameter {name!r}" + (f"; did you mean {meant[0]!r}?" if meant else ""),
        parameter=name,
        received=received,
        accepted=", ".join(known) or "no parameter",
        remedy="GET /docs lists the parameters of each route",
    )


def _echo(value: object) -> object:
    """Return a received value fit to be sent back: JSON, and short."""
    if isinstance(value, bool | int) or value is None:
        return value if value is None or abs(value) < 2**63 else str(value)[:_MAX_ECHO]
    return _short(value if isinstance(value, str) else repr(value))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."
