"""The routes of training: where the rows of steps lie, and their tokens."""

from __future__ import annotations

from typing import Annotated

import xxhash
from fastapi import Query, Request
from starlette.responses import Response

from corpus_server import text, wire
from corpus_server.catalog import BoundPlan
from corpus_server.errors import InvalidParameter
from corpus_server.reading import Windows, read_all
from corpus_server.web.routes.shared import (
    ServiceHere,
    choose_format,
    json_response,
    make_router,
    not_modified,
    plan_headers,
    read_route,
    representation,
)
from corpus_server.web.schemas import BatchesQuery, StepsQuery
from corpus_server.web.service import check_part, windows_reading

router = make_router("training")


@read_route(router, "/v1/indices")
async def indices(
    request: Request, query: Annotated[BatchesQuery, Query()], service: ServiceHere
) -> Response:
    """Return for each row of a rank its shard (over the plan's shard list) and start token."""
    bound = await service.plan_of(query)
    chosen = choose_format(request, query, default="json")
    rows = check_part(bound, query)
    service.answering.check_size(query.count * rows * 16, "count")
    if chosen == "text":
        raise InvalidParameter(
            "indices have no format text", parameter="format", received="text", accepted="raw, npy, json"
        )
    if chosen == "json":
        service.answering.check_text_size(query.count * rows * 2, "count")
    headers = _headers(bound, query, "indices", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    locations = await service.answering.run(windows_reading(bound, query, rows).locations)
    if chosen == "json":
        shards = [{"corpus": name, "name": shard.name} for name, shard in bound.shards]
        return json_response(
            {**_fields(bound, query), "shards": shards, "indices": locations.tolist()}, headers
        )
    prefix = wire.npy_header(locations.shape, locations.dtype) if chosen == "npy" else b""
    content = prefix + locations.astype("<i8", copy=False).tobytes()
    headers |= wire.array_headers(locations.shape, locations.dtype)
    digest = xxhash.xxh3_64(content)
    if query.checksum == "tail":
        headers[wire.CHECKSUM] = wire.TAIL
        content += wire.checksum_tail(digest)
    elif query.checksum == "true":
        headers[wire.CHECKSUM] = wire.checksum_value(digest)
    return Response(content, headers=headers, media_type=wire.MEDIA_TYPES[chosen])


@read_route(router, "/v1/batches")
async def batches(
    request: Request, query: Annotated[BatchesQuery, Query()], service: ServiceHere
) -> Response:
    """Return the tokens of a rank: `(count, rows, seq_len + 1)`, C order, little-endian."""
    bound = await service.plan_of(query)
    chosen = choose_format(request, query, default="raw")
    rows = check_part(bound, query)
    length = bound.plan.seq_len + 1
    service.answering.check_size(query.count * rows * length * bound.dtype.itemsize, "count")
    if chosen in ("json", "text"):
        service.answering.check_text_size(query.count * rows * length, "count")
    if chosen == "text":
        for corpus in bound.corpora.values():
            text.check_available(corpus)
    headers = _headers(bound, query, "batches", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    service.read_ahead(bound, query, rows, step=query.step)
    reading = windows_reading(bound, query, rows)
    if chosen == "json":
        fields = {**_fields(bound, query), "dtype": bound.dtype.name}
        return await service.tokens_as_json(reading, fields, headers)
    if chosen == "text":
        content = await service.answering.run_admitted(lambda: _batches_as_text(bound, reading, query))
        return Response(content, headers=headers, media_type=wire.MEDIA_TYPES["text"])
    return service.answering.tokens(
        request, reading, npy=chosen == "npy", checksum=query.checksum, headers=headers
    )


def _batches_as_text(bound: BoundPlan, reading: Windows, query: StepsQuery) -> str:
    """Return every row of a batch as text under a line that says where it lies; blocks."""
    tokens = read_all(reading)
    lines = []
    for k, (step_tokens, step_locations) in enumerate(zip(tokens, reading.locations().tolist(), strict=True)):
        first_row = query.rank * len(step_locations)
        for row, (row_tokens, (shard, start)) in enumerate(zip(step_tokens, step_locations, strict=True)):
            name, at = bound.shards[shard]
            lines.append(
                f"=== step {query.step + k} row {first_row + row}: corpus {name}, shard {at.name}, "
                f"tokens {start} to {start + reading.unit_tokens} ==="
            )
            lines.append(text.decode(bound.corpora[name], row_tokens.tolist()))
    return "\n".join(lines) + "\n"


def _headers(bound: BoundPlan, query: BatchesQuery, what: str, chosen: wire.Format) -> dict[str, str]:
    identity = (
        f"{what}.{query.step}.{query.count}.{query.rank}.{query.world_size}.{representation(query, chosen)}"
    )
    headers = plan_headers(bound, identity, by_id=query.plan is not None, varies=query.format is None)
    plan_step = bound.sampler.timeline.plan_step(query.step)
    if plan_step != query.step:
        headers[wire.PLAN_STEP] = str(plan_step)
    return headers


def _fields(bound: BoundPlan, query: StepsQuery) -> dict[str, str | int]:
    """Return what a JSON answer says first; `plan_step` only where it differs."""
    fields: dict[str, str | int] = {"plan": bound.plan.id, "step": query.step, "count": query.count}
    plan_step = bound.sampler.timeline.plan_step(query.step)
    if plan_step != query.step:
        fields["plan_step"] = plan_step
    return fields | {"rank": query.rank, "world_size": query.world_size}
