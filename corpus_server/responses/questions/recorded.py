"""What runs recorded: loss by source over steps, and the rows and documents that lost most."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import numpy as np

from corpus_server.admission.request import Caller, RequestHead
from corpus_server.described import described
from corpus_server.errors import CorpusServerError, InvalidParameter, UnknownRecording
from corpus_server.pieces import NO_SHARD
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.recordings import Recording, Spike, find_spikes, sum_losses
from corpus_server.responses.question import QueryParameters, RecordingName, Step, integer, question
from corpus_server.responses.response import NO_STORE, Response, json_response
from corpus_server.responses.service import Service
from corpus_server.work import Budget, Limits

NAMED_DOCUMENTS = 1000
"""Of one row, and in the list of all: each of them is looked up."""


class RecordedQuery(QueryParameters):
    """Parameters of what was recorded in some steps."""

    start: Step = 0
    """First training step."""
    stop: Step | None = None
    """End of the steps, exclusive; default: after the last one that was recorded."""


class LossesQuery(RecordedQuery):
    """Parameters of a loss curve."""

    points: Annotated[int, integer(1, 2000)] = 400
    """Points of the curve at most; each is the mean of as many steps."""


class SpikesQuery(RecordedQuery):
    """Parameters of the rows that lost most."""

    count: Annotated[int, integer(1, 200)] = 20
    """Rows."""


@described
class Recorded:
    """Losses that a run recorded, in a folder of its own."""

    name: str
    plans: list[str]
    """Ids of the plans that it trained on, the first one first."""
    sources: list[str]
    start: int
    """First recorded step."""
    stop: int
    """Step after the last recorded one."""
    num_rows: int
    """Rows in its files, those of steps trained twice included."""
    num_files: int
    unreadable: dict[str, str]
    """Files that are left out -> why; the first 10."""


@described
class RecordedList:
    """The recordings of a server whose sources the caller may read."""

    recordings: list[Recorded]


@described
class Losses:
    """Loss by source over steps. A mean is null where no row of a source was recorded."""

    recording: str
    plans: list[str]
    start: int
    stop: int
    width: int
    """Steps of a point."""
    steps: list[int]
    """First step of each point."""
    all: list[float | None]
    """Mean loss of the rows of all sources."""
    losses: dict[str, list[float | None]]
    """Source -> its mean losses."""
    rows: dict[str, list[int]]
    """Source -> the rows of each mean."""
    num_rows: int
    """Rows that were read."""
    ranks_apart: int
    """1: all ranks were read; k: there are too many rows, and only every k-th rank was."""


@described
class RowDocument:
    """A document in a row."""

    document: int
    num_tokens: int
    """Of the document, in this row."""


@described
class SpikeRow:
    """A row that lost more than others of its source in the same steps."""

    plan: str
    step: int
    row: int
    """In the global batch."""
    source: str
    loss: float | None
    """Null if it is infinite."""
    usual: float | None
    """Mean loss of other rows of the source around this step."""
    score: float | None
    """By how many standard deviations of those rows its loss is larger; null if it is infinite."""
    documents: list[RowDocument] | None
    """The first 1,000. Null: unknown, see `unresolved`, or the corpus has no document index."""


@described
class SpikeDocument:
    """A document in the rows that lost most."""

    source: str
    document: int
    num_rows: int
    """Of those rows, that hold it."""
    score: float
    """Scores of these rows added up, of each the document's share of the tokens."""
    plan: str
    step: int
    """With `row`: where it is in the row of these with the highest score."""
    row: int


@described
class Spikes:
    """The rows, and the documents in them, that lost most; the highest score first."""

    recording: str
    start: int
    stop: int
    num_rows: int
    """Rows that were compared."""
    ranks_apart: int
    """1: all ranks were read; k: there are too many rows, and only every k-th rank was."""
    rows: list[SpikeRow]
    documents: list[SpikeDocument]
    """The first 1,000."""
    unresolved: dict[str, str]
    """Plan -> why the documents of its rows are not known."""


@question("/v1/recordings", RecordedList)
def recordings(service: Service, query: QueryParameters, request: RequestHead, budget: Budget) -> Response:
    """List what runs recorded, as far as the caller may read their sources."""
    listed = []
    for name in service.recordings.names():
        recording = service.recordings.open(name, budget)
        if all(map(request.caller.may_read, _to_read(recording))):
            start, stop = recording.steps
            listed.append(
                Recorded(
                    name=name,
                    plans=list(recording.plans),
                    sources=list(recording.sources),
                    start=start,
                    stop=stop,
                    num_rows=sum(part.num_rows for part in recording.parts),
                    num_files=len(recording.parts),
                    unreadable=dict(list(recording.unreadable.items())[:10]),
                )
            )
    return json_response(RecordedList(recordings=listed), NO_STORE, budget)


RECORDED_LIMITS = Limits(rows=2**27, num_bytes=2**30, seconds=60)
"""Rows that are read: ten seconds for sums, twenty for spikes."""


