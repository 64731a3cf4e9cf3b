"""The `corpus-client` command with all its commands, each of which is imported when it is called."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from corpus_client import __version__

COMMANDS = {
    "bench": "Measure batches as a training loop sees them, which does nothing but ask for the next.",
    "doctor": "Check servers, replicas and this machine, and answer: is data my bottleneck?",
    "export": "Write the global batches of steps [START, STOP) to a file, which appears when it is complete.",
    "transfer": "Measure copies: within host memory, to the GPU from each kind of memory, within it, and "
    "back.",
}
"""By name, which is that of its module and function. A test holds the texts to what the commands say."""


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


class _LazyCommands(MutableMapping[str, Any]):
    """Commands by name: torch, which they import, takes seconds that `--help` need not wait for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        made.command(name, cls=_Command)(getattr(import_module(f"corpus_client.tools.{name}"), name))
        return typer.main.get_command(made)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError("commands are declared in COMMANDS")

    def __delitem__(self, name: str) -> None:
        raise TypeError("commands are declared in COMMANDS")


class _Group(_Parameters, TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": {}})
        self.commands = _LazyCommands()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without rich, which takes 0.1 s of CPU."""
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, and import none."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


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
