"""`corpus-server view create | show`: views of corpora, which hold chosen documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from corpus_server.cli.app import App
from corpus_server.cli.common import AsJson, CorpusArgument, print_facts, print_json, progress
from corpus_server.corpus.views.file import ViewFile, ViewHeader

app = App(name="view", help="Make and show views: documents of a corpus, chosen and repeated.")


@app.command()
def create(
    spec: CorpusArgument,
    out: Annotated[Path, typer.Option(help="File to write; must not exist.")],
    where: Annotated[
        str | None, typer.Option(metavar="EXPR", help='Only documents of which this is true: "score >= 0.8".')
    ] = None,
    repeat: Annotated[
        str | None, typer.Option(metavar="EXPR", help="How often each comes; 1.5 is 2 for half of them.")
    ] = None,
    dedup: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Only the first document of each value.")
    ] = None,
    documents: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only the documents of a list, a number a line.")
    ] = None,
    without: Annotated[Path | None, typer.Option(metavar="FILE", help="Not the documents of a list.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The lists hold values of this column.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the documents of a fraction.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Choose documents of a corpus by its metadata or by lists; nothing of the tokens is copied.

    Example: corpus-server view create /data/web --where 'score >= 0.8' --out hq.view
    """
    from corpus_server.tools.viewing import Selection
    from corpus_server.tools.viewing import create as create_view

    selection = Selection(
        where=where, repeat=repeat, dedup=dedup, documents=documents, without=without, key=key, seed=seed
    )
    with progress(quiet=as_json, counts="documents") as report:
        header = create_view(spec, selection, out, report)
    _print(out, header, as_json=as_json)


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A view.")], as_json: AsJson = False) -> None:
    """Say what a view holds, of which corpus, and how it was made.

    Example: corpus-server view show hq.view
    """
    with ViewFile(file) as view:
        header = view.header
    _print(file, header, as_json=as_json)


def _print(path: Path, header: ViewHeader, *, as_json: bool) -> None:
    size = path.stat().st_size
    fingerprints = {kind: header.fingerprint(value) for kind, value in header.fingerprints.items()}
    if as_json:
        print_json({**dataclasses.asdict(header), "size_bytes": size, "view_fingerprints": fingerprints})
        return
    counting = " (each repetition counts)" if "repeat" in header.made else ""
    facts = {
        "view": str(path),
        "documents": f"{header.num_chosen:,}{counting} from {header.num_documents:,}",
        "tokens": f"{header.num_tokens:,}",
        "size": f"{decimal(size)} ({header.encoding})",
        "of corpus": "\n".join(header.fingerprints.values()),
        "fingerprint": "\n".join(fingerprints.values()),
        **{f"--{name}": str(value) for name, value in header.made.items()},
    }
    print_facts(facts)
