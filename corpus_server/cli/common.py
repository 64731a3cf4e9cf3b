"""Consoles, arguments and the progress bar that the commands share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from corpus_server.corpus_spec import HUB, OPTIONS, CorpusSpec
from corpus_server.errors import InvalidParameter

if TYPE_CHECKING:
    from corpus_server.corpus.corpus import Corpus
    from corpus_server.corpus.progress import Progress as Report

DAMAGED = 1
MISTAKE = 2

errors = Console(stderr=True, highlight=False)
console = Console(highlight=False)

CORPUS_HELP = (
    "\\[NAME=]PATH\\[#SPLIT]\\[,OPTION=VALUE...]: a token file, a folder of shards, quoted patterns "
    "joined by commas, s3://BUCKET/PATH or hf://datasets/ORG/NAME; #train chooses the files whose names say "
    f"so; options are {', '.join(OPTIONS)}."
)
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


say = partial(console.print, soft_wrap=True, markup=False)
tell = partial(errors.print, soft_wrap=True)
note = partial(errors.print, soft_wrap=True, markup=False)


def table(*columns: str, **options: Any) -> Table:
    """Return an empty table whose cells are folded and never cut: half a fingerprint or name is of no use."""
    made = Table(**options)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table with a line of name and value for each fact."""
    made = table("", "", show_header=False, box=None)
    for name, value in facts.items():
        made.add_row(f"[bold]{name}[/]", escape(value))
    return made


def read_corpus(text: str) -> CorpusSpec:
    """Return the corpus that a command line names, as files of this machine or of an object store."""
    return fetched_if_needed(CorpusSpec.parse(text))


def fetched_if_needed(spec: CorpusSpec, *, splits: bool = False) -> CorpusSpec:
    """Return the same corpus as files of this machine, if the Hugging Face Hub has it or its tokenizer."""
    if not any(text and HUB.match(text) for text in (spec.store, spec.tokenizer)):
        return spec
    from corpus_server.tools.hub import fetched  # 0.3 s of CPU

    return fetched(spec, note, splits=splits)


CorpusArgument = Annotated[
    CorpusSpec,
    typer.Argument(parser=read_corpus, metavar="CORPUS", help=CORPUS_HELP, show_default=False),
]


def warn(text: str) -> None:
    """Print a warning on standard error."""
    tell(f"[bold yellow]warning:[/] {escape(text)}")


def warn_of(corpus: Corpus, *, degenerate: bool = False) -> None:
    """Print what is strange about a corpus, see `Corpus.warnings`, and on request `find_degenerate`."""
    for warning in corpus.warnings():
        warn(warning)
    if degenerate:
        from corpus_server.corpus.degenerate import find_degenerate

        for warning in find_degenerate(corpus):
            warn(warning)


def split_names(what: str, text: str | None) -> tuple[str, ...] | None:
    """Return the names that an option lists, `a,b`; None if it is not given."""
    if text is None:
        return None
    names = tuple(each.strip() for each in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidParameter.expected(what, "different names, for example url,score", text)
    return names


def print_json(value: object) -> None:
    """Print an object as JSON; paths become strings."""
    print(json.dumps(value, default=str, indent=2))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Report]:
    """Yield a callback that draws a bar with the speed and the time left on standard error."""
    from rich.progress import (  # most commands draw none
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def report(what: str, done: int, total: int, num_tokens: int) -> None:
            if bar.tasks[task].description != what:
                # What earlier runs did does not count towards the speed of this one.
                bar.reset(task, description=what, completed=done, total=total)
            seconds = bar.tasks[task].elapsed or 0
            rate = f"{num_tokens / seconds / 1e6:.1f} M tokens/s" if num_tokens and seconds else ""
            bar.update(task, completed=done, total=total, rate=rate)

        yield report
