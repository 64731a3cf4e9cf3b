"""`corpus-server spikes`: the rows that lost most, of what a run recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from corpus_server.cli.common import AsJson, console, print_json, print_table, table, warn
from corpus_server.cli.server import Server, known_url
from corpus_server.errors import CorpusServerError, InvalidParameter, counted
from corpus_server.recordings import Recording, Recordings, Spike, find_spikes, open_recording
from corpus_server.work import Budget

_INFINITE = (float("inf"), float("-inf"))  # which JSON cannot say
_FOLDER = "give the folder that record_dir= of CorpusLoader named; it has files rank-...-part-....parquet"


def spikes(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What record_dir= named.")],
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
    if not folder.is_dir():
        raise CorpusServerError(f"{folder} is no folder", remedy=_FOLDER)
    recording = open_recording(folder, budget)
    for name, why in recording.unreadable.items():
        warn(f"{name} is left out: {why}")
    if not recording.parts:
        raise _nothing_recorded(folder)
    first, last = recording.steps
    if start >= last or (stop is not None and stop <= max(start, first)):
        has = f"steps {first:,} to {last - 1:,}, and none of [{start}, {'...' if stop is None else stop})"
        raise InvalidParameter(f"{folder} has {has}", parameter="start")
    start = max(start, first)
    stop = last if stop is None else min(stop, last)
    found, sums = find_spikes(recording, start, stop, count, budget)
    server = None if url is None else Server(known_url(url))
    rows = [_row(recording, spike, server) for spike in found]
    if as_json:
        told = [{key: None if each in _INFINITE else each for key, each in row.items()} for row in rows]
        print_json({"start": start, "stop": stop, "num_rows": sums.num_rows, "rows": told})
        return
    columns = ("plan", "step", "row", "source", "loss", "usual", "deviations", "documents")
    shown = table(*columns, box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for row in rows:
        documents = row["documents"] or []
        named = ", ".join(map(str, documents[:5])) + (", ..." if documents[5:] else "")
        place = (row["plan"][:12], str(row["step"]), str(row["row"]), escape(row["source"]))
        shown.add_row(*place, *(f"{row[name]:.4g}" for name in ("loss", "usual", "score")), named)
    print_table(shown)
    console.print(
        f"{counted(sums.num_rows, 'row')} of steps {start:,} to {stop - 1:,} compared", highlight=False
    )


def _nothing_recorded(folder: Path) -> CorpusServerError:
    """Return the error for a folder without losses; it names the recordings in it, as of several runs."""
    below = [each for each in Recordings(folder).names().values() if each != folder]
    named = ", ".join(map(str, below[:5])) + (", ..." if below[5:] else "")
    return CorpusServerError(
        f"{folder} holds no losses that count",
        remedy=f"name one of its recordings: {named}" if below else _FOLDER,
    )


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
