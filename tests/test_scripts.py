"""What the scripts stand on: their corpus, their model, their processes and their shell."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts import processes
from scripts.quickstart_lib import text

ROOT = Path(__file__).parents[1]
SHELL_SCRIPTS = [
    "scripts/setup",
    "scripts/test",
    "scripts/check",
    "scripts/quickstart",
    "scripts/gpu",
    ".ci/run",
]


def read_shards(folder: Path) -> list[int]:
    """All tokens of a folder of llm.c shards, each checked against its header."""
    tokens: list[int] = []
    for path in sorted(folder.glob("*.bin")):
        content = path.read_bytes()
        magic, version, num_tokens = np.frombuffer(content, "<i4", count=3)
        assert (magic, version, 1024 + 2 * num_tokens) == (20240520, 1, len(content))
        tokens += np.frombuffer(content, "<u2", offset=1024).tolist()
    return tokens


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the smallest corpus was built."""
    home = tmp_path_factory.mktemp("quickstart")
    text.build(home, corpus_mb=1, report=lambda line: None)
    return home


@pytest.mark.parametrize("split", text.SPLITS)
def test_the_tokens_of_a_split_decode_to_its_documents(home: Path, split: str) -> None:
    folder = text.corpus_path(home, corpus_mb=1) / split
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    decoded = tokenizer.decode(read_shards(folder), skip_special_tokens=False)
    documents = [document.text for document in text.documents(1_000_000) if document.split == split]
    assert decoded.split(text.END_OF_TEXT) == [*documents, ""]


def test_a_finished_corpus_is_left_alone_and_nothing_lies_beside_it(home: Path) -> None:
    finished = text.corpus_path(home, corpus_mb=1)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    lines: list[str] = []
    assert text.build(home, corpus_mb=1, report=lines.append) == finished
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert list(home.iterdir()) == [finished]


def test_a_build_that_fails_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails at the last file."""

    def fail(path: Path, content: bytes) -> None:
        if path.name == "tokenizer.json" and path.parent.name == "validation":
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(text, "_write", fail)
    with pytest.raises(OSError, match="No space left"):
        text.build(tmp_path, corpus_mb=1, report=lambda line: None)
    assert list(tmp_path.iterdir()) == []


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


def assert_no_server_listens(output: str) -> None:
    url = re.search(r"A server on (http://\S+)", output)
    assert url
    with pytest.raises(OSError, match="refused"):
        processes.get(url[1], "/healthz")


def test_the_tour_trains_and_a_second_one_goes_on(tmp_path: Path) -> None:
    for first_step in (0, 3):
        tour = start_tour(tmp_path, "--steps", str(first_step + 3))
        output, _ = tour.communicate(timeout=100)
        assert tour.returncode == 0, output
        steps = re.findall(r"^step +(\d+) .* tokens/s", output, re.MULTILINE)
        assert steps == [str(first_step), str(first_step + 2)]
        assert re.search(r"^step .* on validation$", output, re.MULTILINE)
        assert len(re.findall(r"^curl -s 'http://.*'$", output, re.MULTILINE)) == 3
        assert "=== step 0 row 0: corpus train" in output
        assert ("going on from" in output) == (first_step > 0)
        assert_no_server_listens(output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_tour_with_a_checkpoint_and_without_a_server(
    tmp_path: Path, number: signal.Signals
) -> None:
    tour = start_tour(tmp_path, "--seconds", "1000")
    assert tour.stdout
    lines = []
    for line in tour.stdout:
        lines.append(line)
        if line.startswith("step"):
            tour.send_signal(number)
            break
    rest, _ = tour.communicate(timeout=60)
    assert tour.returncode == 130
    assert "stopped: the next step is" in rest
    assert len(list(tmp_path.glob(".cache/quickstart/*.pt"))) == 1
    assert_no_server_listens("".join(lines))


def test_a_tour_that_cannot_have_its_port_says_so_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        tour = start_tour(tmp_path, "--port", str(port))
        output, _ = tour.communicate(timeout=60)
    assert tour.returncode == 1
    assert output.splitlines()[-1].startswith(f"quickstart failed: ServerFailed: port {port} of 127.0.0.1")


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_are_executable_and_parse(script: str) -> None:
    """scripts/check has shellcheck look at them too."""
    assert os.access(ROOT / script, os.X_OK)
    parsed = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True, check=False)
    assert (parsed.returncode, parsed.stderr) == (0, "")


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
    ("project", "extras"), [("pyproject.toml", ["text", "dev"]), ("client/pyproject.toml", [])]
)
def test_every_requirement_is_pinned_and_reaches_the_images(project: str, extras: list[str]) -> None:
    command = [sys.executable, str(ROOT / "docker/requirements.py"), str(ROOT / project), *extras]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    declared = tomllib.loads((ROOT / project).read_text())["project"]
    optional = declared.get("optional-dependencies", {})
    assert printed == [*declared["dependencies"], *(each for extra in extras for each in optional[extra])]
    lines = (ROOT / "scripts/constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pinned = {line.partition("==")[0] for line in lines}
    names = {requirement.partition(">=")[0] for requirement in printed}
    assert names <= pinned
