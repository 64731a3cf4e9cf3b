"""The parts of a run. Each measures in processes of its own: none meets the memory or streams of another.

What a figure should reach holds on a GPU; a quick run, on any machine, has no targets.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.report import Options, Report, Table, Target
from scripts.gpu_lib.needs import CLIENT, CUDA, SERVER, TESTS
from scripts.processes import ROOT

CACHE = ROOT / ".cache" / "gpu"
NUM_TOKENS, QUICK_TOKENS = (
    2 * 10**8,
    200_000,
)  # beyond every cache of a CPU, written in seconds
CELLS = ((1, "256kB"), (1, "1MB"), (5, "1MB"), (5, "4MB"), (5, "16MB"), (20, "16MB"), (20, "64MB"))
"""(step's length in ms, tokens of a step as stored). Some are beyond one server or the bus on purpose."""

BATCH_SIZES, QUICK_SIZES = tuple(1 << power for power in (12, 16, 20, 22, 24, 26)), (1 << 12, 1 << 16)
"""Bytes; the largest batch that a loader's slots usually hold is 64 MiB."""

SHAPES, QUICK_SHAPES = ((64, 1024), (512, 2048)), ((8, 128),)
EXACT_STEPS = 2000  # of each of the nine exact runs among the tests

LARGE_BYTES = 4_000_000  # of a batch, from which on its copies should be as fast as the best
OF_BEST = 0.9
MOST_HELD_US = 50.0
MOST_STALL_PERCENT = {0.005: 1.0, 0.0: 5.0}  # by the length of a step from which on it holds, in seconds
OF_LIMIT = 0.8  # of what bus or server deliver alone: above it a stall is their limit, and no target


class PartFailed(Exception):
    """A part ended with an error; its last words are in the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a part is given."""

    device: str
    quick: bool

    def client(self, command: str, *arguments: str) -> Any:
        """Return the JSON of a `corpus-client` command on the device."""
        return self.json_of("corpus_client", command, "--device", self.device, "--json", *arguments)

    def json_of(self, *arguments: str) -> Any:
        """Return the JSON that a Python module prints."""
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PartFailed("\n  ".join([" ".join(arguments), *done.stderr.strip().splitlines()[-5:]]))
        return json.loads(done.stdout)

    @contextmanager
    def server(self) -> Iterator[tuple[str, ...]]:
        """Serve a corpus that lies in the page cache: its URL and options that name it."""
        from scripts.benchmarks import corpus
        from scripts.benchmarks.servers import serving

        path = corpus.make(CACHE, QUICK_TOKENS if self.quick else NUM_TOKENS)
        corpus.warm(path)
        with serving({corpus.NAME: path}) as server:
            yield server.url, "--corpus", corpus.NAME


def run_tests(run: Run) -> Report:
    """Run the GPU tests, where a skip is a failure: how many ran, failed, and were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        options = ["-q", "-m", "needs_cuda", "-p", "no:cacheprovider", f"--junitxml={report}"]
        required = {} if run.quick else {"CORPUS_REQUIRE_CUDA": "1", "CORPUS_DEVICE_STEPS": str(EXACT_STEPS)}
        command = [sys.executable, "-m", "pytest", *options, "--timeout", "200", "tests/client/cuda"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **required}, check=False)
        if not report.exists():
            raise PartFailed(f"pytest ended with exit code {done.returncode} and no report")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    data = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}
    targets = [_most(f"{name} of {data['tests']} tests", data[name], 0) for name in names[1:]]
    return Report(data=data, tables=[], targets=targets)


def transfer(run: Run) -> Report:
    """Measure copies as `corpus-client transfer` does, and batches as the loader sends them."""
    sizes = [",".join(map(str, QUICK_SIZES))] * 2
    if not run.quick:
        sizes = [",".join(map(str, each)) for each in ((*BATCH_SIZES, 1 << 28), BATCH_SIZES)]
    repeats = "3" if run.quick else "20"
    return transfer_report(run.json_of("scripts.gpu_lib.full_slots", run.device, repeats, *sizes))


def transfer_report(data: dict[str, Any]) -> Report:
    """Compare the loader's copies with the best of the same run, and its calls with a bound."""
    columns, tables = ["", "bytes", "us", "GB/s", "CPU held us"], []
    for title, found in (("copies", data["measurements"]), ("loader", data["batches"])):
        rows = [
            [each["name"], f"{each['bytes']:,}", f"{each['seconds']['median'] * 1e6:,.1f}",
             f"{each['bytes_per_second'] / 1e9:.2f}", f"{each['held']['median'] * 1e6:,.1f}"]
            for each in found
        ]  # fmt: skip
        tables.append(Table(title=title, columns=columns, rows=rows))
    targets, best = [], best_copy(data["measurements"])
    if best is not None:
        held = 1e6 * max(each["held"]["median"] for each in data["batches"])
        large = [each for each in data["batches"] if each["bytes"] >= LARGE_BYTES]
        stored = min(each["bytes_per_second"] for each in large if each["name"] == "as stored")
        figure = "batches of 4 MB and more as the loader sends them / best page-locked copy"
        targets.append(_most("CPU held by a batch, median", held, MOST_HELD_US, "us"))
        targets.append(Target(figure=figure, reached=stored / best, bound="at least", wanted=OF_BEST))
    notes = [f"Not measured: {sentence}" for sentence in data["missing"]]
    return Report(data=data, tables=tables, targets=targets, notes=notes)


def best_copy(measurements: Sequence[dict[str, Any]]) -> float | None:
    """Return bytes per second of the fastest copy from page-locked memory; None without a GPU."""
    names = ("torch-pinned to device", "registered to device")
    return max((each["bytes_per_second"] for each in measurements if each["name"] in names), default=None)


def overlap(run: Run) -> Report:
    """Feed some steps and batches in every way, and measure the limits that they have here."""
    short = ["--steps", "40", "--rounds", "2"]
    if run.quick:
        short = ["--steps", "2", "--rounds", "1", "--seq-len", "128"]
    with run.server() as served:
        sizes = ("--sizes", "64KiB" if run.quick else "1MiB,16MiB,64MiB", "--repeats", "5")
        copies = run.client("transfer", *sizes)["measurements"]
        delivered = run.client("bench", *served, "--stored", "--seconds", "0.3" if run.quick else "3")
        cells = [
            run.json_of(
                "scripts.gpu_lib.overlap", *served, "--step-ms", str(step_ms), "--batch", batch,
                "--device", run.device, "--json", *short,
            )
            for step_ms, batch in (((1, "20kB"),) if run.quick else CELLS)
        ]  # fmt: skip
    bus, server = best_copy(copies), delivered["bytes_per_second"]
    return overlap_report({"bus_bytes_per_second": bus, "server_bytes_per_second": server, "cells": cells})


def overlap_report(data: dict[str, Any]) -> Report:
    """Show a row for each cell; bound the stalls of those that bus and server can feed."""
    names = [outcome["name"] for outcome in data["cells"][0]["outcomes"]][:-1]
    rows: list[list[str]] = []
    stalls: dict[tuple[str, float], list[float]] = {}
    for cell in data["cells"]:
        asked, step = cell["asked_seconds"], cell["outcomes"][-1]["seconds"]["median"]
        needed = cell["batch_bytes"] / step  # by a run that never waits
        limits = [
            each
            for each in ("bus", "server")
            if (alone := data[f"{each}_bytes_per_second"]) is not None and needed > OF_LIMIT * alone
        ]
        its = {outcome["name"]: 100 * outcome["stall"]["median"] for outcome in cell["outcomes"]}
        shown = (f"{1e3 * asked:g}", f"{1e3 * step:.2f}", f"{cell['batch_bytes'] / 1e6:.2f}")
        limit = [*limits, "compute"][0]
        rows.append([*shown, f"{needed / 1e9:.2f}", limit, *(f"{its[name]:+.1f}%" for name in names)])
        least = max(each for each in MOST_STALL_PERCENT if asked >= each)
        for what, name, is_fed in (
            ("(e) from a server", "corpus-loader", not limits),
            ("(e') its device half", "full-slots", "bus" not in limits),
        ):
            if is_fed and name in its:
                stalls.setdefault((what, least), []).append(its[name])
    targets = [
        _most(
            f"stall of {what}, steps of {f'{1e3 * least:g} ms and more' if least else 'less'}",
            max(its),
            MOST_STALL_PERCENT[least],
            "%",
        )
        for (what, least), its in stalls.items()
    ]
    alone = [f"{each} {data[f'{each}_bytes_per_second'] or 0:.3g} bytes/s" for each in ("bus", "server")]
    note = f"Alone in this run: {', '.join(alone)}. Steps that need more than {OF_LIMIT:.0%} have no target."
    columns = ["step asked ms", "(f) ms", "MB a step", "needs GB/s", "limit", *names]
    table = Table(title="stall against a batch that is there (f)", columns=columns, rows=rows)
    return Report(data=data, tables=[table], targets=targets, notes=[note])


def delivered(run: Run) -> Report:
    """Run `corpus-client bench` onto the device, tokens as stored and widened."""
    data, rows = [], []
    with run.server() as served:
        for num_rows, seq_len in QUICK_SHAPES if run.quick else SHAPES:
            for stored in (True, False):
                options = ["--seq-len", str(seq_len), "--batch-size", str(num_rows)]
                options += ["--seconds", "0.2" if run.quick else "5", *["--stored"][: int(stored)]]
                found = run.client("bench", *served, *options)
                data.append({"rows": num_rows, "seq_len": seq_len, "stored": stored, **found})
                waits = (f"{found['wait'][name] * 1e3:.3f}" for name in ("median", "p99"))
                batch = [f"{num_rows} x {seq_len + 1}", "as stored" if stored else "int64"]
                speed = f"{found['tokens_per_second'] / 1e6:,.0f}"
                rows.append([*batch, speed, *waits, f"{found['wait_share']:.0%}"])
    columns = ["batch", "tokens", "M tokens/s", "p50 ms", "p99 ms", "share waiting"]
    table = Table(title="delivered by one server process", columns=columns, rows=rows)
    return Report(data=data, tables=[table])


def server(run: Run) -> Report:
    """Run the bench's axis `scaling`: one server, 1 to 8 workers, 1 to 16 clients, beside bare TCP."""
    from scripts.benchmarks.axes import scaling

    return scaling.measure(Options(cache=CACHE, rounds=1, quick=run.quick))


def _most(figure: str, reached: float, wanted: float, unit: str = "") -> Target:
    return Target(figure=figure, reached=reached, bound="at most", wanted=wanted, unit=unit)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run; without one of the modules that it needs, or `CUDA`, it is skipped."""

    help: str
    needs: tuple[str, ...]
    measure: Callable[[Run], Report]


PARTS = {
    "tests": Part(
        f"the tests that need a GPU, of which nine compare {EXACT_STEPS:,} batches each; a skip is a failure",
        (CUDA, *CLIENT, *SERVER, *TESTS),
        run_tests,
    ),
    "transfer": Part(
        "copies from pageable, torch-pinned and registered memory, and how long they hold the CPU",
        (CUDA, *CLIENT),
        transfer,
    ),
    "overlap": Part(
        "how long training steps wait for data, by each way of feeding them",
        (CUDA, *CLIENT, *SERVER),
        overlap,
    ),
    "delivered": Part("tokens/s onto the GPU from one server process", (CUDA, *CLIENT, *SERVER), delivered),
    "server": Part(
        "one server with 1 to 8 workers and 1 to 16 clients, beside bare TCP; needs no GPU",
        (*CLIENT, *SERVER),
        server,
    ),
}
