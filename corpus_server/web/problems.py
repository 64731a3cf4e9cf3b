"""Errors as problem documents (RFC 9457), from one table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from corpus_server import errors

_log = logging.getLogger("corpus_server")

STATUS: Mapping[type[errors.CorpusServerError], int] = {
    errors.InvalidParameter: 422,
    errors.InvalidPlan: 422,
    errors.AnswerTooLarge: 422,
    errors.TextUnavailable: 422,
    errors.UnknownCorpus: 404,
    errors.UnknownPlan: 404,
    errors.UnknownDocument: 404,
    errors.FingerprintMismatch: 409,
    errors.UnreadableCorpus: 503,
    errors.CorpusChanged: 503,
    errors.ReadFailed: 503,
    errors.Overloaded: 503,
}

_HTTP_SLUGS = {404: "not-found", 405: "method-not-allowed", 413: "body-too-large", 414: "url-too-long"}
_MAX_ECHO = 200
"""Characters of a received value that are sent back."""


def problem(
    status: int,
    slug: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    **extra: object,
) -> Response:
    """Return a problem document; extra fields that are None are left out."""
    body: dict[str, Any] = {
        "type": slug,
        "title": slug.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail,
    }
    body.update({name: _echo(value) for name, value in extra.items() if value is not None})
    return Response(
        json.dumps(body, allow_nan=False).encode(),
        status_code=status,
        headers={**(headers or {}), "Cache-Control": "no-store"},
        media_type="application/problem+json",
    )


def error_response(error: errors.CorpusServerError) -> Response:
    """Return the problem document of an error of the core."""
    headers = (
        {"Retry-After": str(error.retry_after_seconds)} if isinstance(error, errors.Overloaded) else None
    )
    return problem(
        STATUS.get(type(error), 500),
        error.slug,
        error.detail,
        headers=headers,
        parameter=error.parameter,
        received=error.received,
        accepted=error.accepted,
        remedy=error.remedy,
    )


def core_error(request: Request, error: Exception) -> Response:
    """Return the problem document of an error of the core; the server's own go to the log."""
    assert isinstance(error, errors.CorpusServerError)
    if STATUS.get(type(error), 500) >= 500 and not isinstance(error, errors.Overloaded):
        _log.error("%s: %s", error.slug, error.detail)
    return error_response(error)


def validation_error(request: Request, error: Exception) -> Response:
    """Return the problem document of parameters that the schema refuses."""
    assert isinstance(error, RequestValidationError)
    return error_response(_from_validation(error))


def _http_error(routes: Sequence[BaseRoute], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    slug = _HTTP_SLUGS.get(error.status_code, "http-error")
    detail = f"{error.detail}: {request.method} {_echo(request.url.path)}"
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(routes, request)):
        headers["Allow"] = ", ".join(sorted(methods))
    return problem(error.status_code, slug, detail, headers=headers, remedy="GET /docs lists the routes")


def _methods(routes: Sequence[BaseRoute], request: Request) -> set[str]:
    """Return what a path may be asked by; the router names the methods of its first route for it alone."""
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return {method for route in matching if isinstance(route, Route) for method in route.methods or ()}


def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; nginx's number, for the metrics


def _unexpected(request: Request, error: Exception) -> Response:
    return problem(500, "internal-error", "the server failed; its log says why")


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answer every error of the application with a problem document.

    Args:
        app: to be given handlers.
        routes: what it serves.
    """
    app.add_exception_handler(errors.CorpusServerError, core_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, partial(_http_error, routes))
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)


def _from_validation(error: RequestValidationError) -> errors.InvalidParameter:
    """Make one error of pydantic's first: which parameter, what came, what is accepted."""
    # A misspelt parameter is unknown and leaves another missing: the first is what to say.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    name = str(first["loc"][-1]) if first["loc"] else "query"
    context = first.get("ctx") or {}
    accepted = context.get("accepted") or context.get("expected") or context.get("pattern")
    if first["type"] == "extra_forbidden":
        return errors.InvalidParameter(
            f"unknown parameter {name!r}",
            parameter=name,
            received=first.get("input"),
            remedy="GET /docs lists the parameters of each route",
        )
    if first["type"] == "missing":
        return errors.InvalidParameter(f"{name} is missing", parameter=name)
    received = first.get("input")
    said = f"must be {accepted}" if accepted else first["msg"]
    return errors.InvalidParameter(
        f"{name} {said}, got {_echo(received)!r}",
        parameter=name,
        received=received,
        accepted=accepted,
    )


def _echo(value: object) -> object:
    """Return a received value fit to be sent back: JSON, and short."""
    if isinstance(value, bool | int) or value is None:
        return value if value is None or abs(value) < 2**63 else str(value)[:_MAX_ECHO]
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."
