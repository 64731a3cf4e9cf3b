"""`corpus-client doctor` as a person meets it, on real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from corpus_client.tools.app import app
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
    assert sum(bandwidth["measured"]["stats"]["wait"].values()) > 0
    assert bottleneck["measured"]["shortest_step_seconds"] == pytest.approx(
        8 * 16 / bandwidth["measured"]["tokens_per_second"]
    )
    assert {"cores", "page-locking", "GPU"} <= set(checks)


def test_a_table_for_people(server: RunningServer) -> None:
    done = doctor(server.url, *SMALL, "--step-seconds", "60", "--world-size", "4")
    assert (done.exit_code, done.stderr) == (0, "")
    for line in (
        f"ok    server        {server.url}: ready, version 0.1.0, corpora: web",
        "ok    plan          ",
        "ok    bottleneck    data is not: a rank needs ",
    ):
        assert line in done.stdout, done.stdout


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


def test_nobody_there(path: Path) -> None:
    code, checks = examined("http://127.0.0.1:1")
    assert code == 1
    assert set(checks) == {"server", "cores", "page-locking", "GPU"}


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


def test_replicas_with_other_corpora(server: RunningServer, tmp_path: Path) -> None:
    shard = write_raw(tmp_path / "a.bin", some_tokens(4000))
    with RunningServer({"code": shard}, tmp_path) as other:
        code, checks = examined(server.url, other.url)
        assert (code, checks["corpus"][0]["found"]) == (1, "all servers have none in common")
        code, checks = examined(server.url, other.url, "--corpus", "web")
        assert (code, checks["corpus"][0]["found"]) == (1, f"'web' is not served by {other.url}")


def test_several_corpora_are_listed_where_none_is_named(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(4000))
    with RunningServer({"code": path, "web": path}, tmp_path) as server:
        code, checks = examined(server.url)
    (check,) = checks["corpus"]
    assert (code, check["status"], check["found"]) == (0, "ok", "served are code, web")
    assert "--corpus code" in check["advice"]
    assert "bandwidth" not in checks


def test_a_plan_that_the_corpus_cannot_have(server: RunningServer) -> None:
    done = doctor(server.url, "--seq-len", "5000", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (done.exit_code, checks["plan"]["status"]) == (1, "fail")
    assert "seq_len" in checks["plan"]["found"]
    assert "bandwidth" not in checks


def test_something_else_on_that_port(server: RunningServer) -> None:
    code, checks = examined(f"{server.url}/prefix")
    assert code == 1
    assert "something else answers" in checks["server"][0]["found"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ftp://data:8000",), "error: url must be http://host:port"),
        (
            ("http://127.0.0.1:1", "--world-size", "3"),
            "error: world_size must divide batch_size, got 3 and 8",
        ),
        (("http://127.0.0.1:1", "--step-seconds", "0"), "error: step_seconds must be above 0, got 0.0"),
        (
            ("http://127.0.0.1:1", "--device", "gpu"),
            "error: device must be 'cpu' or an accelerator that torch sees here, got 'gpu'",
        ),
        (("http://127.0.0.1:1", "--device", "cuda:99"), "error: device must be "),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = doctor(*arguments, *(() if "--device" in arguments else SMALL))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
