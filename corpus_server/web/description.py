"""How the API describes itself: `/openapi.json`, `/docs` and `/redoc`, by FastAPI, from `ROUTES`.

Only a process that somebody asks for them imports FastAPI: it takes 0.5 s of CPU and 15 MB.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi_offline import FastAPIOffline
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.responses import Response as AsgiResponse
from starlette.routing import Route as StarletteRoute

from corpus_server import __version__
from corpus_server.responses.problem import PROBLEM_TYPE, Problem
from corpus_server.web.routes import ROUTES, Route

View = Callable[[Request], Awaitable[HTMLResponse]]

_ABOUT = """
Which tokens a training step sees is a pure function of a small plan. A plan is named by its id (`plan=`) or
spelled inline (`corpus=`, `seq_len=`, `batch_size=` ...). A response about a step of `plan=ID` never changes:
cache it, retry it, ask any replica. Where a URL names a corpus instead, another corpus may take the name, so
a cache must ask again, with the `ETag`.

Token responses carry `Corpus-Shape`, `Corpus-Dtype`, `Corpus-Plan`, `Corpus-Checksum` and an exact
`Content-Length`. The checksum is `xxh3-64=` and 16 hex digits over the body, or `xxh3-64=tail` where the last
8 bytes of the body are the digest.

Errors are problem documents (RFC 9457) with a stable `type`. Unknown and repeated parameters are refused, but
by `/healthz`, `/readyz`, `/metrics` and `/v1/access`: probes, scrapers and proxies add their own.
`docs/http.md` of the project is the whole contract, with limits and rules for retries.
"""

_DRESS = {
    "<head>": '<meta name="color-scheme" content="light dark">'
    '<link rel="stylesheet" href="/page/static/docs.css">',
    "<body>": '<a class="back" href="/">corpus-server: corpora, plans, live</a>',
}

_ASKED: dict[int | str, dict[str, Any]] = {
    422: {"model": Problem, "description": "A parameter is unknown, or outside its range."},
    404: {"model": Problem, "description": "Known to be absent."},
}
"""Of routes that take parameters."""
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    503: {"model": Problem, "description": "A shard changed, the disk failed, or the server is busy."},
    "default": {"model": Problem, "description": "Every other refusal, and every failure of the server."},
}


def described() -> FastAPI:
    """Return an application that serves the description of `ROUTES`, and whose `openapi` returns it."""
    # Its pages carry their scripts with them: clusters often have no way out.
    app = FastAPIOffline(
        title="corpus-server",
        version=__version__,
        summary="Sampled windows of large token files, over HTTP",
        description=_ABOUT,
    )
    for path in ("/docs", "/redoc"):
        app.add_route(path, _dressed(_taken(app, path).endpoint), include_in_schema=False)
    for route in ROUTES:
        problems = {**(_ASKED if route.types else {}), **_PROBLEMS}
        options = {**route.described, "responses": {**problems, **route.described.get("responses", {})}}
        app.add_api_route(route.path, _endpoint(route), methods=[route.method], **options)
    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            # FastAPI describes a model under the media type of the route's own response.
            for status in {*map(str, (*_ASKED, *_PROBLEMS))} & {*operation["responses"]}:
                content = operation["responses"][status]["content"]
                operation["responses"][status]["content"] = {PROBLEM_TYPE: next(iter(content.values()))}
    body = JSONResponse(app.openapi()).body  # spelled once: 3 ms, for which the event loop would stand still

    async def openapi(_: Request) -> AsgiResponse:
        return AsgiResponse(body, media_type="application/json")

    app.add_route(_taken(app, "/openapi.json").path, openapi, include_in_schema=False)
    return app


def _taken(app: FastAPI, path: str) -> StarletteRoute:
    """Take a route of FastAPI's own out, and return it."""
    found = next(each for each in app.routes if isinstance(each, StarletteRoute) and each.path == path)
    app.router.routes.remove(found)
    return found


def _dressed(page: View) -> View:
    """Return a page with a way back and the colours of the reader's system."""

    async def dressed(request: Request) -> HTMLResponse:
        text = bytes((await page(request)).body).decode()
        for tag, more in _DRESS.items():
            text = text.replace(tag, f"{tag}{more}", 1)
        return HTMLResponse(text)

    return dressed


def _endpoint(route: Route) -> Callable[..., Any]:
    """Return a function with the parameters of a route; nobody calls it."""

    async def endpoint(**given: Any) -> None:
        raise NotImplementedError

    kinds = dict(route.types)
    if (query := kinds.pop("query", None)) is not None:
        kinds["query"] = Annotated[query, Query()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, annotation=kind) for name, kind in kinds.items()]
    endpoint.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    endpoint.__name__, endpoint.__doc__ = route.handler.__name__, route.about
    return endpoint
