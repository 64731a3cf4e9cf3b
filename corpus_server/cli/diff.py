"""`corpus-server plans diff`: in which fields two plans differ, and from which step on which rows."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from corpus_server.catalog import Catalog
from corpus_server.cli.common import (
    AsJson,
    console,
    print_json,
    print_table,
    read_corpus,
    said_of_rows,
    shortened,
    table,
)
from corpus_server.cli.server import SHORT_ID, PlanId, Server, ServerUrl, StateDir, opened_plans
from corpus_server.errors import InvalidParameter, counted
from corpus_server.plan import Plan
from corpus_server.plan.questions.diff import changed_fields, count_equal_steps
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.changes import compare_plans
from corpus_server.work import Budget, Limits


def diff(
    a: PlanId,
    b: PlanId,
    url: ServerUrl = None,
    state_dir: StateDir = None,
    corpora: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus",
            metavar="NAME=PATH",
            help="A corpus of the plans; with all of them, rows are compared.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Show so many steps that differ.")] = 10,
    max_rows: Annotated[int, typer.Option(min=1, help="Compare about so many rows at most.")] = 1 << 24,
    as_json: AsJson = False,
) -> None:
    """Say in which fields two plans differ, and from which step on which rows.

    Example: corpus-server plans diff 3f9c2a7b51d0 8e01b7c4aa92 http://localhost:8000
    """
    with opened_plans(state_dir, url) as known:
        if isinstance(known, Server) and not corpora:
            response = known.ask(f"/v1/plans/{known.id_of(a)}/diff", other=known.id_of(b), steps=steps)
        else:
            one, other = known.find(a), known.find(b)
            if corpora:
                response = _compared(one, other, corpora, steps, max_rows)
            else:
                fields = [dataclasses.asdict(change) for change in changed_fields(one, other, Budget())]
                response = {"a": one.id, "b": other.id, "fields": fields, "rows": None}
    rows = response["rows"]
    equal_steps = count_equal_steps(one, other) if rows is None else rows["equal_steps"]
    if as_json:
        print_json({**response, "equal_steps": equal_steps})
    elif not response["fields"]:
        console.print("The two plans are the same.")
    else:
        print_table(_fields(response))
        console.print(said_of_rows(equal_steps, rows))
        if rows is not None and rows["steps"]:
            print_table(_steps(rows["steps"]))
        for change in response.get("views", []):
            console.print(_documents(change), soft_wrap=True)


def _compared(a: Plan, b: Plan, corpora: list[str], steps: int, max_rows: int) -> dict[str, Any]:
    with Catalog.open(read_corpus(text) for text in corpora) as catalog:
        budget = Budget(Limits(rows=2 * max_rows))  # of each plan
        found = compare_plans(_bind(a, catalog), _bind(b, catalog), budget, num_steps=steps)
    return {**dataclasses.asdict(found), "a": a.id, "b": b.id}


def _bind(plan: Plan, catalog: Catalog) -> BoundPlan:
    """Return a plan bound to the corpora, after checking that they are those it was made for."""
    for name in plan.sources:
        if name not in catalog.corpora:
            raise InvalidParameter(
                f"plan {plan.id[:SHORT_ID]} reads corpus {name!r}: name it with --corpus {name}=PATH",
                parameter="corpus",
            )
    catalog.bind(plan, Budget())
    # The same kind of fingerprint in both plans: two kinds of one content are no difference.
    fingerprints = {name: catalog.corpora[name].fingerprint for name in plan.sources}
    return catalog.bind(plan.bind(fingerprints), Budget())


def _fields(response: dict[str, Any]) -> Table:
    fields = table("field", f"A {response['a'][:SHORT_ID]}", f"B {response['b'][:SHORT_ID]}")
    for change in response["fields"]:
        fields.add_row(*map(escape, (change["field"], _value(change["a"]), _value(change["b"]))))
    return fields


def _value(value: object) -> str:
    if value in (None, []):
        return "-"
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, list) and len(text) > 60:
        return f"{json.dumps(value[:2])[:-1]}, ...] ({len(value):,} ranges)"
    return shortened(text, 200)


def _steps(steps: list[dict[str, Any]]) -> Table:
    shown = table("step", "plan step in A", "in B", "rows that differ", "which")
    for change in steps:
        spans = [f"{start}" if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in change["rows"]]
        numbers = (change["step"], *change["plan_steps"], change["num_rows"])
        shown.add_row(*(f"{number:,}" for number in numbers), shortened(", ".join(spans), 60))
    return shown


def _documents(change: dict[str, Any]) -> str:
    names = change["a"] if change["a"] == change["b"] else f"{change['a']} and {change['b']}"
    each = ", ".join(f"{its['document']} ({its['a']} -> {its['b']})" for its in change["documents"][:5])
    return (
        f"Of {escape(names)}, {counted(change['num_documents'], 'document')} "
        f"{'comes' if change['num_documents'] == 1 else 'come'} more or less often in an epoch "
        f"({change['num_taken_out']:,} only in A, {change['num_put_in']:,} only in B): "
        f"{each}{', ...' if change['num_documents'] > 5 else ''}"
    )
