"""Consoles, arguments and the progress bar that the commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus_spec import CorpusSpec

DAMAGED = 1
MISTAKE = 2

errors = Console(stderr=True, highlight=False)
console = Console(highlight=False)

CORPUS_HELP = (
    "\\[NAME=]PATH\\[#SPLIT]\\[,OPTION=VALUE...]: a token file, a folder of shards, or quoted patterns "
    "joined by commas; #train chooses the files whose names say so; options are dtype, eot, tokenizer, "
    "include, exclude, token_range, earlier."
)
CorpusArgument = Annotated[
    CorpusSpec,
    typer.Argument(parser=CorpusSpec.parse, metavar="CORPUS", help=CORPUS_HELP, show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def warn_of_strange_ids(corpus: Corpus) -> None:
    """Print a warning if a sample of the corpus holds ids that its tokenizer does not have."""
    if (warning := corpus.vocabulary_warning()) is not None:
        errors.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def print_json(value: object) -> None:
    """Print an object as JSON; paths become strings."""
    print(json.dumps(value, default=str, indent=2))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback (bytes_done, bytes_total) that draws a bar on standard error."""
    with Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
    ) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
