"""The routes of operation: is it alive, is it ready, how is it doing."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from starlette.responses import PlainTextResponse
from starlette.responses import Response as AsgiResponse

from corpus_server import live
from corpus_server.admission.request import RequestHead
from corpus_server.errors import CorpusServerError, Forbidden, NotReady, Unauthorized
from corpus_server.metrics import shared
from corpus_server.responses.question import QueryParameters
from corpus_server.responses.response import NO_STORE, json_response
from corpus_server.responses.tokens import parameters
from corpus_server.web.responses import events, refused, sent
from corpus_server.web.routes.route import Call, route
from corpus_server.work import Budget

_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "example": 'data: {"unix_seconds": ..., "samples": {...}}\n\n',
            }
        }
    }
}
"""How the route that can be followed describes its stream."""


class LiveQuery(QueryParameters):
    """Parameters of the last hour."""

    follow: Literal["true", "false"] = "false"
    """`true`: stay, and send what is new as server-sent events."""


@route("/healthz", tags=["operation"], response_model=dict[str, str])
async def health(call: Call) -> AsgiResponse:
    """Answer 200 as long as the process lives."""
    return sent(json_response({"status": "alive"}, {}, Budget()))


@route("/readyz", tags=["operation"])
async def readiness(call: Call) -> AsgiResponse:
    """Answer 200 while the server should get requests, else 503 with the reason.

    Reasons: it is shutting down, a file of a corpus changed, the disk hangs, or plans cannot be kept.
    """
    service = call.service
    unready = await service.run_probe(service.why_not_ready)
    # Else strangers would learn the names of corpora and of their files.
    may_know = service.access.num_tokens is None and service.settings.allow is None
    if unready is not None:
        remedy = "the server's log names the file" if unready.detail and not may_know else None
        error = NotReady((may_know and unready.detail) or unready.said, remedy=remedy)
        return refused(call.request.scope, error)
    ready: dict[str, object] = {"status": "ready"}
    if service.access.failure:  # whose text names the file
        ready["warning"] = "the file of tokens cannot be taken up; the tokens read before are in force"
    if may_know:
        ready["corpora"] = list(service.catalog.corpora)
    return sent(json_response(ready, NO_STORE, Budget()))


@route("/v1/access", tags=["operation"], status_code=204, response_class=AsgiResponse)
async def access(call: Call) -> AsgiResponse:
    """Tell a proxy whether a request may be answered from its cache: 204, 401 or 403.

    The proxy sends what it was asked in `X-Original-Method` and `X-Original-URI`, with the token. Where a
    plan of the URL is not known here, nobody can tell which corpora it reads: `Corpus-Access: unknown` says
    that the cache must not answer.
    """
    target = call.request.headers.get("x-original-uri", "/").encode("latin-1")
    asked = dataclasses.replace(
        call.head, method=call.request.headers.get("x-original-method", "GET"), target=target
    )
    granted = "granted"
    try:
        caller = call.service.admission.check(asked)
        corpora, plans = _named(asked)
        caller.check_read(corpora)
        if plans:
            asked.caller = caller
            await call.run(lambda budget: [call.service.plan(each, caller, budget) for each in plans])
    except (Unauthorized, Forbidden):
        raise
    except CorpusServerError:  # the request itself will be told
        granted = "unknown"
    return AsgiResponse(status_code=204, headers={"Corpus-Access": granted})


def _named(asked: RequestHead) -> tuple[list[str], list[str]]:
    """Return the corpora and the ids of plans that a URL names, in its path or in its parameters."""
    query = parameters(asked.query_string)
    plans = [query[name] for name in ("plan", "other") if name in query]
    # Beside a plan it is one of the plan's own.
    corpora = [query["corpus"]] if "corpus" in query and not plans else []
    match asked.decoded_path.split("/"):
        case ["", "v1", "corpora", name, *_]:
            corpora.append(name)
        case ["", "v1", "plans", plan_id, *_]:
            plans.append(plan_id)
    return corpora, plans


@route("/metrics", tags=["operation"], response_class=PlainTextResponse)
async def prometheus(call: Call) -> AsgiResponse:
    """Return Prometheus text over all worker processes."""
    content = await call.service.run_probe(shared.render)
    return AsgiResponse(content, media_type="text/plain; version=0.0.4; charset=utf-8")


@route("/v1/live", tags=["operation"], response_model=live.Live, responses=_EVENTS)
async def last_hour(call: Call, query: LiveQuery) -> AsgiResponse:
    """Return what all worker processes counted in the last hour, and how each rank is doing."""
    if query.follow == "true":
        return events(call.service, call.request, call.head)
    response = await call.service.run_probe(live.response)
    return sent(json_response(response, NO_STORE, Budget()))
