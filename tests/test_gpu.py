"""`scripts/gpu` where there is no GPU: it skips with a reason, resumes, and writes a file for each part.

Figures in the report's tests are made up here, to see what becomes of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks.report import Report
from scripts.gpu_lib import __main__ as command
from scripts.gpu_lib import needs, parts
from scripts.gpu_lib.parts import PARTS

ROOT = Path(__file__).parents[1]
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "gpu"), "--no-setup", *arguments]
    return subprocess.run(command, env=WITHOUT_GPU, capture_output=True, text=True, check=False, timeout=110)


def written(folder: Path) -> list[str]:
    """Names of the files without their date."""
    return sorted(path.name[len("2026-01-01-") :] for path in folder.glob("*.md"))


def data_of(folder: Path, part: str) -> Any:
    (path,) = folder.glob(f"????-??-??-gpu-{part}.md")
    return json.loads(path.read_text().rpartition("```json\n")[2].removesuffix("\n```\n"))


def test_without_a_gpu_each_part_says_why_it_is_skipped_and_writes_nothing(tmp_path: Path) -> None:
    wanted = [name for name in PARTS if name != "server"]
    done = gpu("--results", str(tmp_path), "--parts", ",".join(wanted))
    assert done.returncode == 3, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == wanted
    for line in lines:
        assert f"skipped, torch sees no CUDA device (torch {torch.__version__} is " in line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_refused() -> None:
    done = gpu("--parts", "transfer,speed")
    assert done.returncode == 2
    assert "--parts must be some of tests,transfer,overlap,delivered,server, got speed" in done.stderr


def test_a_package_that_is_missing_costs_only_the_parts_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = needs.importlib.util.find_spec
    monkeypatch.setattr(
        needs.importlib.util, "find_spec", lambda name: None if name == "fastapi" else everything(name)
    )
    lacking = {name: needs.missing(set(part.needs) - {needs.CUDA}) for name, part in PARTS.items()}
    assert lacking["transfer"] == ""
    for name in ("overlap", "delivered", "server"):
        assert lacking[name] == "Python packages are missing: fastapi"


def test_a_file_is_written_for_each_part_and_a_second_run_goes_on(tmp_path: Path) -> None:
    first = gpu("--quick", "--results", str(tmp_path), "--parts", "transfer")
    assert first.returncode == 0, first.stdout + first.stderr
    assert written(tmp_path) == ["gpu-transfer.md"]
    assert data_of(tmp_path, "transfer")["missing"]
    assert {each["name"] for each in data_of(tmp_path, "transfer")["batches"]} == {
        "as stored",
        "widened to int64 there",
    }
    before = next(tmp_path.glob("*-gpu-transfer.md")).stat().st_mtime_ns
    second = gpu("--quick", "--results", str(tmp_path), "--parts", "transfer")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"transfer: skipped, {tmp_path}" in second.stdout
    assert "--again repeats it" in second.stdout
    assert next(tmp_path.glob("*-gpu-transfer.md")).stat().st_mtime_ns == before
    third = gpu("--quick", "--results", str(tmp_path), "--parts", "transfer", "--again")
    assert third.returncode == 0
    assert next(tmp_path.glob("*-gpu-transfer.md")).stat().st_mtime_ns > before


def test_steps_are_measured_with_their_limits(tmp_path: Path) -> None:
    """On the CPU; the same code goes to the GPU, where its figures mean something."""
    done = gpu("--quick", "--results", str(tmp_path), "--parts", "overlap")
    assert done.returncode == 0, done.stdout + done.stderr
    overlap = data_of(tmp_path, "overlap")
    assert overlap["server_bytes_per_second"] > 0
    assert overlap["bus_bytes_per_second"] is None
    assert "corpus-loader" in [outcome["name"] for outcome in overlap["cells"][0]["outcomes"]]


def test_what_one_server_delivers_is_measured(tmp_path: Path) -> None:
    done = gpu("--quick", "--results", str(tmp_path), "--parts", "delivered")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each["stored"] for each in data_of(tmp_path, "delivered")] == [True, False]


def test_a_part_that_fails_writes_no_file_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(run: parts.Run) -> Report:
        raise parts.PartFailed("it broke")

    def works(run: parts.Run) -> Report:
        return Report(data={"steps": 1}, tables=[])

    for name, measure in {"first": fails, "second": works}.items():
        monkeypatch.setitem(command.PARTS, name, parts.Part("made up", (), measure))
    monkeypatch.setattr(command.signal, "setitimer", lambda *_: None)  # the test's own limit uses it
    words = [
        "scripts/gpu",
        "--quick",
        "--device",
        "cpu",
        "--results",
        str(tmp_path),
        "--parts",
        "first,second",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == command.MISSED
    assert "first: FAILED, no file is written: it broke" in capsys.readouterr().err
    assert written(tmp_path) == ["gpu-second.md"]


def test_wheels_that_a_folder_lacks_are_named_and_cost_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "DISTRIBUTIONS", {"no_such_module": "no-such-module", "pytest": "pytest"})
    needs.install(str(tmp_path))
    error = capsys.readouterr().err
    assert "scripts/gpu: no-such-module was not installed: " in error
    assert "pytest" not in error.replace("no-such-module", "")


def test_the_chapter_fetches_the_wheels_that_the_parts_need() -> None:
    (line,) = re.findall(r"pip download (?:.*\\\n)*.*", (ROOT / "docs" / "gpu.md").read_text())
    named = line.partition("constraints.txt")[2].replace("\\", "").split()
    assert sorted(named) == sorted(set(needs.DISTRIBUTIONS.values()))


def copy_of(name: str, size: int, gigabytes: float, held: float = 5e-6) -> dict[str, Any]:
    figures = {"seconds": {"median": size / gigabytes / 1e9}, "held": {"median": held}}
    return {"name": name, "bytes": size, "bytes_per_second": gigabytes * 1e9, **figures}


def transfer_data(*, stored: float = 23.0, held: float = 4e-5) -> dict[str, Any]:
    return {
        "missing": [],
        "measurements": [
            copy_of("torch-pinned to device", 1 << 28, 24.0),
            copy_of("registered to device", 1 << 28, 25.0),
            copy_of("device to device", 1 << 28, 2000.0),  # no bus: it must not count as one
        ],
        "batches": [
            copy_of("as stored", 1 << 12, 3.0),  # small batches are not asked of
            copy_of("as stored", 1 << 22, stored),
            copy_of("widened to int64 there", 1 << 22, 21.0, held),
        ],
    }


def cell(seconds: float, batch_bytes: int, loader: float, slots: float) -> dict[str, Any]:
    stalls = {"pageable": 0.5, "corpus-loader": loader, "full-slots": slots, "constant": 0.0}
    outcomes = [
        {"name": name, "stall": {"median": stall}, "seconds": {"median": seconds}}
        for name, stall in stalls.items()
    ]
    return {"asked_seconds": seconds, "batch_bytes": batch_bytes, "outcomes": outcomes}


def overlap_data(*, loader: float = 0.005) -> dict[str, Any]:
    return {
        "bus_bytes_per_second": 25e9,
        "server_bytes_per_second": 2e9,
        "cells": [
            cell(0.001, 1_000_000, 0.04, 0.03),
            cell(0.001, 8_000_000, 3.0, 0.04),  # 8 GB/s: beyond one server, not beyond the bus
            cell(0.001, 64_000_000, 9.0, 2.0),  # 64 GB/s: beyond both
            cell(0.005, 4_000_000, loader, 0.001),
        ],
    }


def overlap_report(**figures: float) -> Report:
    return parts.overlap_report(overlap_data(**figures))


def transfer_report(**figures: float) -> Report:
    return parts.transfer_report(transfer_data(**figures))


@pytest.mark.parametrize(
    ("report", "reached"), [(transfer_report(), [40, 0.92]), (overlap_report(), [4, 4, 0.5, 0.1])]
)
def test_figures_that_reach_what_is_wanted(report: Report, reached: list[float]) -> None:
    """Cells that bus or server cannot feed are no targets."""
    assert [target.reached for target in report.targets] == pytest.approx(reached)
    assert all(target.met for target in report.targets)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (transfer_report(stored=20.0), "| 0.8 | at least 0.9 | NO |"),
        (transfer_report(held=9e-5), "| 90 us | at most 50 us | NO |"),
        (
            overlap_report(loader=0.02),
            "| stall of (e) from a server, steps of 5 ms and more | 2 % | at most 1 % | NO |",
        ),
    ],
)
def test_what_was_missed_is_said(report: Report, words: str) -> None:
    assert words in "\n".join(report.lines())


def test_the_report_names_what_limits_each_cell() -> None:
    lines = [*overlap_report().lines()]
    assert "| 1 | 1.00 | 1.00 | 1.00 | compute | +50.0% | +4.0% | +3.0% |" in lines
    assert "| 1 | 1.00 | 8.00 | 8.00 | server | +50.0% | +300.0% | +4.0% |" in lines
    assert "| 1 | 1.00 | 64.00 | 64.00 | bus | +50.0% | +900.0% | +200.0% |" in lines
