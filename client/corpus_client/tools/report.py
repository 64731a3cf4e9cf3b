"""What the commands share: options, errors in one line; figures as lines, tables and JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.status import Status

from corpus_client import errors
from corpus_client.network.options import Network
from corpus_client.plan.world import Placement

if TYPE_CHECKING:
    from corpus_client.loader import CorpusLoader

RESPONSE_SECONDS = 30.0  # for one request, retries included: a person waits for the command

URLS = "host:port, https://host:port or uds:///path of the server, or of its replicas"

Header = Annotated[list[str] | None, typer.Option(help="'NAME: VALUE' sent with every request; repeatable")]
TokenFile = Annotated[Path | None, typer.Option(help="file with a bearer token that every request carries")]
Device = Annotated[str | None, typer.Option(help="default: cuda where there is one")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object instead of tables")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The figures of one run of a command: for programs, and as lines and tables for a person."""

    data: Mapping[str, Any]
    shown: Sequence[RenderableType]


class _Console(Console):
    """A console that leaves it to the command to say that nobody reads its output."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for which rich would end with 1


def run(measure: Callable[[], Report], *, as_json: bool, status: Status | None = None) -> Report:
    """Run a command: measure, print; return the report. status: shown meanwhile; default "measuring"."""
    console = _Console(stderr=as_json)
    try:
        with status or console.status("measuring"):
            report = measure()
    except errors.CorpusClientError as error:
        raise ended(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        raise ended(f"{where}reading or writing failed: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(report.data))
    else:
        for part in report.shown:
            console.print(part, highlight=False, soft_wrap=isinstance(part, str))
    return report


def ended(message: str) -> typer.Exit:
    """Print an error, and return what ends the command with code 2: 1 is for what is not as it should be."""
    # Brackets in the message are not markup.
    Console(stderr=True).print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    return typer.Exit(2)


def check_new(path: Path) -> None:
    """Raise `InvalidArgument` where no new file can be written, before a server is asked."""
    try:
        if path.exists():
            raise errors.InvalidArgument(f"{path} exists; name another file, or remove it")
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> errors.InvalidArgument:
    """Return the error for a file that cannot be written."""
    why = error.strerror or error
    return errors.InvalidArgument(f"{path} cannot be written: {why}; make room, or name another place")


def whole_urls(urls: Sequence[str]) -> list[str]:
    """Return URLs of servers, in which `http://` may have been left out."""
    return [url if "://" in url else f"http://{url}" for url in urls]


def read_network(run: str, header: Sequence[str] | None, token_file: Path | None) -> Network:
    """Return what `--header` and `--token-file` ask for; run: name of the command, for the server's page."""
    headers = {}
    for line in header or ():
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise errors.InvalidArgument(f"--header must be 'NAME: VALUE', got {line!r}")
        headers[name.strip()] = value.strip()
    return Network(headers=headers, auth=token_file).named(run)


def open_loader(urls: str | Sequence[str], *, world_size: int = 1, **options: Any) -> CorpusLoader:
    """Make the loader of rank 0 that a command measures; the environment has no say in its rank."""
    from corpus_client.loader import CorpusLoader  # torch takes 1 s of CPU, which other commands do not need

    return CorpusLoader(urls, placement=Placement(rank=0, world_size=world_size), **options)
