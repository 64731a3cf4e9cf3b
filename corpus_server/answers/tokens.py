"""The responses that hold tokens or say where they lie, and the query parameters that ask for them.

The fast path and the application call the same functions with the same query and the same head. So both give
the same bytes. All raise CorpusServerError for what is out of range, unknown, too large or cannot be read.

Numbers in a query are decimal digits and nothing else: no sign, no `1e3`, no `true`, so that a typing error
never trains on something else. Unknown and repeated parameters are refused for the same reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise, permutations
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import parse_qsl

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from corpus_server import metrics
from corpus_server.admission.request import Caller, RequestHead
from corpus_server.answers.arrays import array_response
from corpus_server.answers.response import (
    NO_STORE,
    PLAN_HEADER,
    PLAN_STEP_HEADER,
    RANGE_HEADER,
    ChecksumPlace,
    Format,
    Response,
    Slices,
    caching,
    json_response,
    negotiate,
    not_modified,
    text_response,
)
from corpus_server.answers.service import Service
from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import InvalidParameter
from corpus_server.plan.declared import Schema
from corpus_server.plan.document import INLINE_PLAN
from corpus_server.plan.rows import NO_SHARD
from corpus_server.plan.stage import MAX_STEP
from corpus_server.read import text
from corpus_server.read.beside import BESIDE, ROWS
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.reading import RangeReading, Reading, WindowReading, num_bytes, read_arrays
from corpus_server.readers.registry import Reader

MAX_COUNT = 4096
MAX_WORLD_SIZE = 2**20
_DIGITS = re.compile(r"[0-9]{1,20}", re.ASCII)


class Integer:
    """Metadata of an integer parameter in [low, high], spelled in decimal digits."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Parse strings of digits only."""
        return core_schema.no_info_plain_validator_function(self._parse)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the range."""
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def _parse(self, value: object) -> int:
        if isinstance(value, str) and _DIGITS.fullmatch(value) and self.low <= int(value) <= self.high:
            return int(value)
        accepted = f"an integer in [{self.low}, {self.high}]"
        raise PydanticCustomError("integer", "must be {accepted}", {"accepted": accepted})


class Names:
    """Metadata of a text parameter: some of `known`, each once, with commas between them."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = tuple(known)

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept known names only."""
        return core_schema.no_info_plain_validator_function(self._parse)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the names."""
        some = (permutations(self.known, count + 1) for count in range(len(self.known)))
        return {"type": "string", "enum": [",".join(each) for each in chain.from_iterable(some)]}

    def _parse(self, value: object) -> str:
        names = value.split(",") if isinstance(value, str) else []
        if isinstance(value, str) and set(names) <= set(self.known) and len(set(names)) == len(names):
            return value
        accepted = f"some of {', '.join(self.known)}, each once, with commas between them"
        raise PydanticCustomError("names", "must be {accepted}", {"accepted": accepted})


Step = Annotated[int, Integer(0, MAX_STEP)]
Token = Annotated[int, Integer(0, 2**63 - 1)]


