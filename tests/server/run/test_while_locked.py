"""`--while-locked`: a server for the processes that hold a lock, which ends with the last of them."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import unquote

import psutil
import pytest

import corpus_server
from corpus_server.errors import CorpusServerError
from tests.conftest import ServedCorpus
from tests.serving import RunningServer, check_problem, environment, run_here, wait_until


@pytest.fixture
def path(corpora: dict[str, ServedCorpus]) -> Path:
    return corpora["web"].path


def test_ends_with_the_last_lock_and_holds_it_to_its_end(path: Path, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with lock.open() as one, lock.open() as other, lock.open() as late:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(other, fcntl.LOCK_SH)
        options = ("--while-locked", str(lock), "--drain-seconds", "0")
        with RunningServer({"web": path}, tmp_path, arguments=options) as server:
            one.close()
            assert server.get("/readyz").status == 200
            other.close()
            wait_until(lambda: "no process holds" in server.log(), "it goes on", 20)
            fcntl.flock(late, fcntl.LOCK_SH)  # comes too late, and waits until the server has ended
            wait_until(lambda: _is_zombie(server.pid), "it goes on", 20)


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_says_where_files_lie_to_nobody_else(path: Path, tmp_path: Path) -> None:
    """On its Unix socket, in a folder of its user; a port is everybody's on this host."""
    with corpus_server.background(f"web={path}") as url, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(unquote(url.removeprefix("uds://")))
        asked = http.client.HTTPConnection("localhost")
        asked.sock = connection
        asked.request("GET", "/v1/corpora/web/paths")
        paths = json.load(asked.getresponse())["paths"]
    assert paths == {each.name: str(each) for each in path.iterdir()}
    with corpus_server.background(f"web={path}", port=0) as url, pytest.raises(HTTPError, match="403"):
        get(f"{url}/v1/corpora/web/paths")
    with RunningServer({"web": path}, tmp_path) as server:
        check_problem(server.get("/v1/corpora/web/paths"), 403, "forbidden", parameter="name")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "tokens.toml"], "tokens for servers that others reach"),
        (["--host", "0.0.0.0", "--allow-anyone"], "allow_anyone for servers that others reach"),
        (["--tls-certificate", "a", "--tls-key", "b"], "tls_certificate for servers that others reach"),
    ],
    ids=["tokens", "host", "tls"],
)
def test_refuses_what_is_for_others(path: Path, options: list[str], message: str) -> None:
    done = run_here("serve", path, "--port", "0", "--while-locked", path, *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_lock_that_is_not_there_is_refused(path: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "corpus_server", "serve", str(path), "--port", "0"]
    words += ["--state-dir", str(tmp_path), "--while-locked", str(tmp_path / "none")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none cannot be locked: No such file or directory" in done.stderr


def test_background_serves_while_its_block_runs(path: Path) -> None:
    before = set(psutil.Process().children())
    with corpus_server.background(f"web={path}", port=0, workers=2) as url:
        assert get(f"{url}/readyz")["corpora"] == ["web"]
    with corpus_server.background(path) as url:
        assert url.startswith("uds:///")
    assert set(psutil.Process().children()) == before


def test_background_says_why_it_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(CorpusServerError, match="none: expected a token file or a folder of shards"),
        corpus_server.background(tmp_path / "none"),
    ):
        pass


def test_background_ends_with_a_killed_process(path: Path, tmp_path: Path) -> None:
    script = (
        "import corpus_server, os, signal\n"
        f"with corpus_server.background({str(path)!r}):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(TMPDIR=str(tmp_path)), check=False)
    assert done.returncode == -signal.SIGKILL

    def left() -> list[psutil.Process]:
        found = []
        for each in psutil.process_iter():
            try:
                if each.pid != os.getpid() and each.environ().get("TMPDIR") == str(tmp_path):
                    found.append(each)
            except psutil.Error:
                continue
        return found

    wait_until(lambda: not left(), lambda: f"left: {left()}", 20)
