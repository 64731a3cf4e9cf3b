"""Every error of the application becomes a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as AsgiResponse

from corpus_server.errors import CorpusServerError
from corpus_server.responses.own_errors import log_error
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
            remedy = _meant(request) or "GET /docs lists the routes"
            refusal = CorpusServerError(f"{error.detail}: {asked}", remedy=remedy)
            refusal.status, refusal.slug = error.status_code, _SLUGS.get(error.status_code, "http-error")
            error = refusal
        case CorpusServerError():
            log_error(error)
            # A question's name stands where the id should: the path ends with that "id".
            named = request.path_params.get("plan_id", "")
            if named and request.url.path.endswith(f"/{named}") and (meant := _meant(request)) is not None:
                error = CorpusServerError(f"{named!r:.100} is no plan's id", remedy=meant)
                error.status, error.slug = 404, _SLUGS[404]
        # Any other is logged by the server that runs the application: it is raised again.
    return refused(request.scope, error, headers)


def _meant(request: Request) -> str | None:
    """Name the route that a path without an id means: `/v1/plans/usage`, or `/v1/usage`."""
    *_, last = request.url.path.rstrip("/").split("/")
    paths = sorted({each.path for each in request.app.routes if each.path.endswith(f"}}/{last}")})
    if not last or not paths:
        return None
    lists = sorted({path.partition("/{")[0] for path in paths})
    return f"did you mean {' or '.join(paths)}? GET {' or '.join(lists)} lists what the braces stand for"


def _methods(request: Request) -> set[str]:
    """Return all methods of a path; the router names those of its first route alone."""
    path, routes = request.scope["path"], request.app.routes
    return {method for each in routes if each.path_regex.match(path) for method in each.methods or ()}


_KINDS = (CorpusServerError, HTTPException, ClientDisconnect, ClientLeft, Exception)

HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Awaitable[AsgiResponse]]] = dict.fromkeys(
    _KINDS, _response
)
"""For the application: of every kind of error. A plain function would be called in a thread."""
