"""What differs between two plans."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from corpus_server.admission.request import RequestHead
from corpus_server.answers.question import PlanId, QueryParameters, integer, question
from corpus_server.answers.response import Response, Slices, json_response, not_modified
from corpus_server.answers.service import Service
from corpus_server.answers.tokens import plan_headers
from corpus_server.described import described
from corpus_server.plan.questions.diff import FieldChange, RowComparison, changed_fields, compare_slices
from corpus_server.read.changes import ViewChange, max_rows, view_changes

DIFF_ROWS = 1 << 21
"""Rows of each plan that are compared at most: about a second."""


class DiffQuery(QueryParameters):
    """Parameters of a comparison of two plans."""

    other: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Id of the plan to compare with."""
    steps: Annotated[int, integer(1, 100)] = 10
    """Steps that differ to return at most."""


@described
class Diff:
    """What differs between two plans."""

    a: str
    b: str
    fields: list[FieldChange]
    rows: RowComparison
    views: list[ViewChange]
    """Of sources that are views of one corpus, the documents that come more or less often."""


@question("/v1/plans/{plan_id}/diff", Diff, is_tagged=True)
def diff(service: Service, plan_id: PlanId, query: DiffQuery, request: RequestHead) -> Slices[Response]:
    """Say in which fields another plan differs from this one, and from which step on which rows."""
    one, other = (service.plan(each, request.caller) for each in (plan_id, query.other))
    headers = plan_headers(one, request, f"diff.{other.plan.id}.{query.steps}")
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    compared = yield from compare_slices(
        one.sampler, other.sampler, num_steps=query.steps, max_rows=max_rows(one, other, DIFF_ROWS)
    )
    changes = yield from view_changes(one, other)
    changed = changed_fields(one.plan, other.plan)
    fields = Diff(a=one.plan.id, b=other.plan.id, fields=changed, rows=compared, views=changes)
    return json_response(fields, headers)
