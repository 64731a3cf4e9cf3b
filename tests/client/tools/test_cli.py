"""`corpus-client bench` on a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from corpus_client import __version__
from corpus_client.tools.app import COMMANDS, app
from tests.client.reference_server import ReferenceServer
from tests.layers import loaded_by_command


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def test_the_version_is_printed() -> None:
    code = "from corpus_client.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"corpus-client {__version__}\n"


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_version_and_the_list_of_commands_are_light(option: str) -> None:
    assert not loaded_by_command(option) & {"torch", "numpy", "httpx", "rich"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_nothing_that_it_does_not_need(command: str) -> None:
    """Torch takes a second of CPU, NumPy and httpx 0.15 s."""
    loaded = loaded_by_command(command, "--help")
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "httpx"}


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
    # Two requests are on the wire: where a late one is asked for elsewhere, the other is repeated, too.
    assert stats["num_retries"] <= 2 * stats["num_hedged"]


def test_error_is_one_line_and_exit_code_2(server: ReferenceServer) -> None:
    done = bench(server.url, "--corpus", "webb", "--json")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no corpus is named 'webb'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--corpus", "code"], "--corpus is given twice"),
        (["--no-verify", "--verify"], "--verify is given twice"),
    ],
)
def test_nothing_that_was_said_is_dropped(small: list[str], more: list[str], message: str) -> None:
    done = bench(*small, *more)
    assert done.exit_code == 2
    assert message in done.stderr


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
