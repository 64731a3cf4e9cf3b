"""`corpus-client doctor` as a person meets it, on real servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from corpus_client.tools import report
from corpus_client.tools.app import app
from corpus_client.tools.checks import MEANINGS
from tests.conftest import ServedCorpus
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

SMALL = ("--seq-len", "16", "--batch-size", "8", "--seconds", "0.2", "--device", "cpu")


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def examined(*arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit code, and the checks by name."""
    done = doctor(*arguments, *SMALL, "--json")
    assert done.stderr == ""
    said = json.loads(done.stdout)
    checks: dict[str, list[dict[str, Any]]] = {}
    for check in said["checks"]:
        checks.setdefault(check["name"], []).append(check)
        assert check["status"] == "ok" or check["advice"]
    assert (done.exit_code == 1) == (said["status"] == "fail")
    return done.exit_code, checks


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "a.sock"


@pytest.fixture(scope="module")
def server(
    corpora: dict[str, ServedCorpus], path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """One on a port and a Unix socket, which are two replicas of one service."""
    arguments = ["--uds", str(path)]
    folder = tmp_path_factory.mktemp("server")
    with RunningServer({"web": corpora["web"].path}, folder, arguments=arguments) as server:
        yield server


def test_all_is_well(server: RunningServer, path: Path) -> None:
    code, checks = examined(server.url, f"uds://{path}")
    assert code == 0, "\n".join(check["found"] for each in checks.values() for check in each)
    assert [check["status"] for check in checks["server"]] == ["ok", "ok"]
    assert checks["versions"][0]["status"] == "ok"
    assert checks["corpus"][0]["measured"]["num_tokens"] == 9834
    assert "2 replicas agree on it" in checks["plan"][0]["found"]
    for check in checks["latency"]:
        figures = check["measured"]
        for name in ("token_seconds", "row_seconds"):
            assert 0 < figures[name]["median"] <= figures[name]["p99"]
    (bandwidth,), (bottleneck,) = checks["bandwidth"], checks["bottleneck"]
    assert bandwidth["measured"]["bytes_per_second"] == pytest.approx(
        bandwidth["measured"]["tokens_per_second"] * 2
    )
    waited = bandwidth["measured"]["stats"]["wait"]
    longest = max(waited, key=waited.__getitem__)
    meant = f"{longest} ({MEANINGS[longest]})"
    said = bandwidth["found"]
    assert said.partition("this loop, which does nothing else, waited for ")[2].count(f"{meant} ") == 1, said
    assert bottleneck["measured"]["shortest_step_seconds"] == pytest.approx(
        8 * 16 / bandwidth["measured"]["tokens_per_second"]
    )
    assert {"cores", "page-locking", "GPU"} <= set(checks)


def test_a_server_that_is_silent_for_a_while_is_not_called_not_ready(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt takes a quarter of the time for a request: of a busy machine, a server may get less."""
    monkeypatch.setattr(report, "RESPONSE_SECONDS", 8.0)
    stopped = [psutil.Process(pid) for pid in (server.pid, *server.worker_pids())]
    going_on = threading.Timer(3.0, lambda: [each.resume() for each in stopped])
    for each in stopped:
        each.suspend()
    going_on.start()
    code, checks = examined(server.url)
    going_on.join()
    assert (code, checks["server"][0]["status"]) == (0, "ok"), checks["server"]


def test_data_that_comes_too_slowly_fails_with_a_cause_and_a_fix(server: RunningServer) -> None:
    code, checks = examined(server.url, "--step-seconds", "1e-9")
    assert code == 1
    (check,) = checks["bottleneck"]
    assert check["status"] == "fail"
    assert check["measured"]["cause"] in ("server", "network", "host", "retry")
    assert f"the cause is {check['measured']['cause']}" in check["found"]


def test_a_replica_that_is_away_fails_and_the_others_are_measured(server: RunningServer, path: Path) -> None:
    code, checks = examined(server.url, "http://127.0.0.1:1", f"uds://{path}.none")
    assert code == 1
    alive, away, none = checks["server"]
    assert (alive["status"], away["status"], none["status"]) == ("ok", "fail", "fail")
    assert away["found"].startswith("not reachable: http://127.0.0.1:1: ")
    assert "on this port" in away["advice"]
    assert "--uds" in none["advice"]
    assert checks["bandwidth"][0]["status"] == "ok"


def test_a_server_that_is_not_ready_says_why(tmp_path: Path) -> None:
    shard = write_raw(tmp_path / "a.bin", some_tokens(4000))
    with RunningServer({"a": shard}, tmp_path) as server:
        shard.write_bytes(b"\0" * 100)
        code, checks = examined(server.url)
    assert code == 1
    (check,) = checks["server"]
    assert "not ready: " in check["found"]
    assert "a.bin" in check["found"]


def test_replicas_with_other_content_under_one_name(server: RunningServer, tmp_path: Path) -> None:
    shard = write_raw(tmp_path / "a.bin", some_tokens(4000))
    with RunningServer({"web": shard}, tmp_path) as other:
        code, checks = examined(server.url, other.url)
    assert code == 1
    (check,) = checks["corpus"]
    assert check["found"].startswith("'web' has other content on each: ")
    assert server.url in check["found"]
    assert other.url in check["found"]
    assert "plan" not in checks


def test_options_of_a_run_need_the_name_of_one_of_several_corpora(tmp_path: Path) -> None:
    shard = write_raw(tmp_path / "a.bin", some_tokens(4000))
    with RunningServer({"a": shard, "b": shard}, tmp_path) as server:
        looked, asked = (
            json.loads(doctor(server.url, "--device", "cpu", "--json", *options).stdout)["checks"]
            for options in ((), ("--step-seconds", "0.25", "--seq-len", "16"))
        )
    (looked_at,), (refused,) = (
        [each for each in made if each["name"] == "corpus"] for made in (looked, asked)
    )
    assert (looked_at["status"], looked_at["found"]) == ("ok", "served are a, b")
    assert refused["status"] == "fail"
    assert refused["found"] == "served are a, b: nothing was measured for --seq-len, --step-seconds"
    assert looked_at["advice"] == refused["advice"] == "to compare and measure, name one of them: --corpus a"


def test_something_else_on_that_port(server: RunningServer) -> None:
    code, checks = examined(f"{server.url}/prefix")
    assert code == 1
    assert "something else answers" in checks["server"][0]["found"]