@question("/v1/recordings/{name}/losses", Losses, limits=RECORDED_LIMITS)
def losses(
    service: Service, name: RecordingName, query: LossesQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return the mean loss of each source over steps."""
    recording, start, stop = _opened(service, name, query, request.caller, budget)
    sums = sum_losses(recording, start, stop, query.points, budget)
    total = sums.counts.sum(axis=0)
    overall = sums.sums.sum(axis=0) / np.where(total, total, np.nan)
    fields = Losses(
        recording=name,
        plans=list(recording.plans),
        start=start,
        stop=stop,
        width=sums.width,
        steps=list(range(start, stop, sums.width)),
        all=_numbers(overall),
        losses={source: _numbers(each) for source, each in zip(recording.sources, sums.means(), strict=True)},
        rows={
            source: each.astype(int).tolist()
            for source, each in zip(recording.sources, sums.counts, strict=True)
        },
        num_rows=sums.num_rows,
        ranks_apart=sums.ranks_apart,
    )
    return json_response(fields, NO_STORE, budget)


@question("/v1/recordings/{name}/spikes", Spikes, limits=RECORDED_LIMITS)
def spikes(
    service: Service, name: RecordingName, query: SpikesQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return the rows that lost more than others of their source in the same steps, and their documents."""
    recording, start, stop = _opened(service, name, query, request.caller, budget)
    best, sums = find_spikes(recording, start, stop, query.count, budget)
    plans, unresolved = dict[str, BoundPlan](), dict[str, str]()
    for plan_id in dict.fromkeys(spike.part.plan for spike in best):
        try:
            plans[plan_id] = service.plan(plan_id, request.caller, budget)
        except CorpusServerError as error:
            unresolved[plan_id] = error.detail
        budget.spend()
    rows, scores = list[SpikeRow](), defaultdict[tuple[str, int], list[tuple[float, SpikeRow]]](list)
    for spike in best:
        source, bound = recording.sources[spike.source], plans.get(spike.part.plan)
        number, documents = spike.row, None
        if bound is not None:
            try:
                number, documents = _resolved(bound, spike)
            except InvalidParameter as error:  # the plan has no such step, row or rank
                unresolved[spike.part.plan] = error.detail
        row = SpikeRow(
            plan=spike.part.plan,
            step=spike.step,
            row=number,
            source=source,
            **{key: _number(getattr(spike, key)) for key in ("loss", "usual", "score")},
            documents=documents,
        )
        rows.append(row)
        num_tokens = sum(each.num_tokens for each in documents or ())
        for each in documents or ():
            share = each.num_tokens / num_tokens
            scores[source, each.document].append(((row.score or 0.0) * share, row))
        budget.spend()
    listed = [
        SpikeDocument(
            source=source,
            document=document,
            num_rows=len(shares),
            score=sum(score for score, _ in shares),
            **{key: getattr(shares[0][1], key) for key in ("plan", "step", "row")},
        )
        for (source, document), shares in scores.items()
    ]
    fields = Spikes(
        recording=name,
        start=start,
        stop=stop,
        num_rows=sums.num_rows,
        ranks_apart=sums.ranks_apart,
        rows=rows,
        documents=sorted(listed, key=lambda each: -each.score)[:NAMED_DOCUMENTS],
        unresolved=unresolved,
    )
    return json_response(fields, NO_STORE, budget)


def _opened(
    service: Service, name: str, query: RecordedQuery, caller: Caller, budget: Budget
) -> tuple[Recording, int, int]:
    """Return a recording and the asked steps of it: (start, stop)."""
    if query.stop is not None and query.stop < query.start:
        raise InvalidParameter.expected("stop", f"at least start, {query.start}", query.stop)
    recording = service.recordings.open(name, budget)
    if not all(map(caller.may_read, _to_read(recording))):
        raise UnknownRecording.of(name)  # a refusal would tell that it exists, and of what it is
    first, last = recording.steps
    start = max(query.start, first)
    return recording, start, max(start, last if query.stop is None else min(query.stop, last))


def _to_read(recording: Recording) -> tuple[str, ...]:
    """Return the corpora that one must be allowed to read; all, where no file says which they are."""
    return recording.sources or ("*",)


def _resolved(bound: BoundPlan, spike: Spike) -> tuple[int, list[RowDocument] | None]:
    """Return which row of the global batch it is, and the documents in it; None without a document index."""
    world_size, step = spike.part.world_size, spike.step
    size = bound.sampler.check_part(step, world_size=world_size) * world_size
    if spike.row >= size:
        raise InvalidParameter.expected("row", f"a row of the global batch, in [0, {size})", spike.row)
    place = range(spike.row, spike.row + 1)
    number = int(bound.sampler.row_numbers(step, place, world_size=world_size)[0, 0])
    documents: dict[int, int] = {}
    pieces, _ = bound.sampler.pieces(step, place, world_size=world_size)
    for shard_number, start, length in pieces[pieces[:, 0] != NO_SHARD].tolist():
        corpus, at = bound.in_corpus(shard_number, start)
        stop, document = at + length, corpus.document_at(at)
        if document is None:
            return number, None
        while at < stop and len(documents) < NAMED_DOCUMENTS:
            end = min(corpus.document_range(document)[1], stop)
            documents[document] = documents.get(document, 0) + end - at
            at, document = end, document + 1
    return number, [RowDocument(document=n, num_tokens=tokens) for n, tokens in documents.items() if tokens]


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    """Return a number that JSON has, or None."""
    return value if np.isfinite(value) else None
