"""What the commands share: consoles, arguments, the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

DAMAGED = 1
MISTAKE = 2

errors = Console(stderr=True)
console = Console()

CorpusPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A token file or a folder of shards.", show_default=False)
]
Dtype = Annotated[
    str | None, typer.Option(help="Token type of headerless files: uint8, uint16, uint32, int32.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


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
