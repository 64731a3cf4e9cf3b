"""Build the application; running it is another matter (`corpus_server.web.run`)."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp

from corpus_server import __version__, mapguard
from corpus_server.catalog import Catalog
from corpus_server.plan.store import PlanStore
from corpus_server.settings import Settings
from corpus_server.web import heap, metrics, problems
from corpus_server.web.hot import HotPath
from corpus_server.web.routes import ROUTERS
from corpus_server.web.service import Service

SETTINGS_VARIABLE = "CORPUS_SERVER_SETTINGS"

_DESCRIPTION = """
Which tokens a training step sees is a pure function of a small plan. Every answer that names a step of
`plan=ID` is immutable: cache it, retry it, ask any replica. Where a corpus is named instead, another one
may take the name, so a cache asks again, by the `ETag`.

Token answers carry `Corpus-Shape`, `Corpus-Dtype`, `Corpus-Plan` and `Corpus-Checksum`
(`xxh3-64=HEX` over the body) and an exact `Content-Length`. Errors are problem documents (RFC 9457).
"""


def create_app(settings: Settings, catalog: Catalog | None = None) -> ASGIApp:
    """Return the ASGI application; it opens the corpora at start-up and closes them at shutdown.

    Args:
        settings: what to serve, and limits.
        catalog: corpora that are open already; the caller then closes them.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        mapguard.install()
        heap.keep_freed()
        opened = catalog or Catalog.open(settings.corpora, reads_ahead=settings.read_ahead_bytes > 0)
        try:
            with PlanStore(settings.state_dir) as store:
                service = Service(opened, store, settings)
                app.state.service = service
                gc.freeze()  # what is there now stays: collecting garbage need not look at it again
                try:
                    yield
                finally:
                    service.close()
        finally:
            if catalog is None:
                opened.close()

    # Its documentation pages carry their scripts with them: clusters often have no way out.
    app = FastAPIOffline(
        title="corpus-server",
        version=__version__,
        summary="Sampled windows of large token files, over HTTP",
        description=_DESCRIPTION,
        lifespan=lifespan,
        # A redirect would spell the Host header that came; a name with a slash is simply not served.
        redirect_slashes=False,
    )
    problems.install(app, [route for router in ROUTERS for route in router.routes])
    for router in ROUTERS:
        app.include_router(router)
    # Around the application and not inside it, where every request would pass four more layers.
    return metrics.Measured(HotPath(app))


def create_app_from_environment() -> ASGIApp:
    """Return the application of a worker process, which finds its settings in the environment."""
    return create_app(Settings.from_json(os.environ[SETTINGS_VARIABLE]))
