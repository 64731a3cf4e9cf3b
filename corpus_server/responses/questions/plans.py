"""The costly questions about plans: receipts, the shards that steps read, usage, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import xxhash
from orjson import Fragment

from corpus_server.admission.request import RequestHead
from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.shards import contents
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.plan.questions.usage import SourceUsage, count_usage
from corpus_server.plan_store.links import chain
from corpus_server.plan_store.saved import SAVED_KIND, SAVED_VERSION
from corpus_server.read.changes import Diff, compare_plans
from corpus_server.read.reading import WindowReading, hash_arrays, num_bytes
from corpus_server.responses.arrays import checksum_value
from corpus_server.responses.question import PlanId, QueryParameters, Step, StepQuery, integer, question
from corpus_server.responses.response import NO_STORE, PLAN_HEADER, Response, json_response, not_modified
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import MAX_COUNT, plan_headers, stage_rows
from corpus_server.stores import bytes_of, is_staged
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
    num_steps: Step | None = None
    """Steps of the whole run, at least `step`; the response has as `planned` what they use."""


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
    """Whether all of it is on the server's machine: local, or staged from an object store."""
    local_bytes: int
    """Bytes of the file that need not be fetched any more."""


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
    planned: dict[str, SourceUsage] | None
    """What the whole run uses, of `num_steps`; null if they are not given."""


@described
class SavedCorpus:
    """A corpus of a saved plan."""

    fingerprint: str
    num_tokens: int
    tokenizer_identity: str | None
    address: str | None
    """Where others can have it; null: not known."""
    license: str | None


@described
class SavedPlan:
    """A plan as a file that people exchange: `plans load` and a loader take it."""

    kind: str
    """`corpus-plan`."""
    version: int
    """Of the file's form, 1."""
    id: str
    plan: dict[str, Any]
    """The canonical document; of a plan that continues others, that of the first one."""
    links: list[dict[str, Any]]
    """The canonical documents of what continues it, each the parent of the next one."""
    corpora: dict[str, SavedCorpus]


@question("/v1/plans/{plan_id}/file", SavedPlan)
def file(
    service: Service, plan_id: PlanId, query: QueryParameters, request: RequestHead, budget: Budget
) -> Response:
    """Return a plan as a file: all that another server needs, and where its corpora can be had."""
    bound = service.plan(plan_id, request.caller, budget)
    links = []
    for link in chain(service.store, bound.plan.id, lambda _: False):
        links.append(Fragment(link.kept.document))
        budget.spend(num_bytes=len(link.kept.document))
    corpora = {}
    for name, corpus in bound.corpora.items():
        corpora[name] = SavedCorpus(
            fingerprint=bound.plan.fingerprints[name],
            num_tokens=corpus.num_tokens,
            tokenizer_identity=corpus.tokenizer_identity,
            address=corpus.address,
            license=corpus.license,
        )
    fields = {
        "kind": SAVED_KIND,
        "version": SAVED_VERSION,
        "id": bound.plan.id,
        "plan": Fragment(bound.plan.root.canonical_json),
        "links": links,
        "corpora": corpora,
    }
    # Where corpora can be had is no part of the id.
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id}, budget)


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
    cache = service.catalog.cache
    kept: dict[
        str, list[str]
    ] = {}  # by object, so that nothing is asked of the cache for thousands of others
    for key in cache.keys() if cache is not None and bound.is_staged else ():
        kept.setdefault(key.partition("/")[0], []).append(key)
    listed = []
    for number in used[np.argsort(first_step[used], kind="stable")].tolist():
        corpus, shard = bound.shards[number]
        missing = [_missing(each.file, kept) for each in contents([shard])]
        listed.append(
            ReadShard(
                corpus=corpus,
                name=shard.name,
                size_bytes=shard.size_bytes,
                first_step=int(first_step[number]),
                num_rows=int(num_rows[number]),
                is_local=not any(missing),
                local_bytes=shard.size_bytes - missing[0],
            )
        )
        budget.spend()
    total = sum(bound.shards[number][1].size_bytes for number in used.tolist())
    fields = Shards(plan=bound.plan.id, step=step, count=count, num_bytes=total, shards=listed)
    # What is on this machine changes from moment to moment.
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id}, budget)


def _missing(file: OpenFile, kept: Mapping[str, Sequence[str]]) -> int:
    """Return how many bytes of a file must still be fetched.

    Args:
        kept: keys of extents that the cache may have, by object.
    """
    if not is_staged(file):
        return 0
    missing, reached = 0, file.data.start
    parts = sorted(bytes_of(key) for key in kept.get(file.key, ()) if file.cache.has(key))
    for start, stop in (*parts, (file.data.stop, file.data.stop)):
        missing += max(0, start - reached)
        reached = max(reached, stop)
    return missing


@question("/v1/plans/{plan_id}/usage", Used, is_tagged=True, limits=Limits(rows=2**20, num_bytes=2**30))
def usage(
    service: Service, plan_id: PlanId, query: UsageQuery, request: RequestHead, budget: Budget
) -> Response:
    """Return what training saw of each source before a step, or between two, and what it skipped."""
    bound, since, step = service.plan(plan_id, request.caller, budget), query.since, query.step
    if query.num_steps is not None and query.num_steps < step:
        accepted = f"at least step, which is {step}: the steps of the whole run"
        raise InvalidParameter.expected("num_steps", accepted, query.num_steps)
    headers = plan_headers(bound, request, f"usage.{since}.{step}.{query.num_steps}")
    used = count_usage(bound.sampler, since, step, budget)
    planned = None if query.num_steps is None else count_usage(bound.sampler, 0, query.num_steps, budget)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    shown = Used(
        plan=bound.plan.id,
        since=since,
        step=step,
        plan_step=used.plan_step,
        sources=used.sources,
        skipped=Skipped(steps=used.skipped_steps, sources=used.skipped),
        planned=None if planned is None else planned.sources,
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
    return json_response(compare_plans(one, other, budget, num_steps=query.steps), headers, budget)
