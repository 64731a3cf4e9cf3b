"""The routes: parse, call the core, answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from corpus_server import text, wire
from corpus_server.catalog import BoundPlan
from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan import Plan
from corpus_server.reading import Reading, TokenRange, Windows, num_bytes, read_all
from corpus_server.web import metrics
from corpus_server.web.problems import problem
from corpus_server.web.schemas import (
    BatchesQuery,
    CorporaAnswer,
    CorpusAnswer,
    FormatQuery,
    NoQuery,
    PlanAnswer,
    PlansAnswer,
    PlansQuery,
    Problem,
    StepsQuery,
    TokensQuery,
)
from corpus_server.web.service import Service, check_part, locate

MAX_PLAN_BYTES = 32 * 2**20
"""A plan that leaves out 10^6 steps takes about 20 MB of JSON; one body costs a process no more than this."""

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])

router = APIRouter(
    responses={
        422: {"model": Problem, "description": "A parameter is outside its range."},
        404: {"model": Problem, "description": "Known to be absent."},
        503: {"model": Problem, "description": "A shard changed or could not be read, or too busy."},
    }
)


def _read(path: str, **options: Any) -> Callable[[_Endpoint], _Endpoint]:
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
Nothing = Annotated[NoQuery, Query()]  # probes and scrapers may add parameters, those under /v1 may not


@_read("/healthz", tags=["operation"])
async def health() -> dict[str, str]:
    """Answer as long as the process lives."""
    return {"status": "alive"}


@_read("/readyz", tags=["operation"])
async def readiness(service: ServiceHere) -> Response:
    """Answer 200 while every corpus is as it was opened and plans can be kept, else 503."""
    failure = await run_in_threadpool(service.why_not_ready)
    if failure is not None:
        return problem(503, "not-ready", failure)
    return _json({"status": "ready", "corpora": list(service.catalog.corpora)}, cached=False)


@_read("/metrics", tags=["operation"])
async def prometheus() -> Response:
    """Return Prometheus text over all worker processes."""
    content = await run_in_threadpool(metrics.render)
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


@_read("/v1/corpora", tags=["corpora"], response_model=CorporaAnswer)
async def corpora(query: Nothing, service: ServiceHere) -> Any:
    """Describe all corpora."""
    return {"corpora": [corpus.describe() for corpus in service.catalog.corpora.values()]}


@_read("/v1/corpora/{name}", tags=["corpora"], response_model=CorpusAnswer)
async def corpus(name: CorpusName, query: Nothing, service: ServiceHere) -> Any:
    """Describe one corpus."""
    return service.catalog.corpus(name).describe()


@_read("/v1/corpora/{name}/tokens", tags=["corpora"])
async def tokens(
    request: Request, name: CorpusName, query: Annotated[TokensQuery, Query()], service: ServiceHere
) -> Response:
    """Return a raw range of tokens, corpus-wide, over the borders of shards."""
    corpus = service.catalog.corpus(name)
    available = max(0, corpus.num_tokens - query.start)
    count = min(256, available) if query.count is None else query.count
    if query.start > corpus.num_tokens or count > available:
        raise InvalidParameter(
            f"start + count must be at most {corpus.num_tokens}, the tokens of corpus {name!r}, "
            f"got {query.start} + {count}",
            parameter="count",
            received=count,
            accepted=f"start + count <= {corpus.num_tokens}",
        )
    return await _range(request, service, name, query.start, query.start + count, query, default="raw")


@_read("/v1/corpora/{name}/documents/{number}", tags=["corpora"])
async def document(
    request: Request,
    name: CorpusName,
    number: Annotated[str, Path(pattern="^[0-9]{1,19}$")],
    query: Annotated[FormatQuery, Query()],
    service: ServiceHere,
) -> Response:
    """Return one document: its token range and its tokens."""
    start, stop = service.catalog.corpus(name).document_range(int(number))
    fields = {"document": int(number)}
    return await _range(request, service, name, start, stop, query, default="json", fields=fields)


@router.post("/v1/plans", tags=["plans"], response_model=PlanAnswer)
async def post_plan(request: Request, query: Nothing, service: ServiceHere) -> Any:
    """Keep a plan and bind it to the corpora here; posting it again changes nothing."""
    body = await _body(request)
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise InvalidPlan(f"the body must be a plan document in JSON: {error}") from error
    bound = await run_in_threadpool(lambda: service.keep(Plan.from_json(parsed)))
    return Response(await run_in_threadpool(bound.to_json), media_type="application/json")


@_read("/v1/plans", tags=["plans"], response_model=PlansAnswer)
async def plans(query: Annotated[PlansQuery, Query()], service: ServiceHere) -> Any:
    """List the plans this server has seen, last seen first."""
    newest = await run_in_threadpool(service.store.newest, query.limit)
    return {
        "plans": [{"id": plan.id, "plan": plan.to_json(), "seen_unix_seconds": seen} for plan, seen in newest]
    }


@_read("/v1/plans/{plan_id}", tags=["plans"], response_model=PlanAnswer)
async def plan(
    plan_id: Annotated[str, Path(pattern="^[0-9a-f]{64}$")], query: Nothing, service: ServiceHere
) -> Any:
    """Describe a plan: its document, its sources, its shard list."""
    bound = await service.by_id(plan_id)
    return Response(await run_in_threadpool(bound.to_json), media_type="application/json")


@_read("/v1/indices", tags=["training"])
async def indices(
    request: Request, query: Annotated[BatchesQuery, Query()], service: ServiceHere
) -> Response:
    """Return for each row of a rank its shard (over the plan's shard list) and start token."""
    bound = await service.plan_of(query)
    chosen = _format(request, query, default="json")
    rows = check_part(bound, query)
    service.answering.check_size(query.count * rows * 16, "count")
    if chosen == "text":
        raise InvalidParameter(
            "indices have no format text", parameter="format", received="text", accepted="raw, npy, json"
        )
    if chosen == "json":
        service.answering.check_text_size(query.count * rows * 2, "count")
    headers = _steps_headers(bound, query, "indices", chosen)
    if (unchanged := _not_modified(request, headers)) is not None:
        return unchanged
    locations = await service.answering.run(partial(locate, bound, query))
    if chosen == "json":
        fields = {"plan": bound.plan.id, "step": query.step, "count": query.count}
        fields |= {"rank": query.rank, "world_size": query.world_size}
        shards = [{"corpus": name, "name": shard.name} for name, shard in bound.shards]
        return _json({**fields, "shards": shards, "indices": locations.tolist()}, headers)
    prefix = wire.npy_header(locations.shape, locations.dtype) if chosen == "npy" else b""
    content = prefix + locations.astype("<i8", copy=False).tobytes()
    headers |= wire.array_headers(locations.shape, locations.dtype)
    if query.checksum == "true":
        headers[wire.CHECKSUM] = wire.checksum_of(content)
    return Response(content, headers=headers, media_type=wire.MEDIA_TYPES[chosen])


@_read("/v1/batches", tags=["training"])
async def batches(
    request: Request, query: Annotated[BatchesQuery, Query()], service: ServiceHere
) -> Response:
    """Return the tokens of a rank: `(count, rows, seq_len + 1)`, C order, little-endian."""
    bound = await service.plan_of(query)
    chosen = _format(request, query, default="raw")
    rows = check_part(bound, query)
    length = bound.plan.seq_len + 1
    service.answering.check_size(query.count * rows * length * bound.dtype.itemsize, "count")
    if chosen in ("json", "text"):
        service.answering.check_text_size(query.count * rows * length, "count")
    if chosen == "text":
        for corpus in bound.corpora.values():
            text.check_available(corpus)
    headers = _steps_headers(bound, query, "batches", chosen)
    if (unchanged := _not_modified(request, headers)) is not None:
        return unchanged
    reading = Windows(
        gatherer=bound.gatherer,
        locate=partial(locate, bound, query),
        count=query.count,
        rows=rows,
        length=length,
        dtype=bound.dtype,
    )
    if chosen == "json":
        fields = {"plan": bound.plan.id, "step": query.step, "count": query.count, "rank": query.rank}
        fields |= {"world_size": query.world_size, "dtype": bound.dtype.name}
        return await _tokens_as_json(service, reading, fields, headers)
    if chosen == "text":
        content = await service.answering.run_admitted(lambda: _batches_as_text(bound, reading, query))
        return Response(content, headers=headers, media_type=wire.MEDIA_TYPES["text"])
    checksummed = query.checksum == "true"
    return await service.answering.tokens(
        request, reading, npy=chosen == "npy", checksummed=checksummed, headers=headers
    )


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


async def _range(
    request: Request,
    service: Service,
    name: str,
    start: int,
    stop: int,
    query: FormatQuery,
    *,
    default: wire.Format,
    fields: dict[str, int] | None = None,
) -> Response:
    """Answer tokens [start, stop) of a corpus in the format asked for."""
    corpus = service.catalog.corpus(name)
    chosen = _format(request, query, default)
    reading = TokenRange(corpus=corpus, gatherer=service.catalog.gatherer(name), start=start, stop=stop)
    service.answering.check_size(num_bytes(reading), "count")
    if chosen in ("json", "text"):
        service.answering.check_text_size(stop - start, "count")
    if chosen == "text":
        text.check_available(corpus)
    headers = _headers(f"{corpus.fingerprint}.{start}.{stop}.{chosen}", query)
    headers[wire.RANGE] = f"{start}-{stop}"
    if (unchanged := _not_modified(request, headers)) is not None:
        return unchanged
    if chosen == "json":
        described = {
            "corpus": name,
            **(fields or {}),
            "start": start,
            "stop": stop,
            "dtype": corpus.dtype.name,
        }
        return await _tokens_as_json(service, reading, described, headers)
    if chosen == "text":
        content = await service.answering.run_admitted(
            lambda: text.decode(corpus, read_all(reading).tolist())
        )
        return Response(content, headers=headers, media_type=wire.MEDIA_TYPES["text"])
    return await service.answering.tokens(
        request, reading, npy=chosen == "npy", checksummed=query.checksum == "true", headers=headers
    )


async def _tokens_as_json(
    service: Service, reading: Reading, fields: dict[str, Any], headers: dict[str, str]
) -> Response:
    content = await service.answering.run_admitted(
        lambda: _encode({**fields, "tokens": read_all(reading).tolist()})
    )
    return Response(content, headers=headers, media_type=wire.MEDIA_TYPES["json"])


def _batches_as_text(bound: BoundPlan, reading: Windows, query: StepsQuery) -> str:
    """Return every row of a batch as text under a line that says where it lies; blocks."""
    tokens = read_all(reading)
    lines = []
    for k, (step_tokens, step_locations) in enumerate(zip(tokens, reading.locations.tolist(), strict=True)):
        first_row = query.rank * len(step_locations)
        for row, (row_tokens, (shard, start)) in enumerate(zip(step_tokens, step_locations, strict=True)):
            name, at = bound.shards[shard]
            lines.append(
                f"=== step {query.step + k} row {first_row + row}: corpus {name}, shard {at.name}, "
                f"tokens {start} to {start + reading.length} ==="
            )
            lines.append(text.decode(bound.corpora[name], row_tokens.tolist()))
    return "\n".join(lines) + "\n"


def _format(request: Request, query: FormatQuery, default: wire.Format) -> wire.Format:
    return query.format or wire.negotiate(request.headers.get("accept"), default)


def _headers(identity: str, query: FormatQuery) -> dict[str, str]:
    """Return the headers that make an answer immutable; `identity` decides every byte of it."""
    headers = {"ETag": f'"{identity}"', "Cache-Control": wire.CACHE_CONTROL}
    if query.format is None:
        headers["Vary"] = "Accept"
    return headers


def _steps_headers(bound: BoundPlan, query: BatchesQuery, what: str, chosen: wire.Format) -> dict[str, str]:
    identity = f"{bound.plan.id}.{what}.{query.step}.{query.count}.{query.rank}.{query.world_size}.{chosen}"
    return {**_headers(identity, query), wire.PLAN: bound.plan.id}


def _not_modified(request: Request, headers: dict[str, str]) -> Response | None:
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


def _json(value: object, headers: dict[str, str] | None = None, *, cached: bool = True) -> Response:
    extra = {} if cached else {"Cache-Control": "no-store"}
    return Response(_encode(value), headers={**(headers or {}), **extra}, media_type="application/json")


def _encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return fields


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
