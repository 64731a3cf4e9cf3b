"""Consoles, arguments and the progress bar that the commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from typer.core import TyperCommand, TyperGroup

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.progress import Progress as Report
from corpus_server.corpus_spec import OPTIONS, CorpusSpec

F = TypeVar("F", bound=Callable[..., Any])

DAMAGED = 1
MISTAKE = 2

errors = Console(stderr=True, highlight=False)
console = Console(highlight=False)

CORPUS_HELP = (
    "\\[NAME=]PATH\\[#SPLIT]\\[,OPTION=VALUE...]: a token file, a folder of shards, or quoted patterns "
    f"joined by commas; #train chooses the files whose names say so; options are {', '.join(OPTIONS)}."
)
CorpusArgument = Annotated[
    CorpusSpec,
    typer.Argument(parser=CorpusSpec.parse, metavar="CORPUS", help=CORPUS_HELP, show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


class _Parameters:
    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options; nothing follows a flag, so its help names no type."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return parameters


class _Command(_Parameters, TyperCommand):
    pass


class _Group(_Parameters, TyperGroup):
    pass


class App(typer.Typer):
    """Commands whose help shows no `<bool>`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, no_args_is_help=True, **options)

    def command(self, *arguments: Any, **options: Any) -> Callable[[F], F]:
        """Register a command."""
        return super().command(*arguments, cls=_Command, **options)


say = partial(console.print, soft_wrap=True, markup=False)
tell = partial(errors.print, soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning on standard error."""
    tell(f"[bold yellow]warning:[/] {escape(text)}")


def warn_of_strange_ids(corpus: Corpus) -> None:
    """Print a warning if a sample of the corpus holds ids that its tokenizer does not have."""
    if (warning := corpus.vocabulary_warning()) is not None:
        warn(warning)


def print_json(value: object) -> None:
    """Print an object as JSON; paths become strings."""
    print(json.dumps(value, default=str, indent=2))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Report]:
    """Yield a callback that draws a bar with the speed and the time left on standard error."""
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
