"""What all routes share: registration, the service, formats, conditions, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from corpus_server import wire
from corpus_server.catalog import BoundPlan
from corpus_server.errors import InvalidParameter
from corpus_server.web.schemas import FormatQuery, NoQuery, Problem
from corpus_server.web.service import Service

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


def make_router(tag: str) -> APIRouter:
    """Return a router whose routes may answer with problem documents."""
    return APIRouter(
        tags=[tag],
        responses={
            422: {"model": Problem, "description": "A parameter is outside its range."},
            404: {"model": Problem, "description": "Known to be absent."},
            503: {"model": Problem, "description": "A shard changed or could not be read, or too busy."},
        },
    )


def read_route(router: APIRouter, path: str, **options: Any) -> Callable[[_Endpoint], _Endpoint]:
    """Register an endpoint for GET and HEAD.

    The first route answers both; the second is only its description, in which an operation of two
    methods would have one id twice.
    """

    def register(endpoint: _Endpoint) -> _Endpoint:
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False, **options)
        router.add_api_route(path, endpoint, methods=["GET"], **options)
        return endpoint

    return register


async def _service(request: Request) -> Service:
    # A coroutine although it waits for nothing: FastAPI runs plain functions in a thread.
    return cast("Service", request.app.state.service)


ServiceHere = Annotated[Service, Depends(_service)]
CorpusName = Annotated[str, Path(max_length=128)]
PlanId = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
Nothing = Annotated[NoQuery, Query()]  # probes and scrapers may add parameters, those under /v1 may not


def choose_format(request: Request, query: FormatQuery, default: wire.Format) -> wire.Format:
    """Return the format asked for, by parameter or by `Accept`."""
    return query.format or wire.negotiate(request.headers.get("accept"), default)


def representation(query: FormatQuery, chosen: wire.Format) -> str:
    """Return the part of an answer's identity that its form decides.

    Raises:
        InvalidParameter: the form does not exist.
    """
    if query.checksum != "tail":
        return chosen
    if chosen != "raw":
        raise InvalidParameter(
            f"checksum=tail needs format raw, got {chosen}",
            parameter="checksum",
            received="tail",
            accepted="'true' or 'false' with this format",
        )
    return "raw+tail"


def caching(identity: str, *, immutable: bool, varies: bool = False) -> dict[str, str]:
    """Return the headers by which an answer may be kept.

    Args:
        identity: decides every byte of the answer.
        immutable: whether the URL will mean the same identity for ever.
        varies: whether `Accept` decided its format.
    """
    control = wire.IMMUTABLE if immutable else wire.REVALIDATED
    headers = {"ETag": f'"{identity}"', "Cache-Control": control}
    if varies:
        headers["Vary"] = "Accept"
    return headers


def plan_headers(
    bound: BoundPlan, identity: str, *, by_id: bool = True, varies: bool = False
) -> dict[str, str]:
    """Return the headers of an answer that follows from a plan.

    Args:
        by_id: whether the URL names the plan by its id, and is not spelled with names of corpora.
    """
    headers = caching(f"{bound.plan.id}.{identity}", immutable=by_id, varies=varies)
    return {**headers, wire.PLAN: bound.plan.id}


def not_modified(request: Request, headers: Mapping[str, str]) -> Response | None:
    """Return 304 if the caller holds the answer already; nothing is read for it.

    Only after all parameters were checked: a condition is ignored where the answer without it would be
    an error (RFC 9110, 13.2.1).
    """
    given = request.headers.get("if-none-match")
    if given is None:
        return None
    tags = {tag.strip().removeprefix("W/") for tag in given.split(",")}
    if headers["ETag"] in tags or "*" in tags:
        return Response(status_code=304, headers=headers)
    return None


def json_response(value: object, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(encode(value), headers=headers, media_type="application/json")


def encode(value: object) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
