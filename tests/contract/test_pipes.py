"""Named pipes and pipes of a shell, `<(...)`, given where a file is expected: nothing waits without end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from corpus_client import Network, errors
from corpus_client.arrays import ArrayLoader
from corpus_client.tools.app import app
from tests.corpora import write_raw
from tests.serving import run_here

NOBODY = "expected a file, found a pipe into which nobody writes"
PLAN = {
    "seq_len": 2,
    "seed": 1,
    "order": "sequential",
    "stages": [{"global_batch_size": 1, "mixture": {"a": 1}}],
}


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@contextmanager
def written(text: str) -> Iterator[str]:
    """Yield the name of a pipe into which somebody writes, as a shell names it; later than it is opened."""
    reader, writer = os.pipe()

    def write() -> None:
        with os.fdopen(writer, "w") as file:
            file.write(text[:5])
            file.flush()
            time.sleep(0.1)
            file.write(text[5:])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield f"/dev/fd/{reader}"
    finally:
        thread.join()
        os.close(reader)


@pytest.mark.parametrize(
    "words",
    [
        "export localhost:9 --plan PIPE --out new --stop 1",
        "bill localhost:9 --plan PIPE --out new --stop 1",
        "doctor localhost:9 --token-file PIPE",
        "prove PIPE --step 0 --out new",
        "verify-bill PIPE localhost:9",
        "export corpus.toml --plan /dev/zero --out new --stop 1",
    ],
)
def test_a_command_of_the_client_refuses_a_pipe_without_a_writer(
    pipe: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipe.parent)
    done = CliRunner().invoke(app, words.replace("PIPE", "pipe").split())
    assert done.exit_code == 2
    assert (NOBODY if "PIPE" in words else "found a device") in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_certificate_is_a_regular_file(pipe: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"must be PEM files, got .*pipe is no regular file"):
        ArrayLoader("https://localhost:9", plan=PLAN, rank=0, world_size=1, network=Network(ca_file=pipe))


@pytest.mark.parametrize(
    "words",
    [
        "plans make PIPE --corpus a=a.bin",
        "plans import megatron PIPE",
        "plans load PIPE http://localhost:9",
        "what PIPE --step 0",
        "export a=a.bin --plan PIPE --step 0",
        "stage a=a.bin --plan PIPE --steps 0:1 --cache-dir cache",
        "view create a.bin,eot=0 --without PIPE --out new",
    ],
)
def test_a_command_of_the_server_refuses_a_pipe_without_a_writer(
    pipe: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pipe.parent)
    write_raw(Path("a.bin"), [1, 2, 0, 3, 0])
    run_here("index", "a.bin,eot=0")
    done = run_here(*words.replace("PIPE", "pipe").split())
    assert (done.returncode, done.stdout) == (2, "")
    assert NOBODY in done.stderr


def test_what_is_read_once_may_come_from_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_raw(Path("a.bin"), [1, 2, 0, 3, 0])
    run_here("index", "a.bin,eot=0")
    text = json.dumps(PLAN)
    Path("plan.json").write_text(text)
    for words in ("plans make PLAN --corpus a=a.bin", "export a=a.bin --plan PLAN --step 0"):
        expected = run_here(*words.replace("PLAN", "plan.json").split())
        assert expected.returncode == 0, expected.stderr
        with written(text) as name:
            done = run_here(*words.replace("PLAN", name).split())
        assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    with written("0\n") as name:
        made = run_here("view", "create", "a.bin", "--without", name, "--out", "new", "--json")
    assert json.loads(made.stdout)["num_chosen"] == 1
    with (
        written(text) as name,
        ArrayLoader({"a": "a.bin"}, plan=name, rank=0, world_size=1, num_steps=1) as loader,
    ):
        assert next(loader).tokens.tolist() == [[1, 2, 0]]


def test_a_token_may_come_from_a_shell_and_stays() -> None:
    with written("a-token\n") as name:
        credentials = Network(auth=Path(name)).credentials
        assert [credentials.header() for _ in range(3)] == ["Bearer a-token"] * 3
