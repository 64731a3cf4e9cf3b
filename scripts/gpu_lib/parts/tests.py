"""The tests that need a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping

from scripts.benchmarks.report import Report
from scripts.gpu_lib.run import EXACT_STEPS, Cell, Figures, Run, at_most
from scripts.processes import ROOT

PLUGINS = ("pytest_timeout", "xdist")
"""Modules of the plugins that these tests use. Others of the machine's are not loaded: they may warn, and a
warning is an error here."""

OUTCOMES = ("failures", "errors", "skipped")


def cells(run: Run) -> Iterator[Cell]:
    """Yield one cell."""
    yield Cell(name="tests", seconds=60, measure=lambda: run_tests(run))


def run_tests(run: Run) -> Figures:
    """Return how many tests ran, failed and were skipped."""
    junit = run.folder / "junit.xml"
    plugins = [
        name for name in PLUGINS if importlib.util.find_spec(name) and not (run.quick and name == "xdist")
    ]
    processes = ["-n", str(min(6, os.cpu_count() or 1)), "--dist", "loadfile"] if "xdist" in plugins else []
    loaded = [word for name in plugins for word in ("-p", f"{name}.plugin" if name == "xdist" else name)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *loaded,
        *processes,
        "-p",
        "no:cacheprovider",
        "--timeout",
        "200",
    ]
    command += [f"--junitxml={junit}", "-m", "needs_cuda", "tests/client/cuda"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if not run.quick:
        environment |= {"CORPUS_REQUIRE_CUDA": "1", "CORPUS_DEVICE_STEPS": str(EXACT_STEPS)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
    if not junit.exists():
        raise RuntimeError(f"pytest ended with exit code {done.returncode} and no report; it says why above")
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", *OUTCOMES)}


def report(cells: Mapping[str, Figures]) -> Report:
    """Ask that nothing failed and nothing was skipped."""
    (found,) = cells.values()
    targets = [at_most(f"{name} of {found['tests']} tests", found[name], 0) for name in OUTCOMES]
    return Report(data=found, tables=[], targets=targets)
