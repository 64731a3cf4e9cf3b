"""The parts of a run. Each measures in processes of its own: none meets the memory or streams of another."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu_lib.report import best_copy
from scripts.processes import ROOT

PART_SECONDS = 240.0  # then a part ends; where a command may take 10 minutes, two parts fit into one
NUM_TOKENS, QUICK_TOKENS = (
    2 * 10**8,
    200_000,
)  # of the corpus: beyond every cache of a CPU, written in seconds
CELLS = ((1, "256kB"), (1, "1MB"), (5, "1MB"), (5, "4MB"), (5, "16MB"), (20, "16MB"), (20, "64MB"))
"""(step's length in ms, tokens of a step as stored). Some are beyond one server or the bus on purpose."""

BATCH_SIZES, QUICK_SIZES = tuple(1 << power for power in (12, 16, 20, 22, 24, 26)), (1 << 12, 1 << 16)
"""Bytes; the largest batch that a loader's slots usually hold is 64 MiB."""

SHAPES = ((64, 1024), (512, 2048))
QUICK_SHAPES = ((8, 128),)
SOAK_STEPS, QUICK_STEPS = 10_000, 20


class PartFailed(Exception):
    """A part ended with an error; its last words are in the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a part is given.

    Args:
        plots: folder for PNG files; None: they cannot be drawn here.
    """

    device: str
    quick: bool
    plots: Path | None

    def client(self, command: str, *arguments: str) -> Any:
        """Return the JSON of a `corpus-client` command on the device."""
        options = ["--device", self.device, "--json", *arguments]
        return self.json_of("-m", "corpus_client", command, *options)

    def json_of(self, *arguments: str) -> Any:
        """Return the JSON that a Python process prints."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise PartFailed("\n  ".join([" ".join(arguments), *done.stderr.strip().splitlines()[-5:]]))
        return json.loads(done.stdout)

    @contextmanager
    def server(self) -> Iterator[tuple[str, Path]]:
        """Serve a corpus that lies in the page cache: its URL and its file."""
        from scripts.benchmarks import corpus
        from scripts.benchmarks.servers import serving

        path = corpus.make(ROOT / ".cache" / "gpu", QUICK_TOKENS if self.quick else NUM_TOKENS)
        corpus.warm(path)
        with serving({corpus.NAME: path}) as server:
            yield server.url, path


def measure(part: Callable[[Run], Any], device: str, *, quick: bool, plots: Path) -> dict[str, Any]:
    """Run a part within its time; return its `data`, and what they depend on: `machine` and `seconds`."""
    import torch

    from corpus_client.tools.machine import describe

    began = time.monotonic()
    drawable = importlib.util.find_spec("matplotlib") is not None
    device = "cpu" if quick and not torch.cuda.is_available() else device
    signal.signal(signal.SIGALRM, _end_late)
    signal.setitimer(signal.ITIMER_REAL, PART_SECONDS)
    try:
        data = part(Run(device=device, quick=quick, plots=plots if drawable else None))
    except (Exception, SystemExit) as error:  # the other parts go on
        raise PartFailed(str(error) or type(error).__name__) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seen = torch.device(device if torch.cuda.is_available() else "cpu")
    images = sorted(str(each.relative_to(plots.parent)) for each in plots.rglob("*.png"))
    return {"machine": describe(seen), "seconds": time.monotonic() - began, "plots": images, "data": data}


def _end_late(*_: object) -> None:
    """Raise in the part itself, so that the servers it started end with their blocks."""
    raise PartFailed(f"it was not done after {PART_SECONDS:g} s")


def run_tests(run: Run) -> dict[str, int]:
    """Run the GPU tests, where a skip is a failure: how many ran, failed, and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        options = ["-q", "-m", "needs_cuda", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = {**os.environ, "CORPUS_REQUIRE_CUDA": "0" if run.quick else "1"}
        command = [sys.executable, "-m", "pytest", *options, "tests/client/cuda"]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if not report.exists():
            raise PartFailed(f"pytest ended with exit code {done.returncode} and no report")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}


def transfer(run: Run) -> Any:
    """Measure copies as `corpus-client transfer` does, and batches as the loader sends them."""
    batches = QUICK_SIZES if run.quick else BATCH_SIZES
    copies = QUICK_SIZES if run.quick else (*BATCH_SIZES, 1 << 28)
    sizes = (",".join(map(str, each)) for each in (copies, batches))
    data = run.json_of("-m", "scripts.gpu_lib.full_slots", run.device, "3" if run.quick else "20", *sizes)
    if run.plots is not None:
        from scripts.gpu_lib import plots

        plots.save(plots.transfer(data), run.plots)
    return data


def overlap(run: Run) -> dict[str, Any]:
    """Feed some steps and batches in every way, and measure the limits that they have here."""
    from scripts.benchmarks.corpus import NAME

    cells = ((1, "20kB"),) if run.quick else CELLS
    short = (
        ["--steps", "2", "--rounds", "1", "--seq-len", "128"]
        if run.quick
        else ["--steps", "40", "--rounds", "2"]
    )
    sizes = ["--sizes", "64KiB" if run.quick else "1MiB,16MiB,64MiB", "--repeats", "5"]
    with run.server() as (url, _):
        copies = run.client("transfer", *sizes)["measurements"]
        served = run.client(
            "bench", url, "--corpus", NAME, "--stored", "--seconds", "0.3" if run.quick else "3"
        )
        found = [
            run.json_of(
                "-m", "scripts.gpu_lib.overlap", url, "--corpus", NAME, "--step-ms", str(step_ms),
                "--batch", batch, "--device", run.device, "--json", *short,
            )
            for step_ms, batch in cells
        ]  # fmt: skip
    data = {
        "bus_bytes_per_second": best_copy(copies),
        "server_bytes_per_second": served["bytes_per_second"],
        "cells": found,
    }
    if run.plots is not None:
        from scripts.gpu_lib import plots

        plots.save(plots.overlap(data), run.plots)
    return data


def delivered(run: Run) -> list[dict[str, Any]]:
    """Run `corpus-client bench` onto the device, tokens as stored and widened."""
    from scripts.benchmarks.corpus import NAME

    found = []
    with run.server() as (url, _):
        for rows, seq_len in QUICK_SHAPES if run.quick else SHAPES:
            for stored in (True, False):
                options = ["--seq-len", str(seq_len), "--batch-size", str(rows)]
                options += ["--seconds", "0.2" if run.quick else "5", *["--stored"][: int(stored)]]
                result = run.client("bench", url, "--corpus", NAME, *options)
                found.append({"rows": rows, "seq_len": seq_len, "stored": stored, **result})
    return found


def soak(run: Run) -> Any:
    """Compare every token of a long run with random delays; look at memory before and after."""
    from scripts.benchmarks.corpus import NAME

    steps = str(QUICK_STEPS if run.quick else SOAK_STEPS)
    with run.server() as (url, path):
        return run.json_of("-m", "scripts.gpu_lib.soak", url, NAME, str(path.parent), run.device, steps)


def server(run: Run) -> Any:
    """Run the bench's axis `scaling`: one server, 1 to 8 workers, 1 to 16 clients, beside bare TCP."""
    from scripts.benchmarks.axes import scaling
    from scripts.benchmarks.report import Options

    options = Options(cache=ROOT / ".cache" / "gpu", rounds=1, seconds=1.5, quick=run.quick)
    report = scaling.measure(options.in_force())
    tables = [{"title": each.title, "columns": each.columns, "rows": each.rows} for each in report.tables]
    return {**report.data, "tables": tables, "notes": report.notes}
