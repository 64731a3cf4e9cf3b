"""`corpus-server plans list | show | diff | members | successor | keep | make | save | load | import`."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from corpus_server.cli.app import App
from corpus_server.cli.common import (
    AsJson,
    note,
    print_json,
    print_table,
    read_corpus,
    read_text,
    shortened,
    table,
    tell,
)
from corpus_server.cli.diff import diff
from corpus_server.cli.server import SHORT_ID, PlanId, Server, ServerUrl, StateDir, known_url, opened_plans
from corpus_server.cli.successor import successor
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter, counted
from corpus_server.plan import Plan
from corpus_server.plan.rows import ROWS
from corpus_server.plan_store import PlanStore
from corpus_server.plan_store.links import chain
from corpus_server.plan_store.saved import saved_plan
from corpus_server.settings import default_state_dir
from corpus_server.tools.importing import ImportedOrder, ImportedRows, Trainer, import_plan

app = App(name="plans", help="List, show and compare the plans a server has seen.")


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
    with opened_plans(state_dir, url) as known:
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
            shortened(", ".join(runs), 40),
            escape(shortened(", ".join(plan.sources), 40)),
            ", ".join(dict.fromkeys(str(stage.seq_len or plan.seq_len) for stage in plan.stages)),
            shortened(", ".join(batches), 20),
            str(plan.order) if plan.rows == ROWS.default else f"{plan.order}, {plan.rows}",
            str(plan.seed),
            str(len(plan.stages)),
        )
    print_table(listed)


@app.command()
def keep(
    plan_id: PlanId,
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
def show(plan_id: PlanId, url: ServerUrl = None, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Print a plan's canonical JSON, of which its id is the SHA-256; with --json, its id beside it.

    Example: corpus-server plans show 3f9c2a7b51d0 http://localhost:8000
    """
    with opened_plans(state_dir, url) as known:
        plan = known.find(plan_id)
    if as_json:
        print_json({"id": plan.id, "plan": plan.to_json()})
    else:
        print(plan.canonical_json, end="")


@app.command()
def save(plan_id: PlanId, url: ServerUrl = None, state_dir: StateDir = None) -> None:
    """Print a plan as a file that people exchange: it says its corpora, and where they can be had.

    A server knows where; its state alone does not.

    Example: corpus-server plans save 3f9c2a7b51d0 http://localhost:8000
    """
    if url is not None:
        with opened_plans(state_dir, url) as known:
            assert isinstance(known, Server)
            print_json(known.ask(f"/v1/plans/{plan_id}/file"))
        return
    with PlanStore(state_dir or default_state_dir(), read_only=True) as store:
        plan = store.find(plan_id)
        links = chain(store, plan.id, lambda _: False) if plan.root is not plan else []
    print_json(json.loads(saved_plan(plan, [each.kept.document for each in links])))
    note("the file does not say where the corpora can be had: give the URL of a server that has them")


@app.command()
def load(
    where: Annotated[
        str,
        typer.Argument(metavar="FILE|URL", help="What `plans save` wrote; https:// or hf://.../run.json."),
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="The server that is to know the plan.")],
    as_json: AsJson = False,
) -> None:
    """Make a saved plan known to a server that has its corpora, and print its id.

    If the server lacks one, the error says which, and where it can be had.

    Example: corpus-server plans load run.json http://localhost:8000
    """
    from corpus_server.tools.exchange import load_plan, read_plan  # 0.3 s of CPU

    saved = read_plan(where, note)
    plan_id = load_plan(saved, Server(known_url(url)).ask)
    if as_json:
        print_json({"id": plan_id, "corpora": dict(saved.fingerprints)})
    else:
        print(plan_id)


