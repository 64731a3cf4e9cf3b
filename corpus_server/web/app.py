"""Build the application; running it is another matter (`corpus_server.run`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from corpus_server import __version__
from corpus_server.answers.service import Service
from corpus_server.settings import Settings
from corpus_server.web import problems
from corpus_server.web.gateway import Gateway
from corpus_server.web.page import add_page
from corpus_server.web.routes import ROUTERS
from corpus_server.web.schemas import PROBLEM_TYPE, Problem

_DESCRIPTION = """
Which tokens a training step sees is a pure function of a small plan. A plan is named by its id (`plan=`) or
spelled inline (`corpus=`, `seq_len=`, `batch_size=` ...). A response about a step of `plan=ID` never changes:
cache it, retry it, ask any replica. Where a URL names a corpus instead, another corpus may take the name, so
a cache must ask again, with the `ETag`.

Token responses carry `Corpus-Shape`, `Corpus-Dtype`, `Corpus-Plan`, `Corpus-Checksum` and an exact
`Content-Length`. The checksum is `xxh3-64=` and 16 hex digits over the body, or `xxh3-64=tail` where the last
8 bytes of the body are the digest.

Errors are problem documents (RFC 9457) with a stable `type`. Unknown and repeated parameters are refused.
`docs/http.md` of the project is the whole contract, with limits and rules for retries.
"""

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    422: {"model": Problem, "description": "A parameter is outside its range."},
    404: {"model": Problem, "description": "Known to be absent."},
    503: {"model": Problem, "description": "A shard changed, the disk failed, or the server is busy."},
    "default": {"model": Problem, "description": "Every other refusal, and every failure of the server."},
}


def create_app(settings: Settings) -> Gateway:
    """Return the ASGI application; it opens the corpora at start-up and closes them at shutdown.

    Any ASGI server can run it. Under another server the application answers all routes itself, with the
    same bytes.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with Service.open(settings) as app.state.service:
            watching = asyncio.create_task(app.state.service.access.watch())
            try:
                yield
            finally:
                watching.cancel()

    # Its documentation pages carry their scripts with them: clusters often have no way out.
    app = FastAPIOffline(
        title="corpus-server",
        version=__version__,
        summary="Sampled windows of large token files, over HTTP",
        description=_DESCRIPTION,
        lifespan=lifespan,
        exception_handlers=problems.HANDLERS,
        # A redirect would repeat the Host header that came; a name with a slash is simply not served.
        redirect_slashes=False,
    )
    for router in ROUTERS:
        app.include_router(router, responses=_PROBLEMS)
    add_page(app)
    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            # FastAPI describes a model under the media type of the route's own response.
            for status in map(str, _PROBLEMS):
                content = operation["responses"][status]["content"]
                operation["responses"][status]["content"] = {PROBLEM_TYPE: next(iter(content.values()))}
    return Gateway(app)
