"""The `corpus-client` command with all its commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from corpus_client import __version__
from corpus_client.tools.bench import bench
from corpus_client.tools.doctor import doctor
from corpus_client.tools.export import export
from corpus_client.tools.transfer import transfer


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


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for _command in (bench, doctor, export, transfer):
    app.command(cls=_Command)(_command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"corpus-client {__version__}")
        raise typer.Exit


@app.callback(help="Client of corpus-server.")
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
