"""The commands `corpus-server serve`, `inspect`, `verify`, `index`, `build`, `merge` and so on.

Exit codes: 0 done, 1 the corpus is damaged or changed meanwhile, 2 wrong arguments or configuration, 141
nobody read the output.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from corpus_server import __version__
from corpus_server.cli.app import App, Named, lazy_group
from corpus_server.errors import CorpusChanged, CorpusServerError, ReadFailed, printable
from corpus_server.user_files import reason_of

__all__ = ["app", "main"]

CHANGED, MISTAKE = 1, 2

COMMANDS = {
    "serve": Named("serve:serve", "Serve corpora over HTTP until Ctrl-C or SIGTERM."),
    "inspect": Named(
        "corpora:inspect", "Describe a corpus as `serve` would serve it, without reading all of it."
    ),
    "verify": Named(
        "corpora:verify", "Read every byte and compare it with the recorded hashes, or record them."
    ),
    "index": Named(
        "corpora:index",
        "Find where documents end (PATH,eot=ID), and keep the ends in sidecars beside the shards.",
    ),
    "build": Named(
        "build:build", "Make a corpus of text or token ids. After an interruption the same command continues."
    ),
    "merge": Named("build:merge", "Join built corpora by hard links, without moving a token."),
    "stage": Named(
        "stage:stage",
        "Fetch what steps of a plan read from object stores into the cache of a server, before it serves "
        "them.",
    ),
    "token": Named(
        "token:token",
        "Make an access token, add its hash to a file, and print the token: it is shown this once.",
    ),
    "export": Named(
        "export:export",
        "Print what a step holds of each document as a JSON line: text or tokens, metadata, row and place.",
    ),
    "what": Named(
        "what:what",
        "Print what a step of a run of Megatron, GPT-NeoX or OLMo saw, as `export` does; it changes nothing.",
    ),
    "spikes": Named(
        "spikes:spikes",
        "Show the rows that lost more than others of their source in the same steps, and their documents.",
    ),
    "find": Named(
        "find:find",
        "Find what texts and corpora have in common: exact spans, in one pass over the tokens, without an "
        "index.",
    ),
    "plans": Named("plans:app", "List, show and compare the plans a server has seen."),
    "view": Named("view:app", "Make and show views: documents of a corpus, chosen and repeated."),
}
"""By name. A test holds the texts to what the commands say of themselves."""

app = App(
    name="corpus-server",
    help="Serve large files of token ids to pretraining runs.",
    cls=lazy_group(COMMANDS),
    pretty_exceptions_enable=False,
    add_completion=True,
)


def main() -> None:
    """Run the command line; an error that users can fix is one line on standard error and code 1 or 2."""
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
        is_changed = isinstance(error, CorpusChanged | ReadFailed)
        _end_with(error.with_remedy, CHANGED if is_changed else MISTAKE)
    except UnicodeEncodeError as error:  # of an argument that names no file
        _end_with(f"expected text in UTF-8, got {error.object[:60]!a}")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush once more
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        _end_with(f"{where}reading or writing failed: {reason_of(error)}")


def _end_with(message: str, code: int = MISTAKE) -> NoReturn:
    from rich.console import Console  # 0.05 s of CPU, which a command without an error saves
    from rich.text import Text

    shown = Text.assemble(("error:", "bold red"), " ", printable(message))
    Console(stderr=True, highlight=False).print(shown, soft_wrap=True)
    sys.exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"corpus-server {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
