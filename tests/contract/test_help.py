"""The help of both programs: an example that the command takes, and no type behind a flag."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from corpus_client.tools.app import app as client
from corpus_server.cli import app as server


def commands(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words that call a command, and the command."""
    for name, command in group.commands.items():
        yield from (
            commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]
        )


PROGRAMS = {"corpus-server": server, "corpus-client": client}
COMMANDS = [each for name, app in PROGRAMS.items() for each in commands(get_command(app), (name,))]


@pytest.mark.parametrize(
    ("words", "command"), COMMANDS, ids=lambda each: " ".join(each) if isinstance(each, tuple) else ""
)
def test_the_example_is_taken(
    words: tuple[str, ...], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("arguments.txt", "plan.json", "run.json"):
        (tmp_path / name).touch()
    shown = CliRunner().invoke(PROGRAMS[words[0]], [*words[1:], "--help"], env={"COLUMNS": "200"}).stdout
    assert "<bool>" not in shown
    found = re.search(rf"Example: ({' '.join(words)} .*?) *$", shown, re.MULTILINE)
    assert found is not None
    # Refuses what it does not know.
    command.make_context(words[-1], shlex.split(found[1])[len(words) :]).close()
