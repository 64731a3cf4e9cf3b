"""The exit codes of both commands are those of the table in docs/scripts.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.layers import chapter
from tests.serving import ROOT, run_here

DOCUMENTED = {
    int(code)
    for code in re.findall(
        r"^\| (\d+) \|", chapter((ROOT / "docs" / "scripts.md").read_text(), "Exit codes"), re.MULTILINE
    )
}
SERVER, CLIENT = (sys.executable, "-m", "corpus_server"), (sys.executable, "-m", "corpus_client")
NOBODY = "127.0.0.1:9"  # the port `discard`, where nobody listens


def test_the_table_has_these_codes() -> None:
    assert sorted(DOCUMENTED) == [0, 1, 2, 130, 141]


@pytest.fixture
def web(tmp_path: Path) -> Path:
    path = write_raw(tmp_path / "web.bin", some_tokens(500))
    assert run_here("verify", path, "--record").returncode == 0
    return path


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ((*SERVER, "inspect", "WEB"), 0, False),
        ((*SERVER, "inspect", "WEB.none"), 2, True),
        ((*SERVER, "inspect", "WEB", "--no-such-option"), 2, False),
        ((*SERVER, "plans", "list", NOBODY), 2, True),
        ((*SERVER, "serve", "WEB", "--workers", "0"), 2, True),
        ((*CLIENT, "--version"), 0, False),
        ((*CLIENT, "doctor", NOBODY), 1, False),
        ((*CLIENT, "bench", NOBODY, "--corpus", "web", "--seq-len", "8", "--batch-size", "2"), 2, True),
        ((*CLIENT, "bench", NOBODY, "--no-such-option"), 2, False),
    ],
    ids=lambda value: " ".join(value[3:5]) if isinstance(value, tuple) else None,
)
def test_a_command_ends_with(words: tuple[str, ...], code: int, error: bool, web: Path) -> None:
    command = [word.replace("WEB", str(web)) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert any(line.startswith("error:") for line in done.stderr.splitlines()) == error, done.stderr


def test_damage_is_1(web: Path) -> None:
    with web.open("r+b") as file:
        file.write(b"\xff\xff")
    done = subprocess.run([*SERVER, "verify", web], capture_output=True, check=False)
    assert done.returncode == 1


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*SERVER, "plans", "import", "megatron", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    # It has begun to read when this, which is more than a pipe holds, was taken.
    process.stdin.write(b"#" * (1 << 20))
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130


def test_a_reader_that_ends_first_is_141(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(100_000))
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"seq_len": 1024, "stages": [{"global_batch_size": 64, "mixture": {"web": 1}}], "seed": 0}'
    )
    command = [*SERVER, "export", f"web={path}", "--plan", plan, "--step", "0", "--count", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "words",
    [
        (*SERVER, "inspect", "WEB"),
        (*SERVER, "inspect", "WEB", "--json"),
        (*SERVER, "--help"),
        (*SERVER, "--version"),
        (*SERVER, "verify", "WEB"),
        (*CLIENT, "--help"),
        (*CLIENT, "doctor", NOBODY, "--json"),
    ],
    ids=lambda words: " ".join(words[2:]),
)
def test_a_reader_that_was_never_there_is_141(words: tuple[str, ...], web: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [word.replace("WEB", str(web)) for word in words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
