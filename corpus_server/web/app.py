"""Build the application; running it is another matter (`corpus_server.run`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response as AsgiResponse
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.web import problems
from corpus_server.web.gateway import Gateway
from corpus_server.web.page import views
from corpus_server.web.responses import HEAD
from corpus_server.web.routes import ROUTES, Call, Route

_DESCRIPTION_PATHS = (
    *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
    "/static-offline-docs/{path:path}",
)


def create_app(settings: Settings) -> Gateway:
    """Return the ASGI application; it opens the corpora at start-up and closes them at shutdown.

    Any ASGI server can run it. Under another server the application answers all routes itself, with the
    same bytes.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with Service.open(settings) as app.state.service:
            watching = asyncio.create_task(app.state.service.access.watch())
            try:
                yield
            finally:
                watching.cancel()

    app = Starlette(
        routes=[
            *(_Path(route.path, _endpoint(route), methods=[route.method]) for route in ROUTES),
            *(_Path(path, view) for path, view in views().items()),
            *(_Path(path, _Description()) for path in _DESCRIPTION_PATHS),
        ],
        lifespan=lifespan,
        exception_handlers=problems.HANDLERS,
    )
    # A redirect would repeat the Host header that came; a name with a slash is simply not served.
    app.router.redirect_slashes = False
    return Gateway(app)


def _endpoint(route: Route) -> Callable[[Request], Awaitable[AsgiResponse]]:
    async def endpoint(request: Request) -> AsgiResponse:
        head = request.scope[HEAD]
        call = Call(request, head, request.app.state.service)
        return await route.handler(call, **route.given(request.path_params, head.query_string))

    return endpoint


class _Path(StarletteRoute):
    """A route of exactly one spelling: Starlette's own pattern allows a line feed after the path."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: list[str] | None = None) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.path_regex = re.compile(self.path_regex.pattern.removesuffix("$") + r"\Z")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether a request is for this route; note the route, whose path is a label of metrics."""
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class _Description:
    """The application of `web/description.py`, which is imported when it is asked for."""

    app: ASGIApp | None = None
    lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        async with self.lock:
            if self.app is None:
                type(self).app = await asyncio.to_thread(_described)
        assert self.app is not None
        await self.app(scope, receive, send)


def _described() -> ASGIApp:
    from corpus_server.web.description import described

    return described()