class QueryParameters(BaseModel):
    """Base of all query parameters: only the declared ones, each a string, described below its name."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FormatQuery(QueryParameters):
    """Parameters of a route that answers tokens."""

    format: Format | None = None
    """Format of the body; without it the `Accept` header decides."""
    checksum: ChecksumPlace = "true"
    """Place of the checksum. `true`: in `Corpus-Checksum`; everything is read before the first byte is sent.
    `tail`: the last 8 bytes of the body (raw only). `false`: none."""


class TokensQuery(FormatQuery):
    """Parameters of a raw range."""

    start: Token = 0
    """First token, corpus-wide."""
    count: Token | None = None
    """Tokens; default: up to 256, as many as there are."""


def _parameter(schema: Schema) -> tuple[Any, Any]:
    """Return the annotation and the field of a parameter that may be left out."""
    annotation: Any = str
    if schema.get("type") == "integer":
        annotation = Annotated[int, Integer(schema["minimum"], schema["maximum"])]
    elif "enum" in schema:
        annotation = Literal[tuple(schema["enum"])]
    return annotation | None, Field(
        None, description=schema["description"], max_length=schema.get("maxLength")
    )


class PlanQuery(QueryParameters):
    """A plan by its id, or spelled inline, by parameters that `corpus_server.plan.document` declares."""

    plan: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description=f"Id of a plan; without it, {', '.join(INLINE_PLAN)} spell one."
    )
    corpus: str | None = None


if not TYPE_CHECKING:
    spelled = {name: _parameter(schema) for name, schema in INLINE_PLAN.items()}
    PlanQuery = create_model("PlanQuery", __base__=PlanQuery, **spelled)


class StepsQuery(PlanQuery):
    """Parameters of a rank's share of consecutive steps."""

    step: Step
    """First training step."""
    count: Annotated[int, Integer(1, MAX_COUNT)] = 1
    """Consecutive steps."""
    rank: Annotated[int, Integer(0, MAX_WORLD_SIZE - 1)] = 0
    """Whose rows; in [0, world_size)."""
    world_size: Annotated[int, Integer(1, MAX_WORLD_SIZE)] = 1
    """Number of ranks; must divide the global batch."""


class BatchesQuery(StepsQuery, FormatQuery):
    """Parameters of batches and indices."""

    beside: Annotated[str, Names(BESIDE)] | None = Field(None, alias="with")
    """Arrays to send behind the first one (raw and json only), as `Corpus-Arrays` describes them. `sources`:
    `(count, rows) uint16`, the number of each row's source in the plan's `sources`. `loss_mask`:
    `(count, rows, seq_len + 1) uint8`, 0 where a corpus's mask leaves the token out of the loss and in the
    unused end of a row, else 1. `rows`: `(count, rows) uint32`, the number of each row in the global
    batch."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names in `with`."""
        return tuple(self.beside.split(",")) if self.beside else ()


def parameters(query_string: bytes) -> dict[str, str]:
    """Return the parameters of a query string.

    Raises:
        InvalidParameter: one is given twice, and it cannot be known which was meant.
    """
    pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True)
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name in counts if counts[name] > 1)
        raise InvalidParameter(f"{repeated} is given twice", parameter=repeated)
    return found


def plan_of(service: Service, query: PlanQuery, caller: Caller, *, names_corpus: bool = False) -> BoundPlan:
    """Return the plan that a query names by its id or spells inline; may read the disk.

    Args:
        names_corpus: whether `corpus` means something else where the plan is named by its id.
    """
    given = {name: getattr(query, name, None) for name in INLINE_PLAN}
    spelling = {name: value for name, value in given.items() if value is not None}
    if query.plan is None:
        return service.plans.spelled(spelling, caller)
    if wrong := [name for name in spelling if not (names_corpus and name == "corpus")]:
        raise InvalidParameter(
            f"plan names the whole plan; leave out {', '.join(wrong)}",
            parameter=wrong[0],
            remedy="name a plan by its id or spell it inline, not both",
        )
    return service.plan(query.plan, caller)


