"""The costly questions about a plan, in slices: batches, indices, receipts, usage and look-ups."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import xxhash

from corpus_server.admission.request import RequestHead
from corpus_server.answers import tokens
from corpus_server.answers.arrays import checksum_value
from corpus_server.answers.question import PlanId, question
from corpus_server.answers.response import (
    NO_STORE,
    PLAN_HEADER,
    Response,
    Slices,
    json_response,
    not_modified,
)
from corpus_server.answers.service import Service
from corpus_server.answers.tokens import (
    MAX_COUNT,
    BatchesQuery,
    Integer,
    PlanQuery,
    QueryParameters,
    Step,
    Token,
    plan_headers,
    plan_of,
    staged_rows,
)
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.shards import contents
from corpus_server.described import described
from corpus_server.errors import AnswerTooLarge, InvalidParameter
from corpus_server.plan.questions.lookup import Sighting, look_up_slices
from corpus_server.plan.questions.usage import SourceUsage, usage_slices
from corpus_server.read.reading import WindowReading, hash_slices, num_bytes

MAX_RECEIPT_BYTES = 2**30
"""Bytes of a global batch whose receipt is made: half a second of reading from the page cache. A batch of 64
million uint32 tokens has a quarter of it."""

TOKENS = "Raw little-endian integers in C order, the same as .npy, JSON, or text."
INDICES = (
    "Raw little-endian int64, the same as .npy, or JSON. Windows: `(count, rows, 2)`, shard and start token "
    "of each row. Rows of several pieces: `(pieces, 4)`, row (counted through the response), shard, start "
    "token, tokens; a piece of shard -1 fills the end of its row with the token id in place of a start token."
)
"""What the API says of such responses."""

_ROWS_AT_ONCE = 65536  # located in some 10 ms


class StepQuery(QueryParameters):
    """Parameter of a route about one training step of a plan."""

    step: Step
    """Training step."""


class ShardsQuery(StepQuery):
    """Parameters of which shards some steps read."""

    count: Annotated[int, Integer(1, MAX_COUNT)] = 1
    """Consecutive steps."""


class UsageQuery(StepQuery):
    """Parameters of what training saw."""

    since: Step = 0
    """Training step to count from."""


class LookupQuery(PlanQuery):
    """Parameters of a look-up; `corpus` names the source also where the plan is named by its id."""

    token: Token | None = None
    """A token, corpus-wide; of a view, in its corpus, as all that is looked up."""
    start: Token | None = None
    """First token of a range."""
    stop: Token | None = None
    """End of the range, exclusive."""
    document: Token | None = None
    """A document, where the corpus has an index."""
    epochs: Annotated[int, Integer(1, 10_000)] = 1
    """Passes over the source to look through."""
    limit: Annotated[int, Integer(1, 100_000)] = 1000
    """Rows to return at most, earliest first."""


@described
class Receipt:
    """Proof of a step: the checksum of its whole global batch."""

    plan: str
    step: int
    plan_step: int
    global_batch_size: int
    digest: str
    """`xxh3-64=HEX` of the raw response for world_size 1."""


@described
class ReadShard:
    """A shard that some steps read."""

    corpus: str
    name: str
    size_bytes: int
    """Bytes of the file."""
    first_step: int
    """First training step of those that reads it."""
    num_rows: int
    """Rows of those steps that lie in it."""
    is_local: bool
    """Whether it is on the server's machine: local, or staged from an object store."""


@described
class Shards:
    """The shards that some steps read, first used first."""

    plan: str
    step: int
    count: int
    num_bytes: int
    """Bytes of all of them."""
    shards: list[ReadShard]


@described
class Skipped:
    """What training did not see."""

    steps: int
    sources: dict[str, SourceUsage]


@described
class Used:
    """What training sees in steps [since, step)."""

    plan: str
    since: int
    step: int
    plan_step: int
    sources: dict[str, SourceUsage]
    skipped: Skipped


@described
class Found:
    """Every row that holds a token, a range or a document."""

    plan: str
    corpus: str
    start: int
    stop: int
    epochs: int
    num_found: int
    truncated: bool
    rows: list[Sighting]


@question("/v1/batches", array=TOKENS, is_tagged=True)
def batches(service: Service, query: BatchesQuery, request: RequestHead) -> Slices[Response]:
    """Return the tokens of a rank: `(count, rows, seq_len + 1)`, C order, little-endian."""
    return tokens.batches(service, query, request)


@question("/v1/indices", array=INDICES, formats=("raw", "npy", "json"), is_tagged=True)
def indices(service: Service, query: BatchesQuery, request: RequestHead) -> Slices[Response]:
    """Return where the rows of a rank lie: shards (over the plan's shard list) and tokens."""
    return tokens.indices(service, query, request)


