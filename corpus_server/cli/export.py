"""`corpus-server export`: the documents of a step as JSON lines, of files or of a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from corpus_server.cli.asking import asked_about
from corpus_server.cli.common import CORPUS_HELP, progress
from corpus_server.cli.server import Asked, server_url
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter

_ROWS = 8  # of a request; a server limits the tokens of a response


def export(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="URL|CORPUS...",
            help=f"The address of a server; or all corpora of the plan. {CORPUS_HELP}",
            show_default=False,
        ),
    ],
    plan: Annotated[
        str,
        typer.Option(
            metavar="ID|FILE",
            help="A plan that the server keeps, or the beginning of its id; or its document.",
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="First training step.")],
    count: Annotated[int, typer.Option(min=1, help="Consecutive steps.")] = 1,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="With corpora and an id: the server's --state-dir.",
            show_default="~/.local/state/corpus-server",
        ),
    ] = None,
) -> None:
    """Print what a step holds of each document as a JSON line: text or tokens, metadata, row and place.

    Example: corpus-server export http://localhost:8000 --plan 3f9c2a7b51d0 --step 81204
    """
    url = server_url(sources[0])
    if url is not None and len(sources) > 1:
        raise InvalidParameter.expected("URL", "one server, or corpora", sources[1])
    specs = [] if url is not None else [*map(CorpusSpec.parse, sources)]
    with asked_about(plan, url, specs, state_dir) as (asked, plan_id):
        print_steps(asked, plan_id, step, count)


def print_steps(asked: Asked, plan_id: str, step: int, count: int) -> None:
    """Print what steps of a plan hold of each document, a JSON line each."""
    done = 0
    with progress(quiet=sys.stdout.isatty(), counts="rows") as report:  # lines would run through the bar
        for number in range(step, step + count):
            for row, size in _rows(asked, plan_id, number):
                for line in _lines(row):
                    print(json.dumps({"step": number, "row": row["row"], **line}))
                done += 1
                left = size - row["row"] - 1 + size * (step + count - number - 1)
                report("exporting", done, done + left, 0)


def _rows(asked: Asked, plan_id: str, step: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of a step's global batch, each with the metadata of its documents, and their number."""
    first, size = 0, 1
    while first < size:
        route = f"/v1/plans/{quote(plan_id, safe='')}/rows"
        response = asked.ask(route, step=step, first=first, count=_ROWS, metadata="all")
        if problems := response["problems"]:
            raise InvalidParameter(problems[0], parameter="metadata")
        size = response["global_batch_size"]
        for row in response["rows"]:
            if row["documents"] is None:  # one response names so many documents; the next begins here
                break
            yield row, size
            first += 1


def _lines(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a row holds of one document after another."""
    metadata = {each["document"]: each["metadata"] for each in row["documents"]}
    pieces: list[list[dict[str, Any]]] = []
    for span in row["spans"]:
        if pieces and _continues(pieces[-1][-1], span):
            pieces[-1].append(span)
        else:
            pieces.append([span])
    for spans in pieces:
        first, tokens = spans[0], [token for span in spans for token in span["tokens"]]
        texts = [span["text"] for span in spans if not span["is_eot"]]
        has_text = all(text is not None for text in texts) and (texts or first["text"] is not None)
        yield {
            "corpus": row["corpus"],
            "shard": row["shard"],
            "start": first["start"],
            "stop": first["start"] + len(tokens),
            "document": first["document"],
            "metadata": metadata.get(first["document"]),
            **({"text": "".join(texts)} if has_text else {"tokens": tokens}),
        }


def _continues(span: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether a span continues the document of the one before."""
    follows: bool = other["start"] == span["start"] + len(span["tokens"])
    return (
        follows
        and other["document"] == span["document"]
        and not (span["is_eot"] and span["document"] is None)
    )
