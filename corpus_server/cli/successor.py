"""`corpus-server plans successor`: the plan that goes on without some documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from corpus_server.cli.common import AsJson, note, print_json, read_corpus, said_of_rows, say
from corpus_server.cli.server import Server, known_url
from corpus_server.errors import InvalidParameter, counted


def successor(
    plan_id: Annotated[str, typer.Argument(help="A plan's id, or the beginning of it.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="The server that knows the plan.")],
    at_step: Annotated[
        int | None,
        typer.Option(
            min=0, help="First step without the documents.", show_default="the report's --before-step"
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What find --out wrote: leave out what it found.")
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(metavar="NAME=PATH", help="A corpus of the plan; PATH?view=FILE: keep its documents."),
    ] = None,
    without: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --corpus: leave out its documents, a number a line."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the plan that goes on without some documents, and say which step is the first that differs.

    The plan so far stays as it is. A loader that extends by the same documents comes to the same plan.

    Example: corpus-server plans successor 3f9c2a7b51d0 http://localhost:8000 --report report --at-step 700
    """
    from corpus_server.tools import successors

    if (report is None) == (corpus is None):
        raise InvalidParameter(
            "name --report, or a --corpus, which say what to leave out, and not both", parameter="report"
        )
    if without is not None and corpus is None:
        raise InvalidParameter("--without needs --corpus, whose documents it lists", parameter="without")
    found = None if report is None else successors.read_report(report)
    at_step = found.get("before_step") if at_step is None and found is not None else at_step
    if at_step is None:
        raise InvalidParameter(
            "--at-step is missing: the first step without the documents", parameter="at_step"
        )
    server = Server(known_url(url))
    route = f"/v1/plans/{quote(plan_id, safe='')}"
    described = server.ask(route)
    plan = described["id"]
    known = {name: server.ask(f"/v1/corpora/{quote(name, safe='')}") for name in described["sources"]}
    if found is not None:
        exclude = successors.excluded_by_report(found, known)
    else:
        exclude = successors.excluded_by_path(read_corpus(str(corpus)), without, known)
    rows: dict[str, Any] = {"equal_steps": None, "first_step": None}
    if not exclude:
        note(f"nothing is left out: plan {plan} goes on as it is")
        made = described
    else:
        from_step = server.ask(f"{route}/usage", step=at_step)["plan_step"]
        document = successors.successor(described, from_step, exclude)
        made = server.ask("/v1/plans", json.dumps(document).encode())
        rows = server.ask(f"{route}/diff", other=made["id"])["rows"]
    if as_json:
        first = {name: rows[name] for name in ("equal_steps", "first_step")}
        print_json({"id": made["id"], "of": plan, "at_step": at_step, **first, "exclude": exclude})
    elif exclude:
        count = sum(stop - start for ranges in exclude.values() for start, stop in ranges)
        say(f"successor {made['id']}: without {counted(count, 'token')} from step {at_step:,} on")
        say(said_of_rows(rows["equal_steps"], rows))
        if len(described["stages"][-1]["weights_65536"]) > 1:
            say(
                "The plan mixes sources. A stage draws anew which source each row has, so all rows from "
                "there on may differ; each source goes on from its position."
            )
