"""How a command ends on an error that is the user's to mend."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape

from corpus_client.errors import CorpusClientError


def exit_on(error: CorpusClientError) -> typer.Exit:
    """Print it in one line; brackets in it are not markup. The caller raises what is returned."""
    Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
    return typer.Exit(1)
