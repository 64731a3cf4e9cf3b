"""The responses that hold tokens or say where they lie, each made by one function.

The fast path and the application call the same functions with the same query and the same head. So both give
the same bytes. All raise CorpusServerError for what is out of range, unknown, too large or cannot be read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from corpus_server.admission.request import RequestHead
from corpus_server.answers.queries import BatchesQuery, FormatQuery, StepsQuery
from corpus_server.answers.response import (
    NO_STORE,
    Response,
    Slices,
    array_response,
    caching,
    json_response,
    not_modified,
    text_response,
)
from corpus_server.answers.service import Service
from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import InvalidParameter
from corpus_server.read import text, wire
from corpus_server.read.bound_plan import BoundPlan, Source
from corpus_server.read.reading import RangeReading, Reading, WindowReading, num_bytes, read_arrays
from corpus_server.readers.registry import Reader


def batches(service: Service, query: BatchesQuery, request: RequestHead) -> Slices[Response]:
    """Make the response to `/v1/batches`: the tokens of a rank, `(count, rows, seq_len + 1)`, C order."""
    bound = service.plan_of(query, request.caller)
    chosen = choose_format(request, query, default="raw")
    reading = _windows(bound, query)
    service.admission.check_size(num_bytes(reading), "count")
    service.admission.check_rows(*reading.shape[:2])
    if chosen in ("json", "text"):
        service.admission.check_text_size(reading.num_units * reading.unit_tokens, "count")
    if chosen == "text":
        for corpus in bound.corpora.values():
            text.check_available(corpus)
    headers = _step_headers(bound, query, request, "batches", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    request.charge(num_bytes(reading))
    if bound.is_staged:
        service.stager.check_order(bound)
    reader = _note(service, bound, query, request)
    yield from staged_rows(service, bound, reading)
    if chosen == "json":
        fields = {**_step_fields(bound, query), "dtype": bound.dtype.name}
        response = yield from _json_tokens(reading, fields, headers)
    elif chosen == "text":
        response = yield from _batches_as_text(bound, reading, query, headers)
    else:
        response = yield from array_response(reading, headers, chosen, query.checksum, request)
    timeline = bound.sampler.timeline
    response.source = bound.stage_sources[timeline.stage_at(timeline.plan_step(query.step)).number]
    response.num_tokens = reading.num_units * reading.unit_tokens
    response.reader, response.num_steps = reader, query.count
    return response


def indices(service: Service, query: BatchesQuery, request: RequestHead) -> Slices[Response]:
    """Make the response to `/v1/indices`: `(count, rows, 2) int64`, each row's shard and start token.

    Shard numbers count over the plan's shard list.
    """
    bound = service.plan_of(query, request.caller)
    chosen = choose_format(request, query, default="json")
    reading = _windows(bound, query)
    shape = (*reading.shape[:2], 2)
    service.admission.check_size(reading.num_units * 16, "count")
    service.admission.check_rows(*shape[:2])
    if chosen == "text":
        raise InvalidParameter(
            "indices have no format text", parameter="format", received="text", accepted="raw, npy, json"
        )
    if chosen == "json":
        service.admission.check_text_size(reading.num_units * 2, "count")
    headers = _step_headers(bound, query, request, "indices", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    request.charge(reading.num_units * 16)
    reader = _note(service, bound, query, request, reads_tokens=False)
    located = np.empty((reading.num_units, 2), dtype="<i8")
    first = 0
    for group in reading.locations():
        located[first : first + len(group)] = group
        first += len(group)
        yield None
    located = located.reshape(shape)
    if chosen == "json":
        shards = [{"corpus": name, "name": shard.name} for name, shard in bound.shards]
        fields = {**_step_fields(bound, query), "shards": shards, "indices": located}
        response = json_response(fields, headers)
    else:
        response = yield from array_response(_InMemory(located), headers, chosen, query.checksum, request)
    response.reader, response.num_steps = reader, query.count
    return response


def token_range(
    service: Service,
    corpus: Corpus,
    start: int,
    stop: int,
    query: FormatQuery,
    request: RequestHead,
    *,
    default: wire.Format,
    fields: Mapping[str, int],
) -> Slices[Response]:
    """Make the response that holds tokens [start, stop) of a corpus.

    Args:
        start, stop: corpus-wide, inside the corpus.
        default: format where the request names none.
        fields: what a JSON response says besides.
    """
    chosen = choose_format(request, query, default)
    gatherer = service.catalog.gatherer(corpus.name)
    reading = RangeReading(corpus, gatherer, start=start, stop=stop)
    service.admission.check_size(num_bytes(reading), "count")
    if chosen in ("json", "text"):
        service.admission.check_text_size(stop - start, "count")
    if chosen == "text":
        text.check_available(corpus)
    identity = f"{corpus.fingerprint}.{start}.{stop}.{_representation(query, chosen)}"
    if chosen == "text":
        headers = dict(NO_STORE)
    else:
        headers = caching(request, identity, immutable=False, varies=query.format is None)
    headers[wire.RANGE] = f"{start}-{stop}"
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    request.charge(num_bytes(reading))
    pieces = corpus.locate_range(start, stop - start)
    yield from service.staged(corpus.shards[number].file for number, _, _ in pieces)
    if chosen == "json":
        where = {"start": start, "stop": stop, "dtype": corpus.dtype.name}
        described = {"corpus": corpus.name, **fields, **where}
        response = yield from _json_tokens(reading, described, headers)
    elif chosen == "text":
        tokens = [each for part in read_arrays(reading) for each in part.tolist()]
        yield None
        response = text_response(text.decode(corpus, tokens), headers)
    else:
        response = yield from array_response(reading, headers, chosen, query.checksum, request)
    response.source, response.num_tokens = Source("", {corpus.name: 1.0}), stop - start
    return response


def choose_format(request: RequestHead, query: FormatQuery, default: wire.Format) -> wire.Format:
    """Return the format asked for, by parameter or by `Accept`."""
    return query.format or wire.negotiate(request.headers.get("accept"), default)


def plan_headers(
    bound: BoundPlan, request: RequestHead, identity: str, *, by_id: bool = True, varies: bool = False
) -> dict[str, str]:
    """Return the caching headers of a response that follows from a plan.

    Args:
        identity: what decides the response besides the plan.
        by_id: whether the URL names the plan by its id; one that spells the plan names corpora, and
            another corpus may take a name.
        varies: whether `Accept` decided its format.
    """
    headers = caching(request, f"{bound.plan.id}.{identity}", immutable=by_id, varies=varies)
    return {**headers, wire.PLAN: bound.plan.id}


class _InMemory:
    """An array as a reading, so that one function sends all arrays."""

    unit_tokens = 1

    def __init__(self, array: np.ndarray) -> None:
        self._flat = array.reshape(-1)
        self.shape = array.shape
        self.dtype = array.dtype
        self.num_units = array.size

    def read(self, first: int, num_units: int) -> np.ndarray:
        return self._flat[first : first + num_units]

    def check_unchanged(self) -> None:
        pass


def _windows(bound: BoundPlan, query: StepsQuery) -> WindowReading:
    rows = bound.sampler.check_part(
        query.step, count=query.count, rank=query.rank, world_size=query.world_size
    )
    return WindowReading(bound, step=query.step, count=query.count, rank=query.rank, rows=rows)


def _note(
    service: Service, bound: BoundPlan, query: StepsQuery, request: RequestHead, *, reads_tokens: bool = True
) -> Reader | None:
    """Note a request, so that its next steps are prefetched or staged; return the rank that asks.

    A HEAD is not noted: it takes no step, so the Live page would show one that the rank never got.
    """
    if request.method == "HEAD":
        return None
    part = {"rank": query.rank, "world_size": query.world_size}
    steps = range(query.step, query.step + query.count)
    return service.readers.note(bound, steps, reads_tokens=reads_tokens, **part)


def staged_rows(service: Service, bound: BoundPlan, reading: WindowReading) -> Slices[None]:
    """Wait until the shards that rows read are on this machine."""
    if not bound.is_staged:
        return
    service.stager.check_order(bound)
    numbers: set[int] = set()
    for group in reading.locations():
        numbers.update(np.unique(group[:, 0]).tolist())
        yield None
    yield from service.staged(bound.shards[number][1].file for number in numbers)


def _json_tokens(
    reading: Reading, fields: Mapping[str, object], headers: Mapping[str, str]
) -> Slices[Response]:
    parts = [np.empty(0, dtype=reading.dtype)]  # so that an empty range has a type
    for part in read_arrays(reading):
        parts.append(part.reshape(-1))
        yield None
    tokens = np.concatenate(parts).reshape(reading.shape)
    return json_response({**fields, "tokens": tokens}, headers)


def _batches_as_text(
    bound: BoundPlan, reading: WindowReading, query: StepsQuery, headers: Mapping[str, str]
) -> Slices[Response]:
    """Make a response that shows every row as text, below a line that says where it lies."""
    _, rows, _ = reading.shape
    lines: list[str] = []
    for number, pieces in enumerate(reading.pieces()):
        step, row = divmod(number, rows)
        name, _ = bound.shards[pieces[0][0]]
        places = "; ".join(
            f"shard {bound.shards[shard][1].name}, tokens {start} to {start + length}"
            for shard, start, length in pieces
        )
        lines.append(
            f"=== step {query.step + step} row {query.rank * rows + row}: corpus {name}, {places} ==="
        )
        (tokens,) = reading.read(number, 1)
        lines.append(text.decode(bound.corpora[name], tokens.tolist()))
        yield None
    return text_response("\n".join(lines) + "\n", headers)


def _step_headers(
    bound: BoundPlan, query: BatchesQuery, request: RequestHead, what: str, chosen: wire.Format
) -> dict[str, str]:
    identity = (
        f"{what}.{query.step}.{query.count}.{query.rank}.{query.world_size}.{_representation(query, chosen)}"
    )
    if chosen == "text":
        headers = {**NO_STORE, wire.PLAN: bound.plan.id}
    else:
        by_id = query.plan is not None
        headers = plan_headers(bound, request, identity, by_id=by_id, varies=query.format is None)
    plan_step = bound.sampler.timeline.plan_step(query.step)
    if plan_step != query.step:
        headers[wire.PLAN_STEP] = str(plan_step)
    return headers


def _step_fields(bound: BoundPlan, query: StepsQuery) -> dict[str, str | int]:
    """Return what a JSON response says first; `plan_step` only where it differs."""
    fields: dict[str, str | int] = {"plan": bound.plan.id, "step": query.step, "count": query.count}
    plan_step = bound.sampler.timeline.plan_step(query.step)
    if plan_step != query.step:
        fields["plan_step"] = plan_step
    return fields | {"rank": query.rank, "world_size": query.world_size}


def _representation(query: FormatQuery, chosen: wire.Format) -> str:
    """Return the part of a response's identity that its form decides; refuse a form that does not exist."""
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
