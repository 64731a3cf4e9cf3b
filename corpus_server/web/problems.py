"""Every error of the application becomes a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as AsgiResponse

from corpus_server.errors import CorpusServerError
from corpus_server.http.exchange import log_error
from corpus_server.responses.requests import CLIENT_LEFT
from corpus_server.web.responses import refused
from corpus_server.work import ClientLeft

_SLUGS = {404: "not-found", 405: "method-not-allowed"}
_MAX_ECHO = 200


async def _response(request: Request, error: Exception) -> AsgiResponse:
    headers: dict[str, str] = {}
    match error:
        case ClientDisconnect() | ClientLeft():
            return AsgiResponse(status_code=CLIENT_LEFT)
        case HTTPException():
            headers.update(error.headers or {})
            if error.status_code == 405 and (methods := _methods(request)):
                headers["Allow"] = ", ".join(sorted(methods))
            asked = f"{request.method[:_MAX_ECHO]} {request.url.path[:_MAX_ECHO]}"
            refusal = CorpusServerError(f"{error.detail}: {asked}", remedy="GET /docs lists the routes")
            refusal.status, refusal.slug = error.status_code, _SLUGS.get(error.status_code, "http-error")
            error = refusal
        case CorpusServerError():
            log_error(error)
        # Any other is logged by the server that runs the application: it is raised again.
    return refused(request.scope, error, headers)


def _methods(request: Request) -> set[str]:
    """Return all methods of a path; the router names those of its first route alone."""
    path, routes = request.scope["path"], request.app.routes
    return {method for each in routes if each.path_regex.match(path) for method in each.methods or ()}


_KINDS = (CorpusServerError, HTTPException, ClientDisconnect, ClientLeft, Exception)

HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Awaitable[AsgiResponse]]] = dict.fromkeys(
    _KINDS, _response
)
"""For the application: of every kind of error. A plain function would be called in a thread."""
