"""Parts in processes of this machine: the same bytes, the first error, and no process that is left over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.driver import build, choose_options
from corpus_server.tools.building.running import in_processes
from tests.server.tools.building.sources import texts, write_jsonl
from tests.serving import command, environment

# A part for each file, because spawned processes see no patched constant.
NUM_FILES = 6


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(NUM_FILES):
        # Larger than half a part, so that no two of them share one.
        rows = texts(20, seed=number) + ["pad " * (1 << 19)] * 5
        write_jsonl(folder / f"{number}.jsonl", rows)
    return folder


def build_in(num_processes: int, source: Path, out: Path) -> None:
    options = choose_options(tokenizer="bytes", eot=None, shard_tokens=3_000_000)
    build([str(source)], out, options, partial(in_processes, num_processes=num_processes))


def children() -> list[psutil.Process]:
    """Return the workers of builds in this process, which may have other children, of other tests."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_the_first_error_of_a_part_ends_the_build(source: Path, tmp_path: Path) -> None:
    with (source / "2.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(UnreadableCorpus, match=r"2\.jsonl: line 26: is not JSON"):
        build_in(2, source, tmp_path / "out")
    assert children() == []
    assert not (tmp_path / "out").exists()


HELD = """
import sys, time

def hold(event, arguments):
    if event == "open" and str(arguments[0]).endswith("held.txt"):
        time.sleep(600)

if "--multiprocessing-fork" in sys.argv:
    sys.addaudithook(hold)
"""
"""For `sitecustomize.py`: a worker stays at the part of such a file."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_its_build(source: Path, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sitecustomize.py").write_text(HELD)
    held = [tmp_path / "first-held.txt", tmp_path / "last-held.txt"]
    for file in held:
        file.write_text("text")
    sources = held[0], source, held[1]
    arguments = ("build", *sources, "--out", tmp_path / "out", "--tokenizer", "bytes", "--processes", "2")
    # A shell's background job ignores SIGINT, and so would what it starts.
    prelude = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    words = command(*arguments, prelude=prelude)
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join((str(tmp_path), variables["PYTHONPATH"]))
    with subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True) as process:
        parent = psutil.Process(process.pid)
        found: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(found) < 2 and time.monotonic() < deadline:
            found = [each for each in parent.children() if "spawn_main" in " ".join(each.cmdline())]
            time.sleep(0.05)
        assert len(found) == 2
        if number == signal.SIGINT:  # a terminal sends it to all, and the workers are still starting
            for each in found:
                each.send_signal(number)
        time.sleep(0.5)  # the workers may still be starting: they end in every state
        os.kill(process.pid, number)
        process.wait(30)
        assert process.stderr is not None
        said = process.stderr.read()
    _, alive = psutil.wait_procs(found, timeout=30)
    assert alive == []
    assert "Traceback" not in said
    assert ("stopped; the same command continues" in said) == (number == signal.SIGINT)
    assert not (tmp_path / "out").exists()
