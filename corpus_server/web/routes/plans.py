"""The routes of plans: keep, describe, what was used, where a token is, proof of a step."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from corpus_server.corpus import Corpus
from corpus_server.errors import InvalidParameter
from corpus_server.plan import Plan
from corpus_server.plan.lookup import look_up
from corpus_server.plan.usage import usage_between
from corpus_server.web.routes.shared import (
    Nothing,
    PlanId,
    ServiceHere,
    json_response,
    make_router,
    not_modified,
    plan_headers,
    read_route,
)
from corpus_server.web.schemas import (
    LookupAnswer,
    LookupQuery,
    PlanAnswer,
    PlansAnswer,
    PlansQuery,
    ReceiptAnswer,
    StepQuery,
    UsageAnswer,
    UsageQuery,
)

MAX_PLAN_BYTES = 32 * 2**20
"""A plan that leaves out 10^6 steps takes about 20 MB of JSON; one body costs a process no more than this."""

MAX_LIST_BYTES = 8 * 2**20

router = make_router("plans")


@router.post("/v1/plans", response_model=PlanAnswer)
async def post_plan(request: Request, query: Nothing, service: ServiceHere) -> Any:
    """Keep a plan and bind it to the corpora here; posting it again changes nothing."""
    body = await _body(request)
    content = await run_in_threadpool(lambda: service.keep(Plan.parse(body)).to_json())
    return Response(content, media_type="application/json")


@read_route(router, "/v1/plans", response_model=PlansAnswer)
async def plans(query: Annotated[PlansQuery, Query()], service: ServiceHere) -> Any:
    """List the plans this server has seen, last seen first: as many as were asked for and fit 8 MiB."""

    def list_them() -> dict[str, Any]:
        newest = service.store.newest(query.limit, max_bytes=MAX_LIST_BYTES)
        plans = [{"id": plan.id, "plan": plan.to_json(), "seen_unix_seconds": seen} for plan, seen in newest]
        return {"num_plans": service.store.count(), "plans": plans}

    return json_response(await run_in_threadpool(list_them))


@read_route(router, "/v1/plans/{plan_id}", response_model=PlanAnswer)
async def plan(plan_id: PlanId, query: Nothing, service: ServiceHere) -> Any:
    """Describe a plan: its document, its sources, its shard list."""
    bound = await service.by_id(plan_id)
    return Response(await run_in_threadpool(bound.to_json), media_type="application/json")


@read_route(router, "/v1/plans/{plan_id}/usage", response_model=UsageAnswer)
async def usage(
    request: Request, plan_id: PlanId, query: Annotated[UsageQuery, Query()], service: ServiceHere
) -> Response:
    """Return what training saw of each source before a step, or between two, and what it skipped."""
    bound = await service.by_id(plan_id)
    headers = plan_headers(bound, f"usage.{query.since}.{query.step}")
    used = await service.answering.run(lambda: usage_between(bound.sampler, query.since, query.step))
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    fields = dataclasses.asdict(used)
    skipped = {"steps": fields.pop("skipped_steps"), "sources": fields.pop("skipped")}
    return json_response(
        {"plan": plan_id, "since": query.since, "step": query.step, **fields, "skipped": skipped}, headers
    )


@read_route(router, "/v1/plans/{plan_id}/receipt", response_model=ReceiptAnswer)
async def receipt(
    request: Request, plan_id: PlanId, query: Annotated[StepQuery, Query()], service: ServiceHere
) -> Response:
    """Return the checksum of a step's whole global batch: what a resumed run must see next."""
    bound = await service.by_id(plan_id)
    headers = plan_headers(bound, f"receipt.{query.step}")
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    rows = bound.sampler.check_part(query.step)
    digest = await service.global_batch_checksum(bound, query.step, rows)
    fields = {"plan": plan_id, "step": query.step, "plan_step": bound.sampler.timeline.plan_step(query.step)}
    return json_response({**fields, "global_batch_size": rows, "digest": digest}, headers)


@read_route(router, "/v1/lookup", response_model=LookupAnswer)
async def lookup(request: Request, query: Annotated[LookupQuery, Query()], service: ServiceHere) -> Response:
    """Return every row of the first epochs that holds a token, a range of tokens or a document."""
    bound = await service.plan_of(query, names_corpus=True)
    name = _looked_up_corpus(query, bound.plan.sources)
    start, stop = _looked_up_range(query, bound.corpora[name])
    identity = f"lookup.{name}.{start}.{stop}.{query.epochs}.{query.limit}"
    headers = plan_headers(bound, identity, by_id=query.plan is not None)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    found = await service.answering.run_admitted(
        lambda: look_up(bound.sampler, name, start, stop, epochs=query.epochs)
    )
    fields = {"plan": bound.plan.id, "corpus": name, "start": start, "stop": stop, "epochs": query.epochs}
    rows = [dataclasses.asdict(each) for each in found[: query.limit]]
    return json_response(
        {**fields, "num_found": len(found), "truncated": len(found) > len(rows), "rows": rows}, headers
    )


def _looked_up_corpus(query: LookupQuery, sources: tuple[str, ...]) -> str:
    if query.corpus in sources:
        return query.corpus
    if query.corpus is None and len(sources) == 1:
        return sources[0]
    raise InvalidParameter(
        f"corpus must name a source of the plan, {', '.join(sources)}, got {query.corpus!r}",
        parameter="corpus",
        received=query.corpus,
        accepted=", ".join(sources),
    )


def _looked_up_range(query: LookupQuery, corpus: Corpus) -> tuple[int, int]:
    """Return the tokens that a query names in one of its three ways."""
    ways = {
        "token": query.token is not None,
        "document": query.document is not None,
        "start and stop": query.start is not None or query.stop is not None,
    }
    given = [way for way, is_given in ways.items() if is_given]
    if len(given) != 1:
        raise InvalidParameter(
            f"name what to look up by one of {', '.join(ways)}, got {' and '.join(given) or 'none'}",
            parameter="token",
            accepted=", ".join(ways),
        )
    if query.document is not None:
        return corpus.document_range(query.document)
    start, stop = (query.start, query.stop) if query.token is None else (query.token, query.token + 1)
    if start is None or stop is None or not start < stop <= corpus.num_tokens:
        raise InvalidParameter(
            f"tokens must lie in [0, {corpus.num_tokens}) with start < stop, got start {start}, stop {stop}",
            parameter="token" if query.token is not None else "stop",
            received=stop,
            accepted=f"0 <= start < stop <= {corpus.num_tokens}",
        )
    return start, stop


async def _body(request: Request) -> bytearray:
    """Return the whole body, refused as soon as it is known to be too large: by its announced length, or
    while it comes in chunks.

    What a refused client still sends is thrown away, so that it gets to read the refusal.
    """
    body = bytearray()
    if int(request.headers.get("content-length", "0")) <= MAX_PLAN_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_PLAN_BYTES:
                break
        else:
            return body
    raise HTTPException(413, f"a plan holds at most {MAX_PLAN_BYTES} bytes")
