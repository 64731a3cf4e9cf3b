"""Run the `corpus-client` command, or say which extra of the package it lacks."""

from __future__ import annotations

import sys
from typing import Any

EXTRAS = {"typer": "tools", "rich": "tools", "torch": "torch", "threadpoolctl": "torch"}
"""What the commands import, and which extra of `corpus-client` installs it."""


def make_app() -> Any:
    """Return the `typer.Typer` with all commands; imports what they need."""
    import typer

    from corpus_client.tools.bench import bench
    from corpus_client.tools.doctor import doctor
    from corpus_client.tools.export import export
    from corpus_client.tools.transfer import transfer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback(help="Client of corpus-server.")(lambda: None)
    for command in (bench, doctor, export, transfer):
        app.command()(command)
    return app


def main() -> None:
    """Enter the command; end with one sentence if a package of its extras is not installed."""
    try:
        app = make_app()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in EXTRAS:
            raise
        sys.exit(
            f"corpus-client: the command needs {name}, which is not installed; "
            f"pip install 'corpus-client[{EXTRAS[name]}]'"
        )
    app()


if __name__ == "__main__":
    main()