@question("/v1/plans/{plan_id}/receipt", Receipt, is_tagged=True)
def receipt(service: Service, plan_id: PlanId, query: StepQuery, request: RequestHead) -> Slices[Response]:
    """Return the checksum of a step's whole global batch: what a resumed run must see next."""
    bound, step = service.plan(plan_id, request.caller), query.step
    headers = plan_headers(bound, request, f"receipt.{step}")
    rows = bound.sampler.check_part(step)
    reading = WindowReading(bound, step=step, count=1, rank=0, rows=rows)
    if (size := num_bytes(reading)) > MAX_RECEIPT_BYTES:
        what, remedy = "the batch of a receipt", "compare the checksums of the ranks' batches instead"
        raise AnswerTooLarge(what, size, MAX_RECEIPT_BYTES, "bytes", parameter="step", remedy=remedy)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    yield from staged_rows(service, bound, reading)
    digest = xxhash.xxh3_64()
    yield from hash_slices(reading, digest)
    fields = Receipt(
        plan=bound.plan.id,
        step=step,
        plan_step=bound.sampler.timeline.plan_step(step),
        global_batch_size=rows,
        digest=checksum_value(digest),
    )
    return json_response(fields, headers)


@question("/v1/plans/{plan_id}/shards", Shards)
def shards(service: Service, plan_id: PlanId, query: ShardsQuery, request: RequestHead) -> Slices[Response]:
    """Return the shards that the next steps read, and which of them are on the server's machine."""
    bound, step, count = service.plan(plan_id, request.caller), query.step, query.count
    rows = bound.sampler.check_part(step, count=count)
    service.admission.check_rows(count, rows)
    num_rows = np.zeros(len(bound.shards), dtype=np.int64)
    first_step = np.full(len(bound.shards), -1, dtype=np.int64)
    for each in range(step, step + count):
        for begin in range(0, rows, _ROWS_AT_ONCE):
            part = range(begin, min(begin + _ROWS_AT_ONCE, rows))
            pieces, borders = bound.sampler.pieces(each, part)
            its = np.stack((np.repeat(np.arange(len(part)), np.diff(borders)), pieces[:, 0]), axis=1)
            numbers = its[:, 1] if len(its) == len(part) else np.unique(its, axis=0)[:, 1]
            num_rows += np.bincount(numbers, minlength=num_rows.size)
            first_step[numbers[first_step[numbers] < 0]] = each
            yield None
    used = np.flatnonzero(num_rows)
    listed = []
    for number in used[np.argsort(first_step[used], kind="stable")].tolist():
        corpus, shard = bound.shards[number]
        listed.append(
            ReadShard(
                corpus=corpus,
                name=shard.name,
                size_bytes=shard.size_bytes,
                first_step=int(first_step[number]),
                num_rows=int(num_rows[number]),
                is_local=all(each.file.is_cached for each in contents([shard])),
            )
        )
    total = sum(bound.shards[number][1].size_bytes for number in used.tolist())
    fields = Shards(plan=bound.plan.id, step=step, count=count, num_bytes=total, shards=listed)
    # What is on this machine changes from moment to moment.
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id})


@question("/v1/plans/{plan_id}/usage", Used, is_tagged=True)
def usage(service: Service, plan_id: PlanId, query: UsageQuery, request: RequestHead) -> Slices[Response]:
    """Return what training saw of each source before a step, or between two, and what it skipped."""
    bound, since, step = service.plan(plan_id, request.caller), query.since, query.step
    headers = plan_headers(bound, request, f"usage.{since}.{step}")
    used = yield from usage_slices(bound.sampler, since, step)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    shown = Used(
        plan=bound.plan.id,
        since=since,
        step=step,
        plan_step=used.plan_step,
        sources=used.sources,
        skipped=Skipped(steps=used.skipped_steps, sources=used.skipped),
    )
    return json_response(shown, headers)


@question("/v1/lookup", Found, is_tagged=True)
def lookup(service: Service, query: LookupQuery, request: RequestHead) -> Slices[Response]:
    """Return every row of the first epochs that holds a token, a range of tokens or a document."""
    bound = plan_of(service, query, request.caller, names_corpus=True)
    corpus = _looked_up_corpus(query, bound.plan.sources)
    start, stop = _looked_up_range(query, bound.corpora[corpus].base)
    epochs, limit = query.epochs, query.limit
    identity = f"lookup.{corpus}.{start}.{stop}.{epochs}.{limit}"
    # Where a document lies is said by an index, which may be made anew with another end of text.
    by_id = query.plan is not None and query.document is None
    headers = plan_headers(bound, request, identity, by_id=by_id)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    found = yield from look_up_slices(bound.sampler, corpus, start, stop, epochs=epochs, limit=limit)
    fields = Found(
        plan=bound.plan.id,
        corpus=corpus,
        start=start,
        stop=stop,
        epochs=epochs,
        num_found=found.num_found,
        truncated=found.num_found > len(found.rows),
        rows=found.rows,
    )
    return json_response(fields, headers)


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
