"""The costly questions about plans: receipts, the shards that steps read, usage, differences."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import xxhash

from corpus_server.admission.request import RequestHead
from corpus_server.corpus.shards import contents
from corpus_server.described import described
from corpus_server.plan.questions.diff import FieldChange, RowComparison, changed_fields, compare
from corpus_server.plan.questions.usage import SourceUsage, count_usage
from corpus_server.read.changes import ViewChange, view_changes
from corpus_server.read.reading import WindowReading, hash_arrays, num_bytes
from corpus_server.responses.arrays import checksum_value
from corpus_server.responses.question import PlanId, QueryParameters, Step, StepQuery, integer, question
from corpus_server.responses.response import (
    NO_STORE,
    PLAN_HEADER,
    Response,
    json_response,
    not_modified,
)
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import MAX_COUNT, plan_headers, stage_rows
from corpus_server.work import Budget, Limits

_ROWS_AT_ONCE = 16384  # of windows, located in some 3 ms


class ShardsQuery(StepQuery):
    """Parameters of which shards some steps read."""

    count: Annotated[int, integer(1, MAX_COUNT)] = 1
    """Consecutive steps."""


class UsageQuery(StepQuery):
    """Parameters of what training saw."""

    since: Step = 0
    """Training step to count from."""


class DiffQuery(QueryParameters):
    """Parameters of a comparison of two plans."""

    other: PlanId
    """Id of the plan to compare with, or how it begins."""
    steps: Annotated[int, integer(1, 100)] = 10
    """Steps that differ to return at most."""


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
class Diff:
    """What differs between two plans."""

    a: str
    b: str
    fields: list[FieldChange]
    rows: RowComparison
    views: list[ViewChange]
    """Of sources that are views of one corpus, the documents that come more or less often."""


@question("/v1/plans/{plan_id}/receipt", Receipt, is_tagged=True)
def receipt(
    service: Service, plan_id: PlanId, query: StepQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return the checksum of a step's whole global batch: what a resumed run must see next."""
    bound, step = service.plan(plan_id, request.caller, budget), query.step
    headers = plan_headers(bound, request, f"receipt.{step}")
    rows = bound.sampler.check_part(step)
    reading = WindowReading(bound, budget, step=step, count=1, rank=0, rows=rows)
    remedy = "compare the checksums of the ranks' batches instead"
    cost = rows * bound.sampler.row_cost
    budget.check(rows=cost, num_bytes=num_bytes(reading), parameter="step", remedy=remedy)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    stage_rows(service, bound, reading, budget)
    digest = xxhash.xxh3_64()
    hash_arrays(digest, budget, reading)
    fields = Receipt(
        plan=bound.plan.id,
        step=step,
        plan_step=bound.sampler.timeline.plan_step(step),
        global_batch_size=rows,
        digest=checksum_value(digest),
    )
    return json_response(fields, headers, budget)


@question("/v1/plans/{plan_id}/shards", Shards)
def shards(
    service: Service, plan_id: PlanId, query: ShardsQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return the shards that the next steps read, and which of them are on the server's machine."""
    bound, step, count = service.plan(plan_id, request.caller, budget), query.step, query.count
    rows = bound.sampler.check_part(step, count=count)
    cost = 1 if bound.sampler.rows.shard_row is not None else bound.sampler.row_cost
    most = budget.limits.rows // (cost * max(rows, 1))
    budget.check(rows=count * rows * cost, parameter="count", remedy=f"ask for at most {most} steps")
    at_once = max(1, _ROWS_AT_ONCE // cost)
    num_rows = np.zeros(len(bound.shards), dtype=np.int64)
    first_step = np.full(len(bound.shards), -1, dtype=np.int64)
    num_steps = max(1, at_once // max(rows, 1))
    for first in range(step, step + count, num_steps):
        num_now = min(num_steps, step + count - first)
        for begin in range(0, rows, at_once):
            part = range(begin, min(begin + at_once, rows))
            which, numbers = bound.sampler.shards(first, part, count=num_now)
            num_rows += np.bincount(numbers, minlength=num_rows.size)
            met, at = np.unique(numbers, return_index=True)  # the first row of each, and so the first step
            new = first_step[met] < 0
            first_step[met[new]] = first + which[at[new]] // len(part)
            budget.spend(rows=num_now * len(part) * cost)
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
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id}, budget)


@question("/v1/plans/{plan_id}/usage", Used, is_tagged=True, limits=Limits(rows=2**20, num_bytes=2**30))
def usage(
    service: Service, plan_id: PlanId, query: UsageQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return what training saw of each source before a step, or between two, and what it skipped."""
    bound, since, step = service.plan(plan_id, request.caller, budget), query.since, query.step
    headers = plan_headers(bound, request, f"usage.{since}.{step}")
    used = count_usage(bound.sampler, since, step, budget)
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
    return json_response(shown, headers, budget)


DIFF_LIMITS = Limits(rows=2**22, num_bytes=2**32)
"""Rows of both plans that are compared or looked up, about two seconds; bytes of views that are compared."""


@question("/v1/plans/{plan_id}/diff", Diff, is_tagged=True, limits=DIFF_LIMITS)
def diff(
    service: Service, plan_id: PlanId, query: DiffQuery, request: RequestHead, budget: Budget
) -> Response:
    """Say in which fields another plan differs from this one, and from which step on which rows."""
    one, other = (service.plan(each, request.caller, budget) for each in (plan_id, query.other))
    both = other.plan.id.encode() in request.target
    headers = plan_headers(one, request, f"diff.{other.plan.id}.{query.steps}", by_id=both)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    rows = compare(one.sampler, other.sampler, budget, num_steps=query.steps)
    changes = view_changes(one, other, budget)
    changed = changed_fields(one.plan, other.plan, budget)
    fields = Diff(a=one.plan.id, b=other.plan.id, fields=changed, rows=rows, views=changes)
    return json_response(fields, headers, budget)
