"""The parts of a run, each in a process of its own, so that none meets the memory or streams of another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from scripts.benchmarks.corpus import NAME
from scripts.processes import ROOT

STEP_MS = (1, 5, 20)
BATCHES = ("8MB", "32MB", "64MB")
SHAPES = ((64, 1024), (512, 2048))


class PartFailed(Exception):
    """A part ended with an error; its last words are in the message."""


def run_tests() -> dict[str, int]:
    """The GPU tests, where a skip is a failure: how many ran, failed, and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "tests/client/cuda",
        ]
        environment = {**os.environ, "CORPUS_REQUIRE_CUDA": "1"}
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
        if not report.exists():
            raise PartFailed(f"pytest ended with exit code {done.returncode} and no report")
        suites = ElementTree.parse(report).getroot().iter("testsuite")
        counts = [{name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
                  for suite in suites]  # fmt: skip
    return {name: sum(each[name] for each in counts) for name in ("tests", "failures", "errors", "skipped")}


def transfer(device: str, plots: Path, *arguments: str) -> dict[str, Any]:
    """`corpus-client transfer`."""
    return _client("transfer", "--device", device, "--plots", str(plots), "--json", *arguments)


def overlap(device: str, url: str, local: Path, plots: Path, *arguments: str) -> list[dict[str, Any]]:
    """`corpus-client overlap` for each length of a step and each size of a batch."""
    found = []
    for step_ms in STEP_MS:
        for batch in BATCHES:
            options = [url, "--corpus", NAME, "--local", str(local), "--device", device, "--json"]
            options += ["--step-ms", str(step_ms), "--batch", batch]
            options += ["--plots", str(plots / f"{step_ms}ms-{batch}")]
            found.append(_client("overlap", *options, *arguments))
    return found


def delivered(device: str, url: str, seconds: float) -> list[dict[str, Any]]:
    """`corpus-client bench` onto the device, tokens as stored and widened, at the bench's two shapes."""
    found = []
    for rows, seq_len in SHAPES:
        for stored in (True, False):
            options = [url, "--corpus", NAME, "--seq-len", str(seq_len), "--batch-size", str(rows)]
            options += ["--device", device, "--seconds", str(seconds), "--json", *["--stored"][: int(stored)]]
            found.append({"rows": rows, "seq_len": seq_len, "stored": stored, **_client("bench", *options)})
    return found


def soak(device: str, url: str, local: Path, num_steps: int) -> dict[str, Any]:
    """The long run."""
    command = ["-m", "scripts.gpu_lib.soak", url, NAME, str(local.parent), device, str(num_steps)]
    return _json_of(command)


def _client(*arguments: str) -> dict[str, Any]:
    return _json_of(["-c", "from corpus_client.cli import main; main()", *arguments])


def _json_of(arguments: list[str]) -> dict[str, Any]:
    """The JSON that a Python process prints."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PartFailed("\n  ".join([" ".join(arguments), *done.stderr.strip().splitlines()[-5:]]))
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
