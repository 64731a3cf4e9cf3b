"""Groups of commands: a command is imported when it is called, and not for the list of all."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TextIO, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from corpus_server import watched
from corpus_server.corpus_spec import OPTIONS
from corpus_server.errors import InvalidParameter

_TABLE_COLUMNS = 110
"""Of the narrowest terminal on which the table of the options of `serve` cuts none of their names."""

_HELD_CHARACTERS = 1 << 16  # `export` prints gigabytes

UNREAD = 141
"""Nobody reads the output any more (`| head`): what a shell says of a program that SIGPIPE ended."""

_LARGEST = (1 << 63) - 1

F = TypeVar("F", bound=Callable[..., Any])


class _Parameters:
    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options; nothing follows a flag, so its help names no type."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return parameters


def _check_filled(args: list[str]) -> None:
    """Refuse an empty value, as of a variable that is not set: as a path, it would be the current folder."""
    for before, each in zip(["", *args], args, strict=False):
        name, is_joined, value = each.partition("=")
        if not each or (name.startswith("--") and is_joined and not value):
            given = name or (before if before.startswith("-") else "an argument")
            raise InvalidParameter(f"{given} is empty; give it a value, or leave it out")


def _check_numbers(ctx: Any, parameters: Sequence[Any]) -> None:
    """Refuse numbers with which NumPy and SQLite cannot count."""
    for each in parameters:
        number, name = ctx.params.get(each.name), each.opts[0]
        if isinstance(number, int) and abs(number) > _LARGEST:
            raise InvalidParameter.expected(name, f"at most {_LARGEST} (2^63 - 1)", number)
        if isinstance(number, float) and not math.isfinite(number):
            raise InvalidParameter.expected(name, "a finite number", number)


def _check_given_once(command: Any, ctx: Any, args: list[str]) -> None:
    """Refuse an option that is given twice, of which the first would be dropped.

    Of `serve` the last one counts: scripts and images that call it say others before those of a user.
    """
    _, _, given = command.make_parser(ctx).parse_args([*args])
    for option, count in Counter(given).items():
        if count > 1 and not option.multiple and command.name != "serve":
            raise InvalidParameter(f"{option.opts[0]} is given twice; give it once")


class _Command(_Parameters, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse values that no parameter takes; say where an option of a corpus belongs, or what one is."""
        _check_filled(args)
        try:
            _check_given_once(self, ctx, args)
            parsed: list[str] = super().parse_args(ctx, args)
        except Exception as error:  # a UsageError of click, or of the copy of it that typer brings along
            message = str(getattr(error, "message", ""))
            takes_one = any(each.metavar == "CORPUS" and each.nargs == 1 for each in self.params)
            if takes_one and "unexpected extra argument" in message:
                said = (
                    f"{message}: {ctx.info_name} takes one corpus. Several files of it are one argument, "
                    "'shards/*.bin' in quotes or a.bin,b.bin; for several corpora run the command for each."
                )
                raise typer.BadParameter(said, ctx=ctx) from None
            name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
            if name not in OPTIONS:
                raise
            said = f"No such option: --{name}; a corpus has it behind its path: PATH,{name}=VALUE"
            raise typer.BadParameter(said, ctx=ctx) from None
        _check_numbers(ctx, self.params)
        return parsed

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; on a narrow terminal without a table, which would cut the names of options."""
        if shutil.get_terminal_size().columns >= _TABLE_COLUMNS:
            super().format_help(ctx, formatter)
            return
        super(TyperCommand, self).format_help(ctx, formatter)
        formatter.buffer = [each.replace("\\[", "[") for each in formatter.buffer]


class _Group(_Parameters, TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name the route where somebody gives a question to a server as a command, as `usage`."""
        name = args[0]
        if self.get_command(ctx, name) is None and (routes := _routes_of(name)):
            said = f"{name} is no command, but a question to a server: GET {' or '.join(routes)}"
            raise typer.BadParameter(said, ctx=ctx)
        return super().resolve_command(ctx, args)


def _routes_of(name: str) -> list[str]:
    from corpus_server.responses import questions  # noqa: F401  # 0.3 s of CPU; it registers them
    from corpus_server.responses.question import QUESTIONS

    return sorted(each.path for each in QUESTIONS if each.path.endswith(f"/{name}"))


class App(typer.Typer):
    """Commands whose help shows no `<bool>`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": _Group, "no_args_is_help": True, "add_completion": False, **options})

    def command(self, *arguments: Any, **options: Any) -> Callable[[F], F]:
        """Register a command."""
        return super().command(*arguments, cls=_Command, **options)


@dataclass(frozen=True, slots=True)
class Named:
    """A command of `corpus_server.cli` that is not imported yet.

    Args:
        place: `MODULE:NAME` of a function, or of the `App` of a group.
        about: the first paragraph of its help.
    """

    place: str
    about: str


class LazyCommands(Mapping[str, Any]):
    """Commands by name, each imported when it is asked for."""

    def __init__(self, named: Mapping[str, Named]) -> None:
        self.named = named

    def __getitem__(self, name: str) -> Any:
        """Import a command."""
        module, _, attribute = self.named[name].place.partition(":")
        found = getattr(import_module(f"corpus_server.cli.{module}"), attribute)
        if not isinstance(found, App):
            function, found = found, App()
            found.command(name)(function)
        return typer.main.get_command(found)

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.named)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.named)


def lazy_group(named: Mapping[str, Named]) -> type[TyperGroup]:
    """Return the class of a group of these commands, whose help imports none of them."""

    class Group(_Group):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "commands": {}})
            self.commands = LazyCommands(named)  # type: ignore[assignment]  # none is added

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Show the help where nothing is asked for; rich, which is not used here, would print it."""
            if not args and not ctx.resilient_parsing:
                typer.echo(ctx.get_help(), err=True)
                ctx.exit(2)
            return super().parse_args(ctx, args)

        def make_context(self, *arguments: Any, **options: Any) -> Any:
            with reader_may_end():  # --help and --version print here
                return super().make_context(*arguments, **options)

        def invoke(self, ctx: Any) -> Any:
            with reader_may_end(), watched.watching(), _output_checked():
                return super().invoke(ctx)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            # Without rich, which takes 0.1 s of CPU.
            super(TyperGroup, self).format_help(ctx, formatter)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            with formatter.section("Commands"):
                formatter.write_dl([(name, each.about) for name, each in named.items()])

    return Group


@contextmanager
def reader_may_end() -> Iterator[None]:
    """End without a word if nobody reads the output any more; typer would end with 1, which means damage."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would flush once more
        sys.exit(UNREAD)


class _CheckedOutput(io.TextIOBase):
    """Standard output that shows what was printed once no file has changed that the command read."""

    def __init__(self, shown: TextIO) -> None:
        self._shown, self._is_terminal = shown, shown.isatty()
        self._held = io.StringIO()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # rich asks whether it has lines of boxes
        return self._shown.encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        return self._shown.fileno()

    def write(self, text: str) -> int:
        self._held.write(text)
        if self._held.tell() > _HELD_CHARACTERS or (self._is_terminal and "\n" in text):
            self.flush()
        return len(text)

    def flush(self) -> None:
        held, self._held = self._held, io.StringIO()
        watched.check()
        self._shown.write(held.getvalue())
        self._shown.flush()


@contextmanager
def _output_checked() -> Iterator[None]:
    output = _CheckedOutput(sys.stdout)
    with redirect_stdout(output):
        try:
            yield
        finally:
            output.flush()
