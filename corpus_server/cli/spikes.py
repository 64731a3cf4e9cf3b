"""`corpus-server spikes`: the rows that lost most, of what a run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from corpus_server.cli.common import AsJson, console, print_json, table, warn
from corpus_server.cli.server import Server, server_url
from corpus_server.errors import CorpusServerError
from corpus_server.recordings import Recording, Spike, find_spikes, open_recording
from corpus_server.work import Budget

_INFINITE = (float("inf"), float("-inf"))  # which JSON cannot say


def spikes(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that record_dir= named.")],
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="A server with the plan, which knows documents.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="Rows to show.")] = 20,
    start: Annotated[int, typer.Option(min=0, help="First training step.")] = 0,
    stop: Annotated[int | None, typer.Option(min=0, help="End of the steps, exclusive.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the rows that lost more than others of their source in the same steps, and their documents.

    Example: corpus-server spikes losses/run-17 http://localhost:8000
    """
    budget = Budget()
    recording = open_recording(folder, budget)
    first, last = recording.steps
    start = max(start, first)
    stop = max(start, last if stop is None else min(stop, last))
    for name, why in recording.unreadable.items():
        warn(f"{name} is left out: {why}")
    found, sums = find_spikes(recording, start, stop, count, budget)
    server = None if url is None else Server(server_url(url) or url)
    rows = [_row(recording, spike, server) for spike in found]
    if as_json:
        told = [{key: None if each in _INFINITE else each for key, each in row.items()} for row in rows]
        print_json({"start": start, "stop": stop, "num_rows": sums.num_rows, "rows": told})
        return
    shown = table("plan", "step", "row", "source", "loss", "usual", "deviations", "documents")
    for row in rows:
        documents = row["documents"] or []
        named = ", ".join(map(str, documents[:5])) + (", ..." if documents[5:] else "")
        place = (row["plan"][:12], str(row["step"]), str(row["row"]), escape(row["source"]))
        shown.add_row(*place, *(f"{row[name]:.4g}" for name in ("loss", "usual", "score")), named)
    console.print(shown)
    console.print(f"{sums.num_rows:,} rows of steps {start:,} to {stop:,} compared", highlight=False)


def _row(recording: Recording, spike: Spike, server: Server | None) -> dict[str, Any]:
    """Return what is known of a row; `documents` is None where no server says it."""
    part, number, documents = spike.part, spike.row, None
    if server is not None:
        query: dict[str, Any] = {"step": spike.step, "first": spike.row, "count": 1}
        query["world_size"] = part.world_size
        try:
            (row,) = server.ask(f"/v1/plans/{part.plan}/rows", **query)["rows"]
        except CorpusServerError as error:
            warn(f"the documents of step {spike.step}, row {spike.row} are not known: {error.detail}")
        else:
            number = row["row"]
            found = dict.fromkeys(span["document"] for span in row["spans"])
            documents = [each for each in found if each is not None]
    return {
        "plan": part.plan,
        "step": spike.step,
        "row": number,
        "source": recording.sources[spike.source],
        "loss": spike.loss,
        "usual": spike.usual,
        "score": spike.score,
        "documents": documents,
    }