def batches(service: Service, query: BatchesQuery, request: RequestHead) -> Slices[Response]:
    """Make the response to `/v1/batches`: the tokens of a rank, `(count, rows, seq_len + 1)`, C order."""
    bound = plan_of(service, query, request.caller)
    chosen = choose_format(request, query, default="raw")
    reading = _windows(bound, query)
    beside = _beside(query, reading, chosen)
    size = num_bytes(reading, *beside.values())
    service.admission.check_size(size, "count")
    service.admission.check_rows(query.count, reading.step_rows)
    _check_text(service, chosen, bound.corpora.values(), reading, *beside.values())
    headers = _step_headers(bound, query, request, "batches", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    request.charge(size)
    if bound.is_staged:
        service.stager.check_order(bound)
    reader = _note(service, bound, query, request)
    yield from staged_rows(service, bound, reading)
    if chosen == "json":
        fields = {**_step_fields(bound, query), "dtype": bound.dtype.name}
        response = yield from _json_arrays(fields, headers, {"tokens": reading, **beside})
    elif chosen == "text":
        response = yield from _batches_as_text(bound, reading, query, headers)
    else:
        response = yield from array_response(reading, headers, chosen, query.checksum, request, beside)
    num_tokens = reading.num_units * reading.unit_tokens
    response.when_sent(metrics.count_tokens, bound.source_of(query.step), num_tokens, request.run)
    response.reader, response.num_steps = reader, query.count
    return response


def indices(service: Service, query: BatchesQuery, request: RequestHead) -> Slices[Response]:
    """Make the response to `/v1/indices`: where the rows lie. Shard numbers count over the plan's shard list.

    Windows: `(count, rows, 2) int64`, shard and start token of each row.
    Rows of several pieces: `(pieces, 4) int64`, row (from 0 on), shard, start token, tokens of each piece.
    A piece of `NO_SHARD` fills the end of a row with the token id in place of its start.
    """
    bound = plan_of(service, query, request.caller)
    chosen = choose_format(request, query, default="json")
    reading = _windows(bound, query)
    are_windows, shape = bound.sampler.is_window, reading.shape[:2]
    numbers = 2 if are_windows else 4  # of each piece; a row has at least one
    beside = _beside(query, reading, chosen)
    beside_bytes = num_bytes(*beside.values())
    service.admission.check_size(reading.num_units * numbers * 8 + beside_bytes, "count")
    service.admission.check_rows(query.count, reading.step_rows)
    if chosen == "text":
        raise InvalidParameter(
            "indices have no format text", parameter="format", received="text", accepted="raw, npy, json"
        )
    if chosen == "json":
        service.admission.check_text_size(reading.num_units * numbers + _num_items(*beside.values()), "count")
    headers = _step_headers(bound, query, request, "indices", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    if are_windows:
        request.charge(reading.num_units * 16 + beside_bytes)
    reader = _note(service, bound, query, request, reads_tokens=False)
    located = yield from _located(service, reading, numbers)
    if are_windows:
        located = located.reshape(*shape, numbers)
    else:
        request.charge(located.nbytes + beside_bytes)
    places = _InMemory(located)
    if any(BESIDE[name].reads_files for name in beside):
        yield from staged_rows(service, bound, reading)
    if chosen == "json":
        service.admission.check_text_size(_num_items(places, *beside.values()), "count")
        shards = [{"corpus": name, "name": shard.name} for name, shard in bound.shards]
        fields = {**_step_fields(bound, query), "shards": shards}
        response = yield from _json_arrays(fields, headers, {"indices": places, **beside})
    else:
        response = yield from array_response(places, headers, chosen, query.checksum, request, beside)
    response.reader, response.num_steps = reader, query.count
    return response


def _located(service: Service, reading: WindowReading, numbers: int) -> Slices[np.ndarray]:
    """Return what `indices` says of each piece, `(pieces, numbers) int64`; 2 numbers of windows, else 4."""
    located = np.empty((reading.num_units, numbers), dtype="<i8")
    first = num_rows = 0
    for pieces, borders in reading.pieces():
        stop, rows = first + len(pieces), np.arange(num_rows, num_rows + len(borders) - 1)
        num_rows += len(rows)
        service.admission.check_size(stop * numbers * 8, "count")
        if numbers == 2:
            located[first:stop] = pieces[:, :2]
        else:
            located.resize((stop + reading.num_units - num_rows, numbers), refcheck=False)
            located[first:stop, 0] = np.repeat(rows, np.diff(borders))
            located[first:stop, 1:] = pieces
        first = stop
        yield None
    return located


def token_range(
    service: Service,
    corpus: Corpus,
    start: int,
    stop: int,
    query: FormatQuery,
    request: RequestHead,
    *,
    default: Format,
    fields: Mapping[str, Any],
    tag: str = "",
) -> Slices[Response]:
    """Make the response that holds tokens [start, stop) of a corpus.

    Args:
        start, stop: corpus-wide, inside the corpus.
        default: format where the request names none.
        fields: what a JSON response says besides.
        tag: tells what they say apart from what they said before, if the corpus's fingerprint does not.
    """
    chosen = choose_format(request, query, default)
    gatherer = service.catalog.gatherer(corpus.name)
    reading = RangeReading(corpus, gatherer, start=start, stop=stop)
    service.admission.check_size(num_bytes(reading), "count")
    _check_text(service, chosen, [corpus], reading)
    identity = f"{corpus.fingerprint}.{start}.{stop}.{_representation(query, chosen)}"
    identity += f".{tag}" if tag else ""
    if chosen == "text":
        headers = dict(NO_STORE)
    else:
        headers = caching(request, identity, immutable=False, varies=query.format is None)
    headers[RANGE_HEADER] = f"{start}-{stop}"
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    request.charge(num_bytes(reading))
    pieces = corpus.locate_range(start, stop - start)
    yield from service.staged(corpus.shards[number].file for number, _, _ in pieces)
    if chosen == "json":
        where = {"start": start, "stop": stop, "dtype": corpus.dtype.name}
        described = {"corpus": corpus.name, **fields, **where}
        response = yield from _json_arrays(described, headers, {"tokens": reading})
    elif chosen == "text":
        tokens = [each for part in read_arrays(reading) for each in part.tolist()]
        yield None
        response = text_response(text.decode(corpus, tokens), headers)
    else:
        response = yield from array_response(reading, headers, chosen, query.checksum, request)
    response.when_sent(metrics.TOKENS.add, stop - start, corpus.name)
    return response


def choose_format(request: RequestHead, query: FormatQuery, default: Format) -> Format:
    """Return the format asked for, by parameter or by `Accept`."""
    return query.format or negotiate(request.headers.get("accept"), default)


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
    return {**headers, PLAN_HEADER: bound.plan.id}


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


def _beside(query: BatchesQuery, reading: WindowReading, chosen: Format) -> dict[str, Reading]:
    """Return the arrays that a request wants beside the first one; refuse a format that cannot hold them."""
    if query.arrays and chosen not in ("raw", "json"):
        raise InvalidParameter(
            f"with={query.beside} needs format raw or json, got {chosen}",
            parameter="with",
            received=query.beside,
            accepted="nothing with this format",
        )
    names = query.arrays
    if chosen == "json" and reading.bound.plan.rows.balance_ranks and ROWS not in names:
        names = (*names, ROWS)  # nobody could tell from rank and world_size
    return {name: BESIDE[name].make(reading) for name in names}


def _num_items(*readings: Reading) -> int:
    return sum(reading.num_units * reading.unit_tokens for reading in readings)


def _check_text(service: Service, chosen: Format, corpora: Iterable[Corpus], *readings: Reading) -> None:
    if chosen in ("json", "text"):
        service.admission.check_text_size(_num_items(*readings), "count")
    if chosen == "text":
        for corpus in corpora:
            text.check_available(corpus)


def _windows(bound: BoundPlan, query: StepsQuery) -> WindowReading:
    step, count, rank, world_size = query.step, query.count, query.rank, query.world_size
    rows = bound.sampler.check_part(step, count=count, rank=rank, world_size=world_size)
    return WindowReading(bound, step=step, count=count, rank=rank, rows=rows, world_size=world_size)


def _note(
    service: Service, bound: BoundPlan, query: StepsQuery, request: RequestHead, *, reads_tokens: bool = True
) -> Reader | None:
    """Note a request, so that its next steps are prefetched or staged; return the rank that asks.

    A HEAD is not noted: it takes no step, so the Live page would show one that the rank never got.
    """
    if request.method == "HEAD":
        return None
    return service.readers.note(
        bound,
        range(query.step, query.step + query.count),
        rank=query.rank,
        world_size=query.world_size,
        reads_tokens=reads_tokens,
        run=request.run,
        trained_step=request.trained_step,
    )


def staged_rows(service: Service, bound: BoundPlan, reading: WindowReading) -> Slices[None]:
    """Wait until the shards that rows read are on this machine."""
    if not bound.is_staged:
        return
    service.stager.check_order(bound)
    numbers: set[int] = set()
    for pieces, _ in reading.pieces():
        numbers.update(np.unique(pieces[:, 0]).tolist())
        yield None
    numbers.discard(NO_SHARD)
    yield from service.staged(file for number in numbers for file in bound.staged[number])


def _json_arrays(
    fields: Mapping[str, object], headers: Mapping[str, str], readings: Mapping[str, Reading]
) -> Slices[Response]:
    """Make a response that holds arrays as nested lists, by name."""
    arrays = {}
    for name, reading in readings.items():
        parts = [np.empty(0, dtype=reading.dtype)]  # so that an empty range has a type
        for part in read_arrays(reading):
            parts.append(part.reshape(-1))
            yield None
        arrays[name] = np.concatenate(parts).reshape(reading.shape)
    return json_response({**fields, **arrays}, headers)


def _batches_as_text(
    bound: BoundPlan, reading: WindowReading, query: StepsQuery, headers: Mapping[str, str]
) -> Slices[Response]:
    """Make a response that shows every row as text, below a line that says where it lies."""
    _, rows, _ = reading.shape
    lines: list[str] = []
    number = 0
    for group, borders in reading.pieces():
        numbers = reading.row_numbers(number, len(borders) - 1).tolist()
        for row, (low, high) in zip(numbers, pairwise(borders.tolist()), strict=True):
            pieces = [piece for piece in group[low:high].tolist() if piece[0] != NO_SHARD]
            name, _ = bound.shards[pieces[0][0]]
            places = "; ".join(
                f"shard {bound.shards[shard][1].name}, tokens {start} to {start + length}"
                for shard, start, length in pieces
            )
            step = query.step + number // rows
            lines.append(f"=== step {step} row {row}: corpus {name}, {places} ===")
            (tokens,) = reading.read(number, 1)
            lines.append(text.decode(bound.corpora[name], tokens.tolist()))
            number += 1
            yield None
    return text_response("\n".join(lines) + "\n", headers)


def _step_headers(
    bound: BoundPlan, query: BatchesQuery, request: RequestHead, what: str, chosen: Format
) -> dict[str, str]:
    form = "+".join((_representation(query, chosen), *query.arrays))
    identity = f"{what}.{query.step}.{query.count}.{query.rank}.{query.world_size}.{form}"
    if chosen == "text":
        headers = {**NO_STORE, PLAN_HEADER: bound.plan.id}
    else:
        by_id = query.plan is not None
        headers = plan_headers(bound, request, identity, by_id=by_id, varies=query.format is None)
    plan_step = bound.sampler.timeline.plan_step(query.step)
    if plan_step != query.step:
        headers[PLAN_STEP_HEADER] = str(plan_step)
    return headers


def _step_fields(bound: BoundPlan, query: StepsQuery) -> dict[str, str | int]:
    """Return what a JSON response says first; `plan_step` only where it differs."""
    fields: dict[str, str | int] = {"plan": bound.plan.id, "step": query.step, "count": query.count}
    plan_step = bound.sampler.timeline.plan_step(query.step)
    if plan_step != query.step:
        fields["plan_step"] = plan_step
    return fields | {"rank": query.rank, "world_size": query.world_size}


def _representation(query: FormatQuery, chosen: Format) -> str:
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
