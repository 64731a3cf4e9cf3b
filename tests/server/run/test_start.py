"""Catalogue row 11: a start that fails is one clear line and an exit code, and never a loop."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.serving import command, environment


def start(folder: Path, *arguments: str | Path, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run a server that cannot start to its end."""
    state = [] if "--state-dir" in arguments else ["--state-dir", folder / "state"]
    port = [] if "--port" in arguments else ["--port", "0"]
    return subprocess.run(
        command("serve", *arguments, *port, *state, prelude=prelude),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=90,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of what goes wrong."""
    write_raw(tmp_path / "web.bin", some_tokens(1000))
    (tmp_path / "broken.toml").write_text("[server")
    (tmp_path / "unknown.toml").write_text("[server]\nprot = 1\n")
    (tmp_path / "none.toml").write_text('[corpora.web]\npath = "missing"\n')
    (tmp_path / "tokens.toml").write_text('[tokens.a]\nsha256 = "1"\n')
    (tmp_path / "file").write_text("")
    (tmp_path / "cert.pem").write_text("no certificate")
    return tmp_path


CASES: dict[str, tuple[list[str], str]] = {
    "broken-configuration": (["--config", "broken.toml"], "cannot read broken.toml"),
    "unknown-setting": (["--config", "unknown.toml"], "unknown prot; known are"),
    "no-corpus": ([], "no corpus to serve"),
    "missing-corpus": (["missing"], "missing"),
    "missing-corpus-of-the-file": (["--config", "none.toml"], "missing"),
    "missing-tokens": (["web.bin", "--tokens", "absent.toml"], "cannot read tokens from"),
    "broken-tokens": (["web.bin", "--tokens", "tokens.toml"], "sha256 must be 64"),
    "missing-key": (
        ["web.bin", "--tls-certificate", "cert.pem", "--tls-key", "absent.pem"],
        "TLS cannot use",
    ),
    "no-certificate": (
        ["web.bin", "--tls-certificate", "cert.pem", "--tls-key", "cert.pem"],
        "TLS cannot use",
    ),
    "state-folder": (["web.bin", "--state-dir", "file/state"], "cannot be written"),
    "unknown-host": (
        ["web.bin", "--host", "no.such.host.invalid", "--allow-anyone"],
        "cannot listen on host",
    ),
    "exposed-without-tokens": (["web.bin", "--exposed"], "exposed is for servers that strangers reach"),
}


@pytest.mark.parametrize(("arguments", "said"), CASES.values(), ids=CASES)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], said: str) -> None:
    check(start(folder, *arguments), said)


def check(ended: subprocess.CompletedProcess[str], said: str) -> None:
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert said in errors[0]
    assert "Traceback" not in ended.stderr
    assert "is ready" not in ended.stderr


def test_a_port_that_is_taken(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        check(start(folder, "web.bin", "--port", str(port)), f"port {port}: Address already in use")


def test_workers_that_are_killed_while_they_start_end_the_server(folder: Path) -> None:
    """As the kernel does where memory is short; the failure was: a server that tried for ever."""
    module = folder / "killed.py"
    module.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    prelude = (
        f"import sys; sys.path.append({str(folder)!r}); "
        "import corpus_server.run.supervisor as s; s.WORKER_MODULE = 'killed'; s.MAX_BACK_OFF_SECONDS = 0.1"
    )

    ended = start(folder, "web.bin", "--workers", "2", prelude=prelude)
    check(ended, "5 workers in a row were killed while starting; the last: worker")
    assert ended.stderr.count("SIGKILL") < 9
