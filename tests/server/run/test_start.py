"""Catalogue row 11: a start that fails is one clear line and an exit code, and never a loop."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from corpus_server.user_files import MAX_BYTES
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, command, environment, run_here, wait_until
from tests.views import write_corpus, write_view


def start(folder: Path, *arguments: str | Path, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run a server that cannot start to its end."""
    state = [] if "--state-dir" in arguments else ["--state-dir", folder / "state"]
    return subprocess.run(
        command("serve", *arguments, "--port", "0", *state, prelude=prelude),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of what goes wrong."""
    write_raw(tmp_path / "web.bin", some_tokens(1000))
    (tmp_path / "none.toml").write_text('[corpora.web]\npath = "missing"\n')
    (tmp_path / "tokens.toml").write_text('[tokens.a]\nsha256 = "1"\n')
    (tmp_path / "damaged" / "plans.sqlite").mkdir(parents=True)
    (tmp_path / "cert.pem").write_text("no certificate")
    return tmp_path


CASES: dict[str, tuple[list[str], str]] = {
    "line-end-in-a-name": (["a\nb"], "a\\nb: "),
    "missing-corpus-of-the-file": (["--config", "none.toml"], "missing"),
    "missing-tokens": (["web.bin", "--tokens", "absent.toml"], "absent.toml: cannot be read: No such file"),
    "broken-tokens": (["web.bin", "--tokens", "tokens.toml"], "sha256 must be 64"),
    "no-certificate": (
        ["web.bin", "--tls-certificate", "cert.pem", "--tls-key", "cert.pem"],
        "TLS cannot use",
    ),
    "plans": (["web.bin", "--state-dir", "damaged"], "unable to open database file"),
    "plans-of-two-workers": (
        ["web.bin", "--state-dir", "damaged", "--workers", "2"],
        "unable to open database file",
    ),
}
"""Beside those of `tests/server/test_cli.py`: what needs more than a command line to go wrong."""


@pytest.mark.parametrize(("arguments", "said"), CASES.values(), ids=CASES)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], said: str) -> None:
    check(start(folder, *arguments), said)


BAD = {
    "no-file": "absent.bin",
    "an-odd-number-of-bytes": "odd.bin",
    "no-such-id": "web.bin,eot=70000",
    "damaged-index": "indexed",
    "no-view": "pair?view=cert.pem",
    "a-view-of-another": "pair?view=other.view",
    "a-view-without-an-index": "web.bin?view=other.view",
}
"""Corpora that cannot be served."""


@pytest.mark.parametrize("bad", BAD)
def test_the_corpus_that_cannot_be_served_is_named_once(folder: Path, bad: str) -> None:
    for name in ("pair", "other", "indexed"):
        write_corpus(folder / name, [[len(name)] * 20])
    write_view(folder / "other", [1] * 20, folder / "other.view")
    (folder / "odd.bin").write_bytes(bytes(3))
    os.truncate(folder / "indexed" / "0.bin.documents", 100)
    options = {"dtype": "uint32"} if BAD[bad].partition("?")[0] in ("pair", "indexed") else {}
    named = BAD[bad] + "".join(f",{key}={value}" for key, value in options.items())
    ended = start(folder, "good=web.bin", f"bad={named}")
    check(ended, "error: corpus 'bad'")
    assert ended.stderr.count("corpus 'bad'") == 1


def check(ended: subprocess.CompletedProcess[str], said: str) -> None:
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.stderr
    assert said in errors[0]
    assert "Traceback" not in ended.stderr
    assert "is ready" not in ended.stderr


@pytest.fixture
def killed(folder: Path) -> str:
    """Python that makes every worker of a server die while it starts."""
    (folder / "killed.py").write_text(
        "import os, signal\nfrom corpus_server.run import template, worker\n"
        "worker.start_tracing = lambda: os.kill(os.getpid(), signal.SIGKILL)\ntemplate.main()\n"
    )
    return (
        f"import sys; sys.path.append({str(folder)!r}); import corpus_server.run.supervisor as s; "
        "s.MAX_BACK_OFF_SECONDS = 0.1; import corpus_server.run.process as p; p.TEMPLATE_MODULE = 'killed'"
    )


def test_workers_that_are_killed_while_they_start_end_the_server(folder: Path, killed: str) -> None:
    """As the kernel does where memory is short; the failure was: a server that tried for ever."""
    ended = start(folder, "web.bin", "--workers", "2", prelude=killed)
    check(ended, "5 workers in a row did not start; the last: worker")
    assert ended.stderr.count("SIGKILL") < 9


@pytest.mark.parametrize(
    ("executable", "said"),
    [("/absent/python", "cannot start a worker: "), ("/bin/sh" + "x" * 300, "cannot start a worker: ")],
)
def test_a_worker_that_can_never_start_ends_the_server(folder: Path, executable: str, said: str) -> None:
    ended = start(folder, "web.bin", prelude=f"import sys; sys.executable = {executable!r}")
    check(ended, said)


def test_a_thousand_corpora_start(folder: Path) -> None:
    """Catalogue row 40: more settings than one environment variable holds, or than a line of a log should."""
    names = [f"corpus-with-a-rather-long-name-{number:04}" for number in range(1024)]
    with RunningServer(dict.fromkeys(names, folder / "web.bin"), folder) as server:
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: "all workers were replaced" in server.log(), server.log)
        assert max(map(len, server.log().splitlines())) < 1000
        assert server.get("/readyz").json()["corpora"] == names
        batch = server.get("/v1/batches", corpus=names[-1], seq_len=8, batch_size=4, step=0)
        assert batch.status == 200


MISTAKES = {
    "pipe": "",
    "device": "",
    "deep": "a = " + "[" * 10_000,
    "long": "port = " + "9" * 5000,
    "huge": "#" * (MAX_BYTES + 1),
}


@pytest.mark.parametrize("kind", MISTAKES)
@pytest.mark.parametrize("option", ["--config", "--tokens"])
def test_a_file_that_is_none_is_refused_at_once(folder: Path, option: str, kind: str) -> None:
    """Catalogue row 43."""
    path = folder / "named.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.write_text(MISTAKES[kind])
    began = time.monotonic()
    ended = run_here("serve", folder / "web.bin", option, path, XDG_STATE_HOME=str(folder))
    check(ended, "cannot read " if option == "--config" else "cannot be read: ")
    assert str(path) in ended.stderr
    assert len(ended.stderr) < 1000
    assert time.monotonic() - began < 30
