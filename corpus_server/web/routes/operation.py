"""The routes of operation: is it alive, is it ready, how is it doing."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from corpus_server.web import metrics
from corpus_server.web.problems import problem
from corpus_server.web.routes.shared import ServiceHere, json_response, make_router, read_route

router = make_router("operation")


@read_route(router, "/healthz")
async def health() -> dict[str, str]:
    """Answer as long as the process lives."""
    return {"status": "alive"}


@read_route(router, "/readyz")
async def readiness(service: ServiceHere) -> Response:
    """Answer 200 while every corpus is as it was opened and plans can be kept, else 503."""
    failure = await run_in_threadpool(service.why_not_ready)
    if failure is not None:
        return problem(503, "not-ready", failure)
    return json_response(
        {"status": "ready", "corpora": list(service.catalog.corpora)}, {"Cache-Control": "no-store"}
    )


@read_route(router, "/metrics")
async def prometheus() -> Response:
    """Return Prometheus text over all worker processes."""
    content = await run_in_threadpool(metrics.render)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")
