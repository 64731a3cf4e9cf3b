"""`corpus-client bench` on a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from corpus_client import __version__
from corpus_client.tools.app import COMMANDS, app
from tests.client.reference_server import ReferenceServer
from tests.layers import loaded_by


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_the_version_is_printed() -> None:
    code = "from corpus_client.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"corpus-client {__version__}\n"


def test_the_version_and_the_list_of_commands_are_light() -> None:
    """Torch takes seconds: nothing is imported before it is needed."""
    for option in ("--version", "--help"):
        run = f"""
import contextlib, io, sys
from corpus_client.__main__ import main
sys.argv = ["corpus-client", "{option}"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
"""
        assert not loaded_by(run) & {"torch", "numpy", "httpx", "rich"}


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert " ".join(command.help.split("\n\n")[0].split()) == COMMANDS[name]


def test_a_shell_completes_the_commands() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("corpus-client")],
        env={
            **os.environ,
            "_CORPUS_CLIENT_COMPLETE": "complete_bash",
            "COMP_WORDS": "corpus-client do",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["doctor"]


@pytest.fixture
def small(server: ReferenceServer) -> list[str]:
    shape = ["--seq-len", "16", "--batch-size", "8", "--order", "sequential"]
    address = server.url.removeprefix("http://")
    return [address, "--corpus", "web", *shape, "--seconds", "0.3", "--device", "cpu"]


def test_json_for_machines(small: list[str]) -> None:
    done = bench(*small, "--json")
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    stats = result["stats"]
    assert stats["num_tokens"] == stats["num_batches"] * 8 * 16
    assert result["tokens_per_second"] == pytest.approx(stats["num_tokens"] / stats["seconds"])
    assert result["bytes_per_second"] == pytest.approx(2 * result["tokens_per_second"])
    assert 0 <= result["wait"]["median"] <= result["wait"]["p99"]
    assert 0 <= result["wait_share"] <= 1
    assert result["steps_per_request"] == 256
    assert stats["num_retries"] == 0


def test_table_for_people(small: list[str]) -> None:
    done = bench(*small, "--stored")
    assert done.exit_code == 0, done.stderr
    for word in ("tokens/s", "MB/s", "p50", "p99", "steps per request", "CPU s per 10^9 tokens", "retries"):
        assert word in done.stdout


def test_error_is_one_line_and_exit_code_2(server: ReferenceServer) -> None:
    done = bench(server.url, "--corpus", "webb", "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no corpus is named 'webb'")
    assert "Traceback" not in done.stderr


def test_brackets_in_an_error_are_no_markup(server: ReferenceServer) -> None:
    """And a long one is one line, however narrow the terminal."""
    name = "[red]" + "b" * 150
    done = bench(server.url, "--corpus", name)
    assert done.exit_code == 2
    assert repr(name) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_headers_and_a_token_go_with_every_request(
    server: ReferenceServer, small: list[str], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret-1\n")
    done = bench(*small, "--header", "X-Run: seven", "--token-file", str(token))
    assert done.exit_code == 0, done.stderr
    assert server.headers
    for headers in server.headers:
        lowered = {name.lower(): value for name, value in headers.items()}
        assert (lowered["x-run"], lowered["authorization"]) == ("seven", "Bearer secret-1")
        assert lowered["corpus-run"] == "bench"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--header", "seven"], "error: --header must be 'NAME: VALUE', got 'seven'"),
        (["--token-file", "/no/such"], "error: auth must name a file with a token, got '/no/such'"),
    ],
)
def test_credentials_that_cannot_be_read_are_one_line(
    small: list[str], arguments: list[str], message: str
) -> None:
    done = bench(*small, *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
