"""`corpus-server plans list | show | diff`: what a server has seen."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from corpus_server.cli.common import AsJson, Dtype, console
from corpus_server.corpus import Corpus
from corpus_server.errors import FingerprintMismatch, InvalidParameter
from corpus_server.plan import Plan
from corpus_server.plan.diff import (
    MAX_ROWS,
    FieldChange,
    RowComparison,
    changed_fields,
    compare_rows,
    count_equal_steps,
)
from corpus_server.plan.store import PlanStore
from corpus_server.settings import CorpusSpec, default_state_dir

SHORT_ID = 12

app = typer.Typer(
    name="plans", help="List, show and compare the plans a server has seen.", no_args_is_help=True
)

StateDir = Annotated[
    Path | None,
    typer.Option(help="The server's --state-dir.", show_default="~/.local/state/corpus-server"),
]
Id = Annotated[str, typer.Argument(metavar="ID", help="A plan's id, or the beginning of it.")]


@app.command("list")
def list_(
    state_dir: StateDir = None,
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the newest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List plans, the last seen first."""
    with _open(state_dir) as store:
        found = store.newest(limit)
    if as_json:
        plans = [{"id": plan.id, "seen": _when(seen), "plan": plan.to_json()} for plan, seen in found]
        print(json.dumps({"plans": plans}, indent=2))
        return
    table = Table()
    for column in ("id", "seen", "sources", "seq_len", "batch", "order", "seed", "stages"):
        table.add_column(column, no_wrap=column in ("id", "seen"))
    for plan, seen in found:
        batches = dict.fromkeys(str(stage.global_batch_size) for stage in plan.stages)
        table.add_row(
            plan.id[:SHORT_ID],
            _when(seen),
            escape(_shortened(", ".join(plan.sources), 40)),
            str(plan.seq_len),
            _shortened(", ".join(batches), 20),
            plan.order,
            str(plan.seed),
            str(len(plan.stages)),
        )
    console.print(table)


@app.command()
def show(plan_id: Id, state_dir: StateDir = None) -> None:
    """Print a plan's canonical JSON, of which its id is the SHA-256."""
    with _open(state_dir) as store:
        print(store.find(plan_id).canonical_json(), end="")


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A plan's id, or the beginning of it.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    state_dir: StateDir = None,
    corpora: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus", metavar="NAME=PATH", help="A corpus of the plans; with all of them rows are compared."
        ),
    ] = None,
    dtype: Dtype = None,
    steps: Annotated[int, typer.Option(min=1, help="Show so many steps that differ.")] = 10,
    max_rows: Annotated[int, typer.Option(min=1, help="Compare about so many rows at most.")] = MAX_ROWS,
    as_json: AsJson = False,
) -> None:
    """Say in which fields two plans differ, and from which step on which rows."""
    with _open(state_dir) as store:
        one, other = store.find(a), store.find(b)
    fields = changed_fields(one, other)
    equal_steps = count_equal_steps(one, other)
    rows = None
    if corpora:
        with ExitStack() as opened:
            specs = [CorpusSpec.parse(text, dtype=dtype) for text in corpora]
            named = {
                spec.name: opened.enter_context(Corpus.open(spec.path, name=spec.name, dtype=spec.dtype))
                for spec in specs
            }
            bound = _bind(one, named), _bind(other, named)
            shard_tokens = {
                name: [shard.num_tokens for shard in corpus.shards] for name, corpus in named.items()
            }
        rows = compare_rows(*bound, shard_tokens, num_steps=steps, max_rows=max_rows)
        equal_steps = rows.equal_steps
    if as_json:
        answer: dict[str, Any] = {
            "a": one.id,
            "b": other.id,
            "fields": [dataclasses.asdict(change) for change in fields],
            "equal_steps": equal_steps,
            "rows": None if rows is None else {**dataclasses.asdict(rows), "first_step": rows.first_step},
        }
        print(json.dumps(answer, indent=2))
        return
    console.print(_fields(one, other, fields) if fields else "The two plans are the same.")
    if fields:
        console.print(_said(equal_steps, rows), highlight=False)
    if rows is not None and rows.steps:
        console.print(_steps(rows))


def _open(state_dir: Path | None) -> PlanStore:
    return PlanStore.open_existing(state_dir or default_state_dir())


def _bind(plan: Plan, corpora: dict[str, Corpus]) -> Plan:
    """Return the plan bound to the corpora, after checking that they are those it was made for."""
    for name in plan.sources:
        if name not in corpora:
            raise InvalidParameter(
                f"plan {plan.id[:SHORT_ID]} reads corpus {name!r}: name it with --corpus {name}=PATH",
                parameter="corpus",
            )
        known = corpora[name].fingerprints.values()
        if plan.fingerprints[name] not in known:
            raise FingerprintMismatch(
                f"corpus {name!r} has other content than plan {plan.id[:SHORT_ID]} was made for: the plan "
                f"says {plan.fingerprints[name]}, found {', '.join(known)}; leave --corpus out to compare "
                "the documents alone",
                parameter="corpus",
            )
    return plan.bind({name: corpora[name].fingerprint for name in plan.sources})


def _fields(a: Plan, b: Plan, changes: list[FieldChange]) -> Table:
    table = Table("field", f"A {a.id[:SHORT_ID]}", f"B {b.id[:SHORT_ID]}")
    for change in changes:
        values = ("-" if value in (None, []) else _value(value) for value in (change.a, change.b))
        table.add_row(escape(change.field), *map(escape, values))
    return table


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, list) and len(text) > 60:
        return f"{json.dumps(value[:2])[:-1]}, ...] ({len(value):,} ranges)"
    return _shortened(text, 200)


def _said(equal_steps: int | None, rows: RowComparison | None) -> str:
    if equal_steps is None:
        return "Every step holds the same rows."
    same = f"Steps before {equal_steps:,} hold the same rows" if equal_steps else "The first step may differ"
    if rows is None:
        return f"{same}; which rows differ from there on is told with --corpus NAME=PATH for every source."
    if rows.first_step is None:
        return (
            f"{same}; those up to {rows.compared_until:,} were compared row by row and are the same too. "
            "Later ones were not compared; --max-rows says how far."
        )
    return f"The first step that differs is {rows.first_step:,}."


def _steps(rows: RowComparison) -> Table:
    table = Table("step", "plan step in A", "in B", "rows that differ", "which")
    for change in rows.steps:
        spans = [f"{start}" if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in change.rows]
        table.add_row(
            f"{change.step:,}",
            *(f"{plan_step:,}" for plan_step in change.plan_steps),
            f"{change.num_rows:,}",
            _shortened(", ".join(spans), 60),
        )
    return table


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