@app.command()
def make(
    document: Annotated[
        Path,
        typer.Argument(help="A plan as JSON, whose stages may say epochs; - for standard input."),
    ],
    url: Annotated[str | None, typer.Argument(metavar="URL", help="A server that has the corpora.")] = None,
    corpora: Annotated[
        list[CorpusSpec] | None,
        typer.Option("--corpus", parser=read_corpus, metavar="NAME=PATH", help="A corpus, without a server."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the plan that epochs, tokens and groups of corpora come to: weights, and steps.

    With --json, its id beside it, and where the run ends. docs/plans.md has the words.

    Example: corpus-server plans make plan.json --corpus web=/data/web --corpus code=/data/code
    """
    if (url is None) == (not corpora):
        raise InvalidParameter("name a server's URL, or each corpus with --corpus NAME=PATH", parameter="url")
    body = read_text(document, "document").encode()
    if url is None:
        from corpus_server.cli.files import open_files  # 0.5 s of CPU

        with open_files(*(corpora or ())) as known:
            made = known.ask("/v1/plans", body)
    else:
        made = Server(known_url(url)).ask("/v1/plans", body, keep="false")
    planned = {name: made[name] for name in ("num_steps", "planned") if name in made}
    if as_json:
        print_json({"id": made["id"], "plan": made["plan"], **planned})
        return
    if "planned" in planned:
        used = (f"{name} {_epochs(its)}" for name, its in planned["planned"].items())
        tell(escape(f"the run ends at step {planned['num_steps']:,}: {'; '.join(used)}"))
    print_json(made["plan"])


def _epochs(used: dict[str, Any]) -> str:
    rows, epochs = counted(used["rows"], "row"), used["epochs"]
    if epochs is None:
        return rows
    shown = f"{epochs:.6g}"
    return f"{rows}, {shown} epoch{'' if shown == '1' else 's'}"


@app.command("import")
def import_(
    trainer: Annotated[Trainer, typer.Argument(help="Whose configuration it is.")],
    file: Annotated[
        Path,
        typer.Argument(help="Megatron's arguments or blend; else JSON or YAML; - for standard input."),
    ],
    seq_len: Annotated[int | None, typer.Option(help="Inputs per row, instead of the file's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows of a step, instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the plan, instead of the file's.")] = None,
    order: Annotated[
        ImportedOrder, typer.Option(help="The trainer's name: its own, row for row.")
    ] = "shuffle",
    rows: Annotated[ImportedRows, typer.Option(help="documents: rows that join whole ones.")] = "windows",
    num_samples: Annotated[
        int | None,
        typer.Option(help="Samples of the run, for orders megatron and neox, instead of the file's."),
    ] = None,
    num_epochs: Annotated[
        int | None, typer.Option(help="Epochs of the run, for order olmo, instead of the file's.")
    ] = None,
) -> None:
    """Print the plan that another trainer's data configuration comes to; say what it cannot carry over.

    Example: corpus-server plans import megatron arguments.txt --seq-len 2048
    """
    imported = import_plan(
        trainer,
        read_text(file, "file"),
        order=order,
        rows=rows,
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        num_samples=num_samples,
        num_epochs=num_epochs,
    )
    Plan.from_json(imported.document)  # refuses what a server would refuse
    for each in imported.left_out:
        tell(f"[yellow]not carried over:[/] {escape(each)}")
    served = " ".join(shlex.quote(f"{name}={path}") for name, path in imported.corpora.items())
    tell(escape(f"serve the tokens with: corpus-server serve {served}"))
    print_json(imported.document)


@app.command()
def members(
    plan_id: PlanId,
    document: Annotated[int, typer.Argument(min=0, help="A document's number; of a view, in its corpus.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="The server that knows the plan.")],
    corpus: Annotated[str | None, typer.Option(help="A source of the plan, if it has several.")] = None,
    first: Annotated[int, typer.Option(min=0, help="The first member.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Members, from the first on.")] = 1000,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the source to look through.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Say which members of a plan's family see a document, and at which steps.

    Any member's plan names the family.

    Example: corpus-server plans members 3f9c2a7b51d0 12 http://localhost:8000 --count 10
    """
    query: dict[str, Any] = {"document": document, "first": first, "count": count, "epochs": epochs}
    query |= {} if corpus is None else {"corpus": corpus}
    found = Server(known_url(url)).ask(f"/v1/plans/{plan_id}/members", **query)
    if as_json:
        print_json(found)
        return
    shown = table("member", "rows", "steps")
    for each in found["members"]:
        steps = ", ".join(f"{step:,}" for step in each["steps"])
        more = ", ..." if len(each["steps"]) < each["num_rows"] else ""
        rows = f"{each['num_rows']:,}{' (doubled)' if each['doubles'] else ''}"
        shown.add_row(str(each["member"]), "left out" if each["leaves_out"] else rows, steps + more)
    print_table(shown)
    doubled = f", {found['num_doubled']:,} double it" if found["num_doubled"] else ""
    tell(
        f"{found['num_left_out']:,} of {counted(len(found['members']), 'member')} "
        f"{'leaves' if found['num_left_out'] == 1 else 'leave'} the document out{doubled}"
    )


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


app.command()(diff)
app.command()(successor)
