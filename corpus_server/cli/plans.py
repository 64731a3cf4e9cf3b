"""`corpus-server plans list | show | diff | keep | import`: plans a server has seen, or of other trainers."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from corpus_server.catalog import Catalog
from corpus_server.cli.app import App
from corpus_server.cli.common import AsJson, console, note, print_json, read_corpus, table, tell
from corpus_server.cli.server import Server, server_url
from corpus_server.corpus_spec import escaped
from corpus_server.errors import InvalidParameter
from corpus_server.plan import Plan
from corpus_server.plan.layouts import LAYOUTS
from corpus_server.plan.questions.diff import changed_fields, compare, count_equal_steps
from corpus_server.plan_store import PlanStore
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.changes import view_changes
from corpus_server.settings import default_state_dir
from corpus_server.tools.importing import ImportedOrder, ImportedRows, Trainer, import_plan
from corpus_server.work import Budget, Limits

SHORT_ID = 12

app = App(name="plans", help="List, show and compare the plans a server has seen.")

StateDir = Annotated[
    Path | None,
    typer.Option(help="The server's --state-dir.", show_default="~/.local/state/corpus-server"),
]
ServerUrl = Annotated[
    str | None, typer.Argument(metavar="URL", help="Ask a server, instead of reading its state.")
]
Id = Annotated[str, typer.Argument(help="A plan's id, or the beginning of it.")]


@contextmanager
def _opened(state_dir: Path | None, url: str | None) -> Iterator[PlanStore | Server]:
    """Yield what knows the plans: a server, or the state folder of one."""
    if url is None:
        with PlanStore(state_dir or default_state_dir(), read_only=True) as store:
            yield store
    elif state_dir is not None:
        raise InvalidParameter.expected("state_dir", "left out with a server's URL", str(state_dir))
    elif (address := server_url(url)) is None:
        raise InvalidParameter.expected("url", "http://host:port of a server", url)
    else:
        yield Server(address)


@app.command("list")
def list_(
    url: ServerUrl = None,
    state_dir: StateDir = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Only plans of this run.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show so many, the newest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List plans and the runs that posted them, the last seen first.

    Example: corpus-server plans list http://localhost:8000
    """
    with _opened(state_dir, url) as known:
        found = known.newest(limit, run)
    if as_json:
        plans = [
            {"id": plan.id, "seen": _when(seen), "runs": runs, "plan": plan.to_json()}
            for plan, seen, runs in found
        ]
        print_json({"plans": plans})
        return
    if not found:
        note("no plan is known" if run is None else f"run {run!r} has posted no plan; list all without --run")
        return
    columns = ("id", "seen (UTC)", "runs", "sources", "seq_len", "batch", "order", "seed", "stages")
    listed = table(*columns, box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for column in listed.columns:
        column.no_wrap = column.header in ("id", "seen (UTC)", "seq_len", "batch", "seed", "stages")
    for plan, seen, runs in found:
        batches = dict.fromkeys(str(stage.global_batch_size) for stage in plan.stages)
        listed.add_row(
            plan.id[:SHORT_ID],
            f"{datetime.fromtimestamp(seen, UTC):%Y-%m-%d %H:%M}",
            _shortened(", ".join(runs), 40),
            escape(_shortened(", ".join(plan.sources), 40)),
            ", ".join(dict.fromkeys(str(stage.seq_len or plan.seq_len) for stage in plan.stages)),
            _shortened(", ".join(batches), 20),
            str(plan.order) if plan.rows == LAYOUTS.default else f"{plan.order}, {plan.rows}",
            str(plan.seed),
            str(len(plan.stages)),
        )
    console.print(listed)


@app.command()
def keep(
    plan_id: Id,
    state_dir: StateDir = None,
    kept: Annotated[bool, typer.Option("--keep/--release", help="Release: it may be removed again.")] = True,
    as_json: AsJson = False,
) -> None:
    """Keep a plan, however many others come: a server removes those it has not seen for the longest time.

    Example: corpus-server plans keep 3f9c2a7b51d0
    """
    folder = state_dir or default_state_dir()
    with PlanStore(folder, read_only=True) as store:  # a wrong folder is not made
        plan = store.find(plan_id)
    with PlanStore(folder) as store:
        store.keep(plan.id, kept=kept)
    if as_json:
        print_json({"id": plan.id, "kept": kept})


@app.command()
def show(plan_id: Id, url: ServerUrl = None, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Print a plan's canonical JSON, of which its id is the SHA-256; with --json, its id beside it.

    Example: corpus-server plans show 3f9c2a7b51d0 http://localhost:8000
    """
    with _opened(state_dir, url) as known:
        plan = known.find(plan_id)
    if as_json:
        print_json({"id": plan.id, "plan": plan.to_json()})
    else:
        print(plan.canonical_json, end="")


@app.command("import")
def import_(
    trainer: Annotated[Trainer, typer.Argument(help="Whose configuration it is.")],
    file: Annotated[
        typer.FileText, typer.Argument(help="Megatron's arguments or blend; else JSON; - for standard input.")
    ],
    seq_len: Annotated[int | None, typer.Option(help="Inputs per row, instead of the file's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a step, instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the plan, instead of the file's.")] = None,
    order: Annotated[ImportedOrder, typer.Option(help="megatron: Megatron's own, row for row.")] = "shuffle",
    rows: Annotated[ImportedRows, typer.Option(help="documents: rows that join whole ones.")] = "windows",
    num_samples: Annotated[
        int | None, typer.Option(help="Samples of the run, for order megatron, instead of the file's.")
    ] = None,
) -> None:
    """Print the plan that another trainer's data configuration comes to; say what it cannot carry over.

    Example: corpus-server plans import megatron arguments.txt --seq-len 2048
    """
    fields = {"seq_len": seq_len, "batch_size": batch_size, "seed": seed, "num_samples": num_samples}
    try:
        text = file.read()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{file.name} is not UTF-8 text: {error}", parameter="file") from error
    imported = import_plan(trainer, text, order=order, rows=rows, **fields)
    Plan.from_json(imported.document)  # refuses what a server would refuse
    for each in imported.left_out:
        tell(f"[yellow]not carried over:[/] {escape(each)}")
    served = " ".join(shlex.quote(f"{name}={escaped(path)}") for name, path in imported.corpora.items())
    tell(escape(f"serve the tokens with: corpus-server serve {served}"))
    print_json(imported.document)


@app.command()
def diff(
    a: Id,
    b: Id,
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
    with _opened(state_dir, url) as known:
        one, other = known.find(a), known.find(b)
        if isinstance(known, Server) and not corpora:
            query: dict[str, Any] = {"other": other.id, "steps": steps}
            response = known.ask(f"/v1/plans/{one.id}/diff", **query)
        else:
            fields = [dataclasses.asdict(change) for change in changed_fields(one, other, Budget())]
            compared = _compare(one, other, corpora, steps, max_rows) if corpora else {"rows": None}
            response = {"a": one.id, "b": other.id, "fields": fields, **compared}
    rows = response["rows"]
    equal_steps = count_equal_steps(one, other) if rows is None else rows["equal_steps"]
    if as_json:
        print_json({**response, "equal_steps": equal_steps})
    elif not response["fields"]:
        console.print("The two plans are the same.")
    else:
        console.print(_fields(response), _said(equal_steps, rows), sep="\n")
        if rows is not None and rows["steps"]:
            console.print(_steps(rows["steps"]))
        for change in response.get("views", []):
            console.print(_documents(change), soft_wrap=True)


def _compare(a: Plan, b: Plan, corpora: list[str], steps: int, max_rows: int) -> dict[str, Any]:
    with Catalog.open(read_corpus(text) for text in corpora) as catalog:
        one, other = _bind(a, catalog), _bind(b, catalog)
        budget = Budget(Limits(rows=2 * max_rows))  # of each plan
        rows = compare(one.sampler, other.sampler, budget, num_steps=steps)
        changes = view_changes(one, other, budget)
    return {
        "rows": dataclasses.asdict(rows),
        "views": [dataclasses.asdict(each) for each in changes],
    }


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
    return _shortened(text, 200)


def _said(equal_steps: int | None, rows: dict[str, Any] | None) -> str:
    if equal_steps is None:
        return "Every step holds the same rows."
    same = f"Steps before {equal_steps:,} hold the same rows" if equal_steps else "The first step may differ"
    if rows is None:
        return f"{same}; which rows differ from there on is told with --corpus NAME=PATH for every source."
    if rows["compared_until"] == equal_steps:
        return f"{same}; one step more takes more rows than may be compared, --max-rows says how many."
    if rows["first_step"] is None:
        return (
            f"{same}; those up to {rows['compared_until']:,} were compared row by row and are the same too. "
            "Later ones were not compared; --max-rows says how far."
        )
    return f"The first step that differs is {rows['first_step']:,}."


def _steps(steps: list[dict[str, Any]]) -> Table:
    shown = table("step", "plan step in A", "in B", "rows that differ", "which")
    for change in steps:
        spans = [f"{start}" if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in change["rows"]]
        numbers = (change["step"], *change["plan_steps"], change["num_rows"])
        shown.add_row(*(f"{number:,}" for number in numbers), _shortened(", ".join(spans), 60))
    return shown


def _documents(change: dict[str, Any]) -> str:
    names = change["a"] if change["a"] == change["b"] else f"{change['a']} and {change['b']}"
    each = ", ".join(f"{its['document']} ({its['a']} -> {its['b']})" for its in change["documents"][:5])
    return (
        f"Of {escape(names)}, {change['num_documents']:,} documents come more or less often in an epoch "
        f"({change['num_taken_out']:,} only in A, {change['num_put_in']:,} only in B): "
        f"{each}{', ...' if change['num_documents'] > 5 else ''}"
    )


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
