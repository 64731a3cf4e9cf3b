"""Tasks of a job array, as docs/build.md starts them: the same command many times, then once more."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.server.tools.building.faults import PRELUDE, build
from tests.server.tools.building.sources import content, texts, write_jsonl
from tests.serving import ROOT, command, environment

PAGE = (ROOT / "docs" / "build.md").read_text()

# Runs what it is given at once, all tasks of an array at the same time, and prints the number of the job.
SBATCH = """#!/usr/bin/env bash
last=0
while (($#)); do
    case $1 in
        --array=*) last=${1#*-}; last=${last##*-} ;;
        --wrap) wrapped=$2; shift ;;
    esac
    shift
done
pids=()
for ((number = 0; number <= last; number++)); do
    SLURM_ARRAY_TASK_ID=$number bash -c "$wrapped" >&2 & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
echo 42
"""


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def slurm_lines() -> str:
    return re.findall(r"\n### Slurm\n\n((?:    .*\n)+)", PAGE)[0]


def test_the_slurm_array_of_the_docs_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", texts(300, most_words=200))
    lines = slurm_lines().replace("/data/texts", str(source)).replace("/data/tokenizer.json", "bytes")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    script(binaries / "sbatch", SBATCH)
    script(binaries / "corpus-server", f'#!/bin/sh\nexec {shlex.join(command(prelude=PRELUDE))} "$@"\n')
    ended = subprocess.run(
        ["bash", "-euxc", lines.replace("/data", str(tmp_path))],
        env=environment(PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert build(source, tmp_path / "once", "--tokenizer", "bytes").returncode == 0
    assert content(tmp_path / "web") == content(tmp_path / "once")
    assert not (tmp_path / "web.building").exists()


def test_tasks_leave_the_corpus_to_the_last_command(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100, most_words=200))
    options = ("--tokenizer", "bytes", "--processes", "1")
    task = build(source, tmp_path / "out", *options, "--task", "1/2")
    assert (task.returncode, task.stderr, task.stdout) == (0, "", "")
    assert [path.name for path in tmp_path.glob("out*")] == ["out.building"]
    done = [int(path.stem) for path in (tmp_path / "out.building/parts").glob("*.json")]
    assert {number % 2 for number in done} == {1}
    assert build(source, tmp_path / "out", *options).returncode == 0
    late = build(source, tmp_path / "out", *options, "--task", "1/2")
    assert (late.returncode, late.stderr) == (0, "")
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


@pytest.mark.parametrize("task", ["3/3", "1", "-1/3", "a/b"])
def test_a_share_that_does_not_exist_is_refused(tmp_path: Path, task: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3, most_words=200))
    refused = build(source, tmp_path / "out", "--tokenizer", "bytes", "--task", task)
    assert refused.returncode == 2
    assert "task must be K/N" in refused.stderr
    assert not list(tmp_path.glob("out*"))
