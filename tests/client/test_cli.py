"""`corpus-client bench` on a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.client.reference_server import ReferenceServer


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from corpus_client.cli import main; main()", "bench", *arguments]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture
def small(server: ReferenceServer) -> list[str]:
    return [
        server.url,
        "--corpus",
        "web",
        "--seq-len",
        "16",
        "--batch-size",
        "8",
        "--seconds",
        "0.3",
        "--device",
        "cpu",
        "--order",
        "sequential",
    ]


def test_json_for_machines(small: list[str]) -> None:
    done = bench(*small, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == result["batches"] * 8 * 17
    assert result["bytes"] == 2 * result["tokens"]
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])
    assert 0 <= result["wait_p50_seconds"] <= result["wait_p99_seconds"]
    assert result["steps_per_request"] == 256
    assert result["retries"] == 0


def test_table_for_people(small: list[str]) -> None:
    done = bench(*small, "--stored")
    assert done.returncode == 0, done.stderr
    for word in ("tokens/s", "MB/s", "p50", "p99", "steps per request", "CPU s per 10^9 tokens", "retries"):
        assert word in done.stdout


def test_error_is_one_line_and_exit_code_1(server: ReferenceServer) -> None:
    done = bench(server.url, "--corpus", "webb", "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no corpus is named 'webb'")
    assert "Traceback" not in done.stderr


def test_brackets_in_an_error_are_no_markup(server: ReferenceServer) -> None:
    """And a long one is one line, however narrow the terminal."""
    name = "[red]" + "b" * 150
    done = bench(server.url, "--corpus", name)
    assert done.returncode == 1
    assert repr(name) in done.stderr
    assert len(done.stderr.splitlines()) == 1
