"""Every error of the application becomes a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response as AsgiResponse
from starlette.routing import Match, Route

from corpus_server.answers.response import ClientLeft, invalid_parameter
from corpus_server.errors import CorpusServerError
from corpus_server.http.exchange import log_error
from corpus_server.web.responses import CLIENT_LEFT, refused
from corpus_server.web.routes import ROUTERS

_SLUGS = {404: "not-found", 405: "method-not-allowed"}
_MAX_ECHO = 200


async def _core_error(request: Request, error: CorpusServerError) -> AsgiResponse:
    log_error(error)
    return refused(request.scope, error)


async def _validation_error(request: Request, error: RequestValidationError) -> AsgiResponse:
    return refused(request.scope, invalid_parameter(error.errors()))


async def _http_error(request: Request, error: HTTPException) -> AsgiResponse:
    asked = f"{request.method[:_MAX_ECHO]} {request.url.path[:_MAX_ECHO]}"
    refusal = CorpusServerError(f"{error.detail}: {asked}", remedy="GET /docs lists the routes")
    refusal.status = error.status_code
    refusal.slug = _SLUGS.get(error.status_code, "http-error")
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        headers["Allow"] = ", ".join(sorted(methods))
    return refused(request.scope, refusal, headers)


def _methods(request: Request) -> set[str]:
    """Return all methods of a path; the router names those of its first route alone."""
    routes = [route for router in ROUTERS for route in router.routes]
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return {method for route in matching if isinstance(route, Route) for method in route.methods or ()}


async def _client_left(request: Request, error: Exception) -> AsgiResponse:
    return AsgiResponse(status_code=CLIENT_LEFT)


async def _unexpected(request: Request, error: Exception) -> AsgiResponse:
    # The server that runs the application logs the error, which is raised again.
    return refused(request.scope, error)


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Awaitable[AsgiResponse]]] = {
    CorpusServerError: _core_error,
    RequestValidationError: _validation_error,
    HTTPException: _http_error,
    ClientDisconnect: _client_left,
    ClientLeft: _client_left,
    Exception: _unexpected,
}
"""For the application: a handler of every kind of error. Plain functions would be called in a thread."""
