"""The commands `corpus-server serve`, `inspect`, `verify`, `index`, `build`, `merge` and so on.

Exit codes: 0 done, 1 the corpus is damaged, 2 wrong arguments or configuration.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from corpus_server import __version__
from corpus_server.cli import plans, view
from corpus_server.cli.build import build, merge
from corpus_server.cli.common import MISTAKE, console, tell
from corpus_server.cli.corpora import index, inspect, verify
from corpus_server.cli.explore import explore, stats
from corpus_server.cli.serve import serve
from corpus_server.cli.spikes import spikes
from corpus_server.cli.token import token
from corpus_server.errors import CorpusServerError, printable

__all__ = ["app", "main"]

app = typer.Typer(
    name="corpus-server",
    help="Serve large files of token ids to pretraining runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (serve, inspect, verify, index, build, merge, token, explore, stats, spikes):
    app.command()(command)
app.add_typer(plans.app)
app.add_typer(view.app)


def main() -> None:
    """Run the command line; an error that users can fix is one line on standard error and exit code 2."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever began this; a file would soon have its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # else a full disk would be met after the last line of this function
    except CorpusServerError as error:
        remedy = f" ({error.remedy})" if error.remedy and error.remedy not in error.detail else ""
        _end_with(error.detail + remedy)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush once more
        _end_with(str(error))


def _end_with(message: str) -> NoReturn:
    tell(f"[bold red]error:[/] {escape(printable(message))}")
    sys.exit(MISTAKE)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"corpus-server {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
