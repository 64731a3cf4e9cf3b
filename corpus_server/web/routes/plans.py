"""The routes of plans as documents: keep, list, describe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired

from orjson import Fragment
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response as AsgiResponse
from typing_extensions import TypedDict

from corpus_server.admission.request import RUN_PATTERN
from corpus_server.described import described_keys
from corpus_server.errors import RequestTimeout
from corpus_server.plan import Plan
from corpus_server.plan.chain import Link
from corpus_server.plan.draft import Draft
from corpus_server.plan_store.links import newest_link
from corpus_server.responses.forms import PlanDescription, plan_description
from corpus_server.responses.question import PlanId, QueryParameters, integer
from corpus_server.responses.response import Response, json_response
from corpus_server.web.responses import sent
from corpus_server.web.routes.route import Call, route
from corpus_server.work import Budget

MAX_LIST_BYTES = 8 * 2**20
"""Bytes of plan documents in one list."""

_DOCUMENT = {"anyOf": [Plan.schema(), Draft.schema(), Link.schema()]}
_PLAN_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _DOCUMENT}}}}


class PlansQuery(QueryParameters):
    """Parameters of the list of plans."""

    limit: Annotated[int, integer(1, 1000)] = 100
    """Plans, last seen first."""
    run: Annotated[str, Field(pattern=RUN_PATTERN)] | None = None
    """Only plans that a run of this name has posted, see `Corpus-Run`."""


class PostQuery(QueryParameters):
    """Parameters of a posted plan."""

    keep: Literal["true", "false"] = "true"
    """`false`: describe the plan, and do not keep it."""


@described_keys
class ListedPlan(TypedDict):
    """A plan in the list."""

    id: str
    plan: dict[str, Any]
    seen_unix_seconds: float
    runs: list[str]
    """Names of the runs that posted it, last seen first."""
    head: NotRequired[str]
    """Id of the longest plan that continues it; missing if there is none."""
    num_stages: NotRequired[int]
    """Of that one."""


@described_keys
class Plans(TypedDict):
    """The plans that were posted to a server."""

    num_plans: int
    """Plans that the server keeps; the list may hold fewer."""
    plans: list[ListedPlan]


@route("/v1/plans", method="POST", tags=["plans"], openapi_extra=_PLAN_BODY, response_model=PlanDescription)
async def post_plan(call: Call, query: PostQuery) -> AsgiResponse:
    """Keep the plan document in the body and describe the plan; posting it again changes nothing.

    Of a document with a `parent`, the description has only the stages and shards that it adds. Of one whose
    stages say epochs or tokens, `plan` has the weights and steps that they come to.
    """
    body = bytearray()
    with call.service.admission.receiving() as count:
        await _receive(call.request, body, count, call.service.settings.body_timeout_seconds)
        keep, plans = query.keep == "true", call.service.plans

        def post(budget: Budget) -> Response:
            kept = plans.keep_document(body, call.head.caller, budget, keep=keep, run=call.head.run)
            return plan_description(kept.bound, budget, kept.parent, num_steps=kept.num_steps)

        return sent(await call.run(post))


@route("/v1/plans", tags=["plans"], response_model=Plans)
async def plans(call: Call, query: PlansQuery) -> AsgiResponse:
    """List the plans that were posted to this server and whose corpora the caller may read, last seen first.

    At most `limit`, and at most 8 MiB.
    """

    def list_them(budget: Budget) -> Response:
        may_read = call.head.caller.may_read  # a plan tells the fingerprints of its corpora
        newest = call.service.store.listed(
            query.limit, run=query.run, max_bytes=MAX_LIST_BYTES, may_read=may_read
        )
        plans = [
            {
                "id": each.id,
                "plan": Fragment(each.document),
                "seen_unix_seconds": each.seen,
                "runs": each.runs,
                **head(each.id),
            }
            for each in newest
        ]
        return json_response({"num_plans": call.service.store.count(), "plans": plans}, {}, budget)

    def head(plan_id: str) -> dict[str, object]:
        newest = newest_link(call.service.store, plan_id)
        return {} if newest is None else dict(zip(("head", "num_stages"), newest, strict=True))

    return sent(await call.run(list_them))


@route("/v1/plans/{plan_id}", tags=["plans"], response_model=PlanDescription)
async def plan(call: Call, plan_id: PlanId, query: QueryParameters) -> AsgiResponse:
    """Describe a plan: its document, its sources, its shard list; of its stages the last 512."""
    service, caller = call.service, call.head.caller
    return sent(
        await call.run(lambda budget: plan_description(service.plan(plan_id, caller, budget), budget))
    )


async def _receive(request: Request, body: bytearray, count: Callable[[int], None], seconds: float) -> None:
    """Receive the whole body; one that becomes too large, or comes too slowly, holds memory no longer."""
    time = asyncio.get_running_loop().time
    deadline, chunks, look = time() + seconds, request.stream(), 0.05
    chunk: bytes | None = b""
    while chunk is not None:
        count(len(body) + len(chunk))
        body += chunk
        coming = asyncio.ensure_future(anext(chunks, None))
        try:
            # Not a timeout, which would cancel a chunk that comes in that moment: a process that was stopped
            # finds all that has come meanwhile, and its timers over. It may find these first.
            if not (await asyncio.wait({coming}, timeout=max(0.0, deadline - time())))[0]:
                once_more, look = look, 0.0  # else one that sends a byte at a time would never be refused
                await asyncio.wait({coming}, timeout=once_more)
            if not coming.done():
                raise RequestTimeout(f"the body must arrive within {seconds:g} s, {len(body)} bytes came")
            chunk = coming.result()
        finally:
            coming.cancel()
