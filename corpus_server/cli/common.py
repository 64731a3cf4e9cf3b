"""Consoles, arguments and the progress bar that the commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.measure import Measurement, measure_renderables
from rich.padding import Padding
from rich.table import Column, Table

from corpus_server.corpus_spec import HUB, OPTIONS, CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.user_files import read_given, reason_of

if TYPE_CHECKING:
    from corpus_server.corpus.corpus import Corpus
    from corpus_server.corpus.progress import Progress as Report

DAMAGED = 1
MAX_PLAN_BYTES = 64 << 20  # as a server takes it
_WIDE = 10_000  # columns


class _Console(Console):
    """A console that leaves it to the command to say that nobody reads its output."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for which rich would end with 1


errors = _Console(stderr=True, highlight=False)
console = _Console(highlight=False)

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
    """Return an empty table for `print_table`. No cell is cut: half a fingerprint or name is of no use."""
    made = Table(**options)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_table(made: Table, where: Console = console) -> None:
    """Print a table whose cells are folded between words; without room for that, print rows as paragraphs."""
    wide = where.options.update(width=_WIDE)  # measured in the terminal's width, the narrowest would be that
    columns = [_measured(where, wide, column) for column in made.columns]
    lines = where.measure(made, options=wide).maximum - sum(each.maximum for each in columns)
    room = where.width - lines
    if sum(each.minimum for each in columns) <= room:
        _fit(made, columns, room)
        where.print(made)
        return
    heads = [str(column.header) for column in made.columns]
    for first, *others in zip(*(column.cells for column in made.columns), strict=True):
        told = (f"{head} {cell}".lstrip() for head, cell in zip(heads[1:], others, strict=True) if cell)
        where.print(first, Padding("; ".join(told), (0, 0, 0, 2)), sep="\n")
    if made.caption:
        where.print(made.caption)


def _measured(where: Console, options: ConsoleOptions, column: Column) -> Measurement:
    """Return the width of the longest word of a column, and that of its widest cell."""
    cells = [column.header, *column.cells]
    measured = measure_renderables(where, options, [where.render_str(str(each)) for each in cells])
    return Measurement(measured.maximum, measured.maximum) if column.no_wrap else measured


def _fit(made: Table, columns: Sequence[Measurement], room: int) -> None:
    """Set widths that hold the longest word of each column: rich narrows the widest ones, and cuts words."""
    most = max(each.maximum for each in columns)
    while sum(max(each.minimum, min(each.maximum, most)) for each in columns) > room:
        most -= 1
    for column, each in zip(made.columns, columns, strict=True):
        column.width = max(each.minimum, min(each.maximum, most))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print each fact as name and value; a value with a word too long to stand there goes below its name."""
    names = max(map(len, facts))
    for name, value in facts.items():
        if max(map(len, value.split()), default=0) > console.width - names - 3:
            say(f" {name}")
            for line in value.splitlines():
                say(f"   {line}")
            continue
        made = table("", "", show_header=False, box=None)
        made.columns[0].width = names
        made.add_row(f"[bold]{name}[/]", escape(value))
        console.print(made)


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
    CorpusSpec, typer.Argument(parser=read_corpus, metavar="CORPUS", help=CORPUS_HELP, show_default=False)
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


def read_text(file: Path, parameter: str) -> str:
    """Return what a file or a pipe holds, or standard input, which is `-`; the parameter named it."""
    try:
        return sys.stdin.read() if str(file) == "-" else read_given(file, max_bytes=MAX_PLAN_BYTES)
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{file} is not UTF-8 text: {error}", parameter=parameter) from error
    except OSError as error:
        raise InvalidParameter(f"{file} cannot be read: {reason_of(error)}", parameter=parameter) from error


def print_json(value: object) -> None:
    """Print an object as JSON; paths become strings."""
    print(json.dumps(value, default=str, indent=2))


def shortened(text: str, length: int) -> str:
    """Return a text, or the beginning of one that is longer."""
    return text if len(text) <= length else text[: length - 3] + "..."


def said_of_rows(equal_steps: int | None, rows: Mapping[str, Any] | None) -> str:
    """Say from which step on the rows of two plans differ.

    Args:
        rows: what a comparison of rows came to; None: none were compared.
    """
    if equal_steps is None:
        return "Every step holds the same rows."
    same = f"Steps before {equal_steps:,} hold the same rows" if equal_steps else "The first step may differ"
    if rows is None:
        return f"{same}; which rows differ from there on is told with --corpus NAME=PATH for every source."
    if rows["compared_until"] == equal_steps:
        return f"{same}; one step more takes more rows than may be compared, --max-rows says how many."
    if rows["first_step"] is None:
        last = rows["compared_until"] - 1
        return (
            f"{same}; those up to {last:,} were compared row by row and are the same too. "
            "Later ones were not compared; --max-rows says how far."
        )
    return f"The first step that differs is {rows['first_step']:,}."


@contextmanager
def progress(*, quiet: bool, counts: str = "bytes") -> Iterator[Report]:
    """Yield a callback that draws a bar with the speed and the time left on standard error.

    Args:
        counts: what is counted, as the bar names it.
    """
    from rich.progress import (  # most commands draw none
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    in_bytes: tuple[ProgressColumn, ...] = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        *(in_bytes if counts == "bytes" else (MofNCompleteColumn(),)),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
        redirect_stdout=False,  # lines for a file or a pipe would go to the terminal
    ) as bar:
        task = bar.add_task("", total=None, rate="")

        def report(what: str, done: int, total: int, num_tokens: int) -> None:
            if bar.tasks[task].description != what:
                # What earlier runs did does not count towards the speed of this one.
                bar.reset(task, description=what, completed=done, total=total, rate="")
            seconds = bar.tasks[task].elapsed or 0
            rate = f"{num_tokens / seconds / 1e6:.1f} M tokens/s" if num_tokens and seconds else ""
            if counts != "bytes":
                speed = bar.tasks[task].speed
                rate = counts if speed is None else f"{counts}, {speed:,.0f}/s"
            bar.update(task, completed=done, total=total, rate=rate)

        yield report
