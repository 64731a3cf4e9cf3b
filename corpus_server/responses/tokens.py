"""The responses that hold a rank's tokens or say where they lie, and what asks for them.

The fast path and the application call the same functions with the same query and the same head. So both give
the same bytes. All raise CorpusServerError for what is out of range, unknown, too large or cannot be read.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Annotated
from urllib.parse import parse_qsl

import numpy as np
from pydantic import Field

from corpus_server.admission.request import Caller, RequestHead
from corpus_server.errors import InvalidParameter
from corpus_server.plan.document import INLINE_PLAN
from corpus_server.read.beside import BESIDE, ROWS
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.reading import Reading, WindowReading, num_bytes
from corpus_server.readers.registry import Reader
from corpus_server.responses.arrays import array_response
from corpus_server.responses.forms import InMemory, check_form, json_arrays, num_items, rows_as_text
from corpus_server.responses.question import FormatQuery, PlanQuery, Step, integer, names, question
from corpus_server.responses.requests import count_tokens
from corpus_server.responses.response import (
    NO_STORE,
    PLAN_HEADER,
    PLAN_STEP_HEADER,
    Format,
    Response,
    caching,
    negotiate,
    not_modified,
)
from corpus_server.responses.service import Service
from corpus_server.stores import Extent
from corpus_server.work import Budget, Limits

TOKEN_LIMITS = Limits(rows=2**22)
"""Rows of one response: what 16 MiB, the size that the client asks for, hold of the shortest windows. To
locate them takes about a second, and for indices 64 MiB. `max_response_bytes` bounds its bytes."""

MAX_COUNT = 4096
MAX_WORLD_SIZE = 2**20

TOKENS = "Raw little-endian integers in C order, the same as .npy, JSON, or text."
INDICES = (
    "Raw little-endian int64, the same as .npy, or JSON. Windows: `(count, rows, 2)`, shard and start token "
    "of each row. Rows of several pieces: `(pieces, 4)`, row (counted through the response), shard, start "
    "token, tokens; a piece of shard -1 fills the end of its row with the token id in place of a start token."
)
"""What the API says of such responses."""


class BatchesQuery(PlanQuery, FormatQuery):
    """Parameters of batches and indices: a rank's share of consecutive steps."""

    step: Step
    """First training step."""
    count: Annotated[int, integer(1, MAX_COUNT)] = 1
    """Consecutive steps."""
    rank: Annotated[int, integer(0, MAX_WORLD_SIZE - 1)] = 0
    """Whose rows; in [0, world_size)."""
    world_size: Annotated[int, integer(1, MAX_WORLD_SIZE)] = 1
    """Number of ranks; must divide the global batch."""
    beside: Annotated[str, names(BESIDE)] | None = Field(None, alias="with")
    """Arrays to send behind the first one (raw and json only), as `Corpus-Arrays` describes them. `sources`:
    `(count, rows) uint16`, the number of each row's source in the plan's `sources`. `loss_mask`:
    `(count, rows, seq_len + 1)`, 0 where a corpus's mask leaves the token out of the loss and in the unused
    end of a row, else 1: uint8; or, if a mask of a source of the plan holds weights, float16 with these.
    `rows`: `(count, rows) uint32`, the number of each row in the global
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


def plan_of(
    service: Service, query: PlanQuery, caller: Caller, budget: Budget, *, names_corpus: bool = False
) -> BoundPlan:
    """Return the plan that a query names by its id or spells inline; may read the disk.

    Args:
        names_corpus: whether `corpus` means something else where the plan is named by its id.
    """
    spelling = {name: value for name in INLINE_PLAN if (value := getattr(query, name, None)) is not None}
    if query.plan is None:
        return service.plans.spelled(spelling, caller, budget)
    if wrong := [name for name in spelling if not (names_corpus and name == "corpus")]:
        raise InvalidParameter(
            f"plan names the whole plan; leave out {', '.join(wrong)}",
            parameter=wrong[0],
            remedy="name a plan by its id or spell it inline, not both",
        )
    return service.plan(query.plan, caller, budget)


@question("/v1/batches", array=TOKENS, is_tagged=True, is_token_path=True, limits=TOKEN_LIMITS)
def batches(service: Service, query: BatchesQuery, request: RequestHead, budget: Budget) -> Response:
    """Return the tokens of a rank: `(count, rows, seq_len + 1)`, C order, little-endian."""
    bound = plan_of(service, query, request.caller, budget)
    chosen = query.format or negotiate(request, "raw")
    reading = _windows(bound, query, budget)
    beside = _beside(query, reading, chosen)
    size = num_bytes(reading, *beside.values())
    budget.check_response(size, "count")
    if chosen in ("json", "text"):
        check_form(service, chosen, bound.corpora.values(), reading, *beside.values())
    headers = _step_headers(bound, query, request, "batches", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    budget.claim(size)
    if bound.is_staged:
        service.stager.check_order(bound)
    reader = _note(service, bound, query, request, chosen, budget, reads_tokens=True)
    stage_rows(service, bound, reading, budget)
    if chosen == "json":
        fields = {**_step_fields(bound, query), "dtype": bound.dtype.name}
        response = json_arrays(fields, headers, {"tokens": reading, **beside}, budget)
    elif chosen == "text":
        response = rows_as_text(bound, reading, query.step, headers, budget)
    else:
        response = array_response(reading, headers, chosen, query.checksum, request, budget, beside)
    response.when_sent(
        count_tokens,
        bound.source_of(query.step),
        reading.num_units * reading.unit_tokens,
        request.run,
    )
    response.reader, response.num_steps = reader, query.count
    return response


@question(
    "/v1/indices",
    array=INDICES,
    formats=("raw", "npy", "json"),
    is_tagged=True,
    is_token_path=True,
    limits=TOKEN_LIMITS,
)
def indices(service: Service, query: BatchesQuery, request: RequestHead, budget: Budget) -> Response:
    """Return where the rows of a rank lie: shards (over the plan's shard list) and tokens."""
    bound = plan_of(service, query, request.caller, budget)
    chosen = query.format or negotiate(request, "json")
    reading = _windows(bound, query, budget)
    are_windows, shape = bound.sampler.is_window, reading.shape[:2]
    numbers = 2 if are_windows else 4  # of each piece; a row has at least one
    beside = _beside(query, reading, chosen)
    beside_bytes = num_bytes(*beside.values())
    budget.check_response(reading.num_units * numbers * 8 + beside_bytes, "count")
    if chosen == "text":
        raise InvalidParameter(
            "indices have no format text", parameter="format", received="text", accepted="raw, npy, json"
        )
    if chosen == "json":
        service.admission.check_text_size(reading.num_units * numbers + num_items(*beside.values()), "count")
    headers = _step_headers(bound, query, request, "indices", chosen)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    if are_windows:
        budget.claim(reading.num_units * 16 + beside_bytes)
    reader = _note(service, bound, query, request, chosen, budget, reads_tokens=False)
    located = _located(reading, numbers, budget)
    if are_windows:
        located = located.reshape(*shape, numbers)
    else:
        budget.claim(located.nbytes + beside_bytes)
    places = InMemory(located)
    if any(BESIDE[name].reads_files for name in beside):
        stage_rows(service, bound, reading, budget)
    if chosen == "json":
        service.admission.check_text_size(num_items(places, *beside.values()), "count")
        shards = [{"corpus": name, "name": shard.name} for name, shard in bound.shards]
        fields = {**_step_fields(bound, query), "shards": shards}
        response = json_arrays(fields, headers, {"indices": places, **beside}, budget)
    else:
        response = array_response(places, headers, chosen, query.checksum, request, budget, beside)
    response.reader, response.num_steps = reader, query.count
    return response


def _located(reading: WindowReading, numbers: int, budget: Budget) -> np.ndarray:
    """Return what `indices` says of each piece, `(pieces, numbers) int64`; 2 numbers of windows, else 4."""
    located = np.empty((reading.num_units, numbers), dtype="<i8")
    first = num_rows = 0
    for pieces, borders in reading.pieces():
        stop, rows = first + len(pieces), np.arange(num_rows, num_rows + len(borders) - 1)
        num_rows += len(rows)
        budget.check_response(stop * numbers * 8, "count")
        if numbers == 2:
            located[first:stop] = pieces[:, :2]
        else:
            located.resize((stop + reading.num_units - num_rows, numbers), refcheck=False)
            located[first:stop, 0] = np.repeat(rows, np.diff(borders))
            located[first:stop, 1:] = pieces
        first = stop
        budget.spend(num_bytes=pieces.nbytes)
    return located


def plan_headers(
    bound: BoundPlan, request: RequestHead, identity: str, *, by_id: bool = True, varies: bool = False
) -> dict[str, str]:
    """Return the caching headers of a response that follows from a plan.

    Args:
        identity: what decides the response besides the plan.
        by_id: whether the URL names the plan by its id; one that spells the plan names corpora, and
            another corpus may take a name. A URL with the beginning of an id may mean another plan later.
        varies: whether `Accept` decided its format.
    """
    by_id = by_id and bound.plan.id.encode() in request.target
    headers = caching(request, f"{bound.plan.id}.{identity}", immutable=by_id, varies=varies)
    return {**headers, PLAN_HEADER: bound.plan.id}


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


def _windows(bound: BoundPlan, query: BatchesQuery, budget: Budget) -> WindowReading:
    """Return the rows that are asked for; refuse more than may be located for one response."""
    step, count, rank, world_size = query.step, query.count, query.rank, query.world_size
    rows = bound.sampler.check_part(step, count=count, rank=rank, world_size=world_size)
    reading = WindowReading(
        bound, budget, step=step, count=count, rank=rank, rows=rows, world_size=world_size
    )
    most = budget.limits.rows // max(reading.step_rows, 1)
    remedy = f"ask for at most {most} steps"
    budget.check(rows=count * reading.step_rows, parameter="count", remedy=remedy)
    return reading


def _note(
    service: Service,
    bound: BoundPlan,
    query: BatchesQuery,
    request: RequestHead,
    chosen: str,
    budget: Budget,
    *,
    reads_tokens: bool,
) -> Reader | None:
    """Note a request, so that its next steps are prefetched or staged; return the rank that asks.

    People read JSON and text: who asks for these, and does not say which step it trained, is no rank, and
    nothing is prefetched or staged for more steps. A HEAD takes no step: the Live page would show one that
    the rank never got. With the step that was trained it says that the rank asks for no more.
    """
    if request.method == "HEAD":
        if (trained := request.trained_step) is not None:
            part = {"rank": query.rank, "world_size": query.world_size}
            service.readers.note_end(bound, trained, **part, run=request.run)
        return None
    if chosen in ("json", "text") and request.trained_step is None:
        return None

    note = partial(
        service.readers.note,
        bound,
        range(query.step, query.step + query.count),
        rank=query.rank,
        world_size=query.world_size,
        reads_tokens=reads_tokens,
        run=request.run,
        trained_step=request.trained_step,
    )
    return budget.once("reader", note) if bound.is_staged else note()


def stage_rows(service: Service, bound: BoundPlan, reading: WindowReading, budget: Budget) -> None:
    """Wait until what rows read is on this machine."""
    if not bound.is_staged:
        return
    service.stager.check_order(bound)
    extents: set[Extent] = set()
    first = 0
    while first < reading.num_units:  # as rows are read: those that were located last are not located again
        selection, part = reading.selected(first, reading.num_units)
        masks, whole = bound.staged[1], selection.whole
        if masks or whole is None or not service.stager.has(whole):
            extents.update(selection.extents(part, masks))
        first += part.stop - part.start
        budget.spend()
    service.stage(extents, budget)


def _step_headers(
    bound: BoundPlan, query: BatchesQuery, request: RequestHead, what: str, chosen: Format
) -> dict[str, str]:
    form = "+".join((representation(query, chosen), *query.arrays))
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


def _step_fields(bound: BoundPlan, query: BatchesQuery) -> dict[str, str | int]:
    """Return what a JSON response says first; `plan_step` only where it differs."""
    plan_step = bound.sampler.timeline.plan_step(query.step)
    steps = {"step": query.step, "count": query.count}
    steps |= {} if plan_step == query.step else {"plan_step": plan_step}
    return {"plan": bound.plan.id, **steps, "rank": query.rank, "world_size": query.world_size}


def representation(query: FormatQuery, chosen: Format) -> str:
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
