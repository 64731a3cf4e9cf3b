"""Rows of a step as people read them: text, cut at the borders of documents, and where those came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from corpus_server.admission.request import RequestHead
from corpus_server.corpus.corpus import Corpus
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import NO_SHARD
from corpus_server.plan.stage import MAX_GLOBAL_BATCH_SIZE
from corpus_server.read.reading import WindowReading
from corpus_server.read.text import Span, spans
from corpus_server.responses.documents import Metadata, find_metadata, named, naming_columns
from corpus_server.responses.question import PlanId, StepQuery, integer, question
from corpus_server.responses.response import NO_STORE, PLAN_HEADER, Response, json_response
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import MAX_WORLD_SIZE, stage_rows
from corpus_server.work import Budget

NAMED_DOCUMENTS = 1024
"""A response names the documents of rows until there are so many: each costs up to a few milliseconds."""


class RowsQuery(StepQuery):
    """Parameters of the rows of a step."""

    first: Annotated[int, integer(0, MAX_GLOBAL_BATCH_SIZE)] = 0
    """First row of the global batch."""
    world_size: Annotated[int, integer(1, MAX_WORLD_SIZE)] = 1
    """Where a plan balances ranks: `first` counts the rows of so many ranks, one rank after another."""
    count: Annotated[int, integer(1, 4096)] = 8
    """Rows."""
    targets: Literal["true", "false"] = "false"
    """`true`: a span also ends where the loss mask changes, and says what it says of its tokens."""
    text_ends: Literal["true", "false"] = "false"
    """`true`: spans say where the text of each token ends."""
    metadata: Literal["names", "all"] = "names"
    """Columns of each document's metadata: those that name it, or all."""


@described
class NamedDocument:
    """A document that a row holds tokens of."""

    document: int
    """Its number in the corpus of the row."""
    id: Any
    """Column `id` of its metadata."""
    source: Any
    """Column `source` of its metadata; without one `url`, else `file_path`."""
    metadata: dict[str, Any] | None
    """All columns, if the request asks for them."""


@described
class Row:
    """One row of a global batch; of a view, tokens and documents have the numbers of its corpus."""

    row: int
    corpus: str
    shard: str
    start: int
    """First token, corpus-wide."""
    spans: list[Span]
    unused: int
    """Tokens of the row that belong to no document, most often at its end."""
    documents: list[NamedDocument] | None
    """Where its documents came from; none without metadata. Null if the rows before name 1,024."""


@described
class Rows:
    """Rows of a step as text."""

    plan: str
    step: int
    plan_step: int
    global_batch_size: int
    first: int
    rows: list[Row]
    problems: list[str]
    """Why the metadata of a corpus is not shown."""


@question("/v1/plans/{plan_id}/rows", Rows)
def rows(
    service: Service, plan_id: PlanId, query: RowsQuery, request: RequestHead, budget: Budget
) -> Response:
    """Show rows of a step's global batch as text, cut at the borders of documents."""
    bound, step, world_size = service.plan(plan_id, request.caller, budget), query.step, query.world_size
    size = bound.sampler.check_part(step, world_size=world_size) * world_size
    if query.first >= size:
        raise InvalidParameter.expected("first", f"a row of the global batch, in [0, {size})", query.first)
    count = min(query.count, size - query.first)
    service.admission.check_text_size(count * (bound.sampler.seq_len(step) + 1), "count")
    whole = WindowReading(bound, budget, step=step, count=1, rank=0, rows=size, world_size=world_size)
    stage_rows(service, bound, whole, budget)
    masks = whole.masks() if query.targets == "true" else None
    with_ends = query.text_ends == "true"
    shown: list[Row] = []
    places = range(query.first, query.first + count)
    located, borders = bound.sampler.pieces(step, places, world_size=world_size)
    (numbers,) = bound.sampler.row_numbers(step, places, world_size=world_size).tolist()
    for place, number, (first, stop) in zip(places, numbers, pairwise(borders.tolist()), strict=True):
        pieces = located[first:stop].tolist()
        name, shard = bound.shards[pieces[0][0]]
        (tokens,) = whole.read(place, 1)
        left, texts, begins, between = tokens.tolist(), list[Span](), list[int](), 0
        mask = None if masks is None else masks.read(place, 1)[0].tolist()
        for shard_number, start, length in pieces:
            if shard_number == NO_SHARD:
                left, mask, between = left[length:], mask and mask[length:], between + length
                continue
            corpus, at = bound.in_corpus(shard_number, start)
            begins.append(at)
            texts += spans(corpus, at, left[:length], mask and mask[:length], with_text_ends=with_ends)
            left, mask = left[length:], mask and mask[length:]
        shown.append(
            Row(
                row=number,
                corpus=name,
                shard=shard.name,
                start=begins[0],
                spans=texts,
                unused=len(left) + between,
                documents=None,
            )
        )
        budget.spend(rows=1, num_bytes=tokens.nbytes)
    corpora = {name: corpus.base for name, corpus in bound.corpora.items()}
    shown, problems = _name_documents(corpora, shown, budget, all_columns=query.metadata == "all")
    fields = Rows(
        plan=bound.plan.id,
        step=step,
        plan_step=bound.sampler.timeline.plan_step(step),
        global_batch_size=size,
        first=query.first,
        rows=shown,
        problems=problems,
    )
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id}, budget)


def _name_documents(
    corpora: Mapping[str, Corpus], rows: Sequence[Row], budget: Budget, *, all_columns: bool
) -> tuple[list[Row], list[str]]:
    """Return rows with where their documents came from, and why that cannot be said of a corpus."""
    wanted: dict[str, set[int]] = {}
    num_named = 0
    for row in rows:
        if sum(map(len, wanted.values())) >= NAMED_DOCUMENTS:
            break
        if corpora[row.corpus].metadata_paths:
            wanted.setdefault(row.corpus, set()).update(_documents_of(row))
        num_named += 1
    metadata: dict[str, Metadata] = {}
    for name, numbers in wanted.items():
        columns = None if all_columns else naming_columns()
        metadata[name] = find_metadata(corpora[name], numbers, budget, columns)

    def named_in(row: Row) -> list[NamedDocument]:
        known = metadata[row.corpus].rows if row.corpus in metadata else {}
        return [
            NamedDocument(
                document=number,
                id=named(known[number], "id"),
                source=named(known[number], "source"),
                metadata=known[number] if all_columns else None,
            )
            for number in _documents_of(row)
            if number in known
        ]

    shown = [replace(row, documents=named_in(row)) for row in rows[:num_named]]
    problems = [each.problem for each in metadata.values() if each.problem is not None]
    return [*shown, *rows[num_named:]], problems


def _documents_of(row: Row) -> list[int]:
    return list(dict.fromkeys(span.document for span in row.spans if span.document is not None))
