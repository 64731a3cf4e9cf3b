"""What the scripts stand on: their corpus, their model, their processes and their shell."""

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts import processes
from scripts.quickstart_lib import text, training

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the smallest corpus was built."""
    home = tmp_path_factory.mktemp("quickstart")
    text.build(home, corpus_mb=1, report=lambda line: None)
    return home


def test_the_corpora_decode_to_the_documents(home: Path) -> None:
    decoded = []
    for split in text.SPLITS:
        folder = text.corpus_path(home, corpus_mb=1) / split
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
        *some, end = tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split(text.END_OF_TEXT)
        assert some
        assert end == ""
        decoded += some
    documents = [document for document in text.documents(1_000_000) if document]
    assert sorted(decoded) == sorted(documents)


def test_a_finished_corpus_is_left_alone(home: Path) -> None:
    finished = text.corpus_path(home, corpus_mb=1)
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    lines: list[str] = []
    assert text.build(home, corpus_mb=1, report=lines.append) == finished
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('corpus.bin: no such file')"]
    with (
        pytest.raises(processes.ServerFailed, match=r"exit code 1.*\n.*corpus\.bin: no such file"),
        processes.running(command, ready=lambda: False, log=tmp_path / "log"),
    ):
        pytest.fail("it never was ready")


def test_the_server_is_stopped_when_the_block_fails(tmp_path: Path) -> None:
    port = processes.claim_port()
    (tmp_path / "readyz").touch()
    command = [
        sys.executable,
        "-m",
        "http.server",
        str(port),
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path),
    ]
    url = f"http://127.0.0.1:{port}"

    def fail_while_running() -> None:
        with processes.running(command, ready=partial(processes.is_ready, url), log=tmp_path / "log"):
            assert processes.get(url, "/readyz") == b""
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_while_running()
    with pytest.raises(OSError, match="refused"):
        processes.get(url, "/readyz")


def start_tour(home: Path, *arguments: str) -> subprocess.Popen[str]:
    """The quick start as scripts/quickstart starts it, with `home` as the root of the repository."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "scripts.quickstart_lib", "--corpus-mb", "1", *arguments]
    return subprocess.Popen(command, cwd=home, env=environment, stdout=subprocess.PIPE, text=True)


def keep_corpus(home: Path, root: Path) -> None:
    """Let a tour find its corpus as if an earlier one had built it."""
    shutil.copytree(home, root / ".cache" / "quickstart" / "corpus")


def assert_no_server_listens(output: str) -> None:
    url = re.search(r"A server on (http://\S+)", output)
    assert url
    with pytest.raises(OSError, match="refused"):
        processes.get(url[1], "/healthz")


def end_at_first_step(tour: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal after the first step, and return what was printed."""
    assert tour.stdout
    lines = []
    for line in tour.stdout:
        lines.append(line)
        if line.startswith("step"):
            tour.send_signal(number)
            break
    rest, _ = tour.communicate()
    assert tour.returncode == 130
    assert "stopped: the next step is" in rest
    return "".join(lines) + rest


def test_the_tour_trains_and_a_second_one_goes_on(tmp_path: Path) -> None:
    """The second one, too, ends with a checkpoint and without a server: at Ctrl-C."""
    tour = start_tour(tmp_path, "--steps", "3")
    output, _ = tour.communicate()
    assert tour.returncode == 0, output
    assert re.findall(r"^step +(\d+) .* tokens/s", output, re.MULTILINE) == ["0", "2"]
    assert re.search(r"^step .* on val$", output, re.MULTILINE)
    assert len(re.findall(r"^curl -s 'http://.*'$", output, re.MULTILINE)) == 3
    assert "=== step 0 row 0: corpus train" in output
    assert "going on from" not in output
    assert_no_server_listens(output)
    (checkpoint,) = tmp_path.glob(".cache/quickstart/*.pt")
    before = checkpoint.stat().st_mtime_ns
    output = end_at_first_step(start_tour(tmp_path, "--seconds", "1000"), signal.SIGINT)
    assert re.search(r"^step +(\d+) ", output, re.MULTILINE)[1] == "3"
    assert "going on from" in output
    assert checkpoint.stat().st_mtime_ns > before
    assert_no_server_listens(output)


def test_sigterm_ends_the_tour_with_a_checkpoint_and_without_a_server(home: Path, tmp_path: Path) -> None:
    keep_corpus(home, tmp_path)
    output = end_at_first_step(start_tour(tmp_path, "--seconds", "1000"), signal.SIGTERM)
    assert len(list(tmp_path.glob(".cache/quickstart/*.pt"))) == 1
    assert_no_server_listens(output)


def test_ctrl_c_before_the_first_step_ends_the_tour_as_ctrl_c_does(home: Path, tmp_path: Path) -> None:
    keep_corpus(home, tmp_path)
    tour = start_tour(tmp_path, "--seconds", "1000")
    assert tour.stdout
    lines = list(itertools.takewhile(lambda line: not line.startswith("Training on"), tour.stdout))
    time.sleep(0.5)  # the trainer imports torch, and knows no signal yet
    tour.send_signal(signal.SIGINT)
    tour.communicate()
    assert tour.returncode == 130
    assert_no_server_listens("".join(lines))


def test_ctrl_c_while_the_trainer_starts_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trained on in a session of its own, and nobody knew."""
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(training.subprocess, "Popen", interrupted)
    code = None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            code = training.run([sys.executable, "-c", "import time; time.sleep(3600)"])
    finally:
        started[0].kill()
        started[0].wait()
    assert code == -signal.SIGTERM


def test_a_tour_that_cannot_have_its_port_says_so_in_one_line(home: Path, tmp_path: Path) -> None:
    keep_corpus(home, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tour = start_tour(tmp_path, "--port", str(port))
        output, _ = tour.communicate()
    assert tour.returncode == 1
    assert output.splitlines()[-1].startswith(f"quickstart failed: ServerFailed: port {port} of 127.0.0.1")


def test_setup_refuses_an_old_python_and_says_what_it_needs(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup", checkout / "scripts")
    environment = os.environ | {"PYTHON": str(old)}
    command = [str(checkout / "scripts/setup")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "3.11 or newer (Python 3.9.2)" in result.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("project", "extras"),
    [
        ("pyproject.toml", ["text", "build", "views", "recordings", "ray", "stores"]),
        ("client/pyproject.toml", ["torch", "tools"]),
    ],
)
def test_every_requirement_is_pinned_and_reaches_the_images(project: str, extras: list[str]) -> None:
    command = [sys.executable, str(ROOT / "docker/requirements.py"), str(ROOT / project), *extras]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    document = tomllib.loads((ROOT / project).read_text())
    declared = document["project"]
    optional = declared.get("optional-dependencies", {})
    assert printed == [*declared["dependencies"], *(each for extra in extras for each in optional[extra])]
    lines = (ROOT / "scripts/constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = {line.partition("==")[0] for line in lines}
    groups = document.get("dependency-groups", {})
    grouped = [each for name in groups if name != "workflows" for each in groups[name]]  # not installed here
    names = {
        re.split(r"[\[>]", requirement)[0].lower().replace("_", "-") for requirement in [*printed, *grouped]
    }
    assert names <= pinned
