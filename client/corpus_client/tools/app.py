"""The `corpus-client` command with all its commands, each of which is imported when it is called."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from corpus_client import __version__

UNREAD = 141
"""Nobody reads the output any more (`| head`): what a shell says of a program that SIGPIPE ended."""

_LARGEST = (1 << 63) - 1

COMMANDS = {
    "bill": "Write what steps [START, STOP) are made of, with a root that proves each. Goes on where it was "
    "ended.",
    "bench": "Measure batches as a training loop sees them, which does nothing but ask for the next.",
    "doctor": "Check servers, replicas and this machine, and answer: is data my bottleneck?",
    "export": "Write the global batches of steps [START, STOP) to a file, which appears when it is complete.",
    "prove": "Write the proof that a step belongs to a bill: hashes beside the way from its leaf to the "
    "root.",
    "verify-bill": "Check a bill against the tokens that its plan gives: those of the step of a proof, or of "
    "all steps.",
    "transfer": "Measure copies: within host memory, to the GPU from each kind of memory, within it, and "
    "back.",
}
"""By name, which is that of its module and function, with `_` for `-`. A test holds the texts to what the
commands say."""


class _Parameters:
    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options; nothing follows a flag, so its help names no type."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return parameters


def _unusable(args: list[str]) -> str | None:
    """Say which value is empty, as of an unset variable: as a path, it would be the current folder."""
    for before, each in zip(["", *args], args, strict=False):
        name, is_joined, value = each.partition("=")
        if not each or (name.startswith("--") and is_joined and not value):
            given = name or (before if before.startswith("-") else "an argument")
            return f"{given} is empty; give it a value, or leave it out"
    return None


def _uncountable(ctx: Any, parameters: Sequence[Any]) -> str | None:
    """Say which number is none that NumPy and servers can count with."""
    for each in parameters:
        number, name = ctx.params.get(each.name), each.opts[0]
        if isinstance(number, int) and abs(number) > _LARGEST:
            return f"{name} must be at most {_LARGEST} (2^63 - 1), got {number}"
        if isinstance(number, float) and not math.isfinite(number):
            return f"{name} must be a finite number, got {number}"
    return None


def _dropped(command: Any, ctx: Any, args: list[str]) -> str | None:
    """Say which option is given twice, of which the first would be dropped."""
    _, _, given = command.make_parser(ctx).parse_args([*args])
    twice = [each.opts[0] for each, count in Counter(given).items() if count > 1 and not each.multiple]
    return f"{twice[0]} is given twice; give it once" if twice else None


class _Command(_Parameters, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse values that no parameter takes, as `corpus-server` does."""
        parsed: list[str] = []
        if (wrong := _unusable(args) or _dropped(self, ctx, args)) is None:
            parsed = super().parse_args(ctx, args)
            wrong = _uncountable(ctx, self.params)
        if wrong is not None:
            raise import_module("corpus_client.tools.report").ended(wrong)
        return parsed


class _LazyCommands(Mapping[str, Any]):
    """Commands by name: torch, which they import, takes seconds that `--help` need not wait for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        made = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        module = name.replace("-", "_")
        made.command(name, cls=_Command)(getattr(import_module(f"corpus_client.tools.{module}"), module))
        return typer.main.get_command(made)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@contextmanager
def _reader_may_end() -> Iterator[None]:
    """End without a word if nobody reads the output any more; typer would end with 1, a finding."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush once more
        sys.exit(UNREAD)


class _Group(_Parameters, TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": {}})
        self.commands = _LazyCommands()  # type: ignore[assignment]  # none is added

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help where nothing is asked for; rich, which is not used here, would print it."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _reader_may_end():  # --help and --version print here
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _reader_may_end():
            return super().invoke(ctx)

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
