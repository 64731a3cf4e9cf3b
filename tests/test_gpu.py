"""`scripts/gpu` where there is no GPU: it says so and writes nothing; its parts and its report by themselves.

Figures in the report's tests are made up here, to see what becomes of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.servers import serving
from scripts.gpu_lib import needs, parts, report
from scripts.gpu_lib.soak import soak
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

ROOT = Path(__file__).parents[1]
WITHOUT_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}


def test_without_a_gpu_it_says_what_is_missing_and_writes_nothing(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "gpu"), "--no-setup", "--results", str(tmp_path)]
    done = subprocess.run(command, env=WITHOUT_GPU, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("scripts/gpu: nothing was measured and nothing was written. Missing:\n")
    assert f"- a CUDA device: torch sees none (torch {torch.__version__} is " in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_refused() -> None:
    command = [sys.executable, "-m", "scripts.gpu_lib", "--parts", "transfer,speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "--parts must be some of tests,transfer,overlap,delivered,soak, got speed" in done.stderr


def test_missing_packages_are_named_by_who_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "MODULES", {"plots": ("matplotlib", "no_such_package"), "tests": ("pytest",)})
    assert needs.missing()[0] == "Python packages for plots: no_such_package"


@pytest.fixture(scope="module")
def token_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return write_raw(folder / "tokens.bin", some_tokens(200_000, seed=3))


def test_the_parts_run_against_a_server_of_this_checkout(
    token_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU; the same code goes to the GPU, where its figures mean something."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'client'}")
    monkeypatch.setattr(parts, "STEP_MS", (1,))
    monkeypatch.setattr(parts, "BATCHES", ("100kB",))
    monkeypatch.setattr(parts, "SHAPES", ((8, 128),))
    transfer = parts.transfer("cpu", tmp_path / "plots", "--sizes", "4KiB", "--repeats", "3")
    assert transfer["missing"]
    with serving({NAME: token_path}) as server:
        [overlap] = parts.overlap(
            "cpu", server.url, token_path, tmp_path / "plots", "--steps", "2", "--rounds", "1"
        )
        delivered = parts.delivered("cpu", server.url, 0.2)
        soaked = parts.soak("cpu", server.url, token_path, 3)
        with pytest.raises(parts.PartFailed, match="device 'cuda:99' is not here"):
            parts.transfer("cuda:99", tmp_path)
    assert "corpus-loader" in [outcome["name"] for outcome in overlap["outcomes"]]
    assert (tmp_path / "plots" / "1ms-100kB" / "overlap-timeline.png").exists()
    assert [each["stored"] for each in delivered] == [True, False]
    assert (soaked["steps"], soaked["mismatched_tokens"]) == (3, 0)
    shown = report.markdown(
        {"machine": overlap["machine"], "overlap": [overlap], "delivered": delivered, "soak": soaked},
        date="2026-01-02",
        command="scripts/gpu",
    )
    assert "| wrong tokens in 3 steps | 0 | at most 0 | reached |" in shown


def test_a_long_run_finds_a_token_that_differs(token_path: Path, tmp_path: Path) -> None:
    """One token of the local copy differs, in the middle, where no check of copies looks."""
    tokens = np.fromfile(token_path, np.uint16)
    copy = tmp_path / "copy"
    copy.mkdir()
    tokens[100_000] ^= 1
    write_raw(copy / token_path.name, tokens)
    (tmp_path / "state").mkdir()
    with RunningServer({"gpu": token_path}, tmp_path / "state") as server:
        found = soak(server.url, "gpu", copy, torch.device("cpu"), 12)
    assert found["mismatched_tokens"] > 0  # 12 steps of 64 windows see the whole corpus several times


def made_up(**changes: Any) -> dict[str, Any]:
    """Results in which every figure is reached, and some changed."""

    def copy(name: str, section: str, size: int, parts: int, gigabytes: float, held: float) -> dict[str, Any]:
        spread = {"median": size / gigabytes / 1e9, "p10": 0.0, "p90": 1.0, "repeats": 5}
        figures = {"seconds": spread, "held": {**spread, "median": held}, "bytes_per_second": gigabytes * 1e9}
        return {"section": section, "name": name, "bytes": size, "parts": parts, "waited": None, **figures}

    def steps(seconds: float, batch_bytes: int, loader: float, slots: float) -> dict[str, Any]:
        stalls = {"pageable": 0.5, "corpus-loader": loader, "full-slots": slots, "constant": 0.0}
        outcomes = [{"name": n, "stall": s, "median_seconds": seconds} for n, s in stalls.items()]
        return {"asked_seconds": seconds, "batch_bytes": batch_bytes, "outcomes": outcomes}

    transfer = {
        "bus_bytes_per_second": 31.5e9,
        "read_too_early": {"right_at_once": False, "right_after_waiting": True},
        "missing": [],
        "measurements": [
            copy("page-locked to device", "copies", 1 << 20, 1, 20.0, 5e-6),
            copy("page-locked to device", "copies", 1 << 28, 1, 25.0, 5e-6),
            copy("as stored", "loader", 32 << 12, 32, 3.0, 90e-6),  # small batches are not asked of
            copy("as stored", "loader", 32 << 20, 32, 23.0, 30e-6),
            copy("widened to int64 there", "loader", 32 << 20, 32, 21.0, 40e-6),
        ],
    }
    return {
        "machine": {"gpu": "made up"},
        "tests": {"tests": 30, "failures": 0, "errors": 0, "skipped": 0},
        "transfer": transfer,
        "overlap": [
            steps(0.001, 8_000_000, 0.04, 0.03),
            steps(0.001, 64_000_000, 9.0, 2.0),  # 64 GB/s: no bus of 25 GB/s carries it
            steps(0.005, 8_000_000, 0.005, 0.001),
        ],
        "soak": {"steps": 10_000, "mismatched_tokens": 0, "device_bytes": [5, 5], "host_bytes": [7, 9]},
        "failed": {},
        "plots": ["2026-01-02-gpu/transfer-time.png"],
        **changes,
    }


def test_figures_that_reach_what_is_wanted() -> None:
    results = made_up()
    reached = {target.figure: target for target in report.targets(results)}
    assert len(reached) == 9
    assert all(target.met for target in reached.values())
    assert reached["our transfers of 1 MB and more / best page-locked bandwidth"].reached == pytest.approx(
        0.92
    )
    assert reached["CPU held by our transfer of a batch"].reached == pytest.approx(40)
    assert reached["stall of (e) from a server, steps of 1 ms"].reached == pytest.approx(4)
    assert report.passed(results)
    shown = report.markdown(results, date="2026-01-02", command="scripts/gpu --steps 9")
    assert "MISSED" not in shown
    assert "| 1 | 1.00 | 64 | 64.0, beyond the bus | +50.0% | +900.0% | +200.0% |" in shown
    assert "![2026-01-02-gpu/transfer-time.png](2026-01-02-gpu/transfer-time.png)" in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"soak": {"steps": 9, "mismatched_tokens": 1, "device_bytes": [0, 0], "host_bytes": [0, 0]}},
         "| wrong tokens in 9 steps | 1 | at most 0 | MISSED |"),
        ({"soak": {"steps": 9, "mismatched_tokens": 0, "device_bytes": [0, 1 << 25], "host_bytes": [0, 0]}},
         "| growth of device memory | 32 MiB | at most 16 MiB | MISSED |"),
        ({"failed": {"overlap": "it broke"}}, "## overlap: FAILED\n\n    it broke"),
        ({"tests": {"tests": 3, "failures": 0, "errors": 0, "skipped": 1}},
         "3 tests, 0 failures, 0 errors, 1 skipped"),
    ],
    ids=["wrong token", "growth", "part failed", "test skipped"],
)  # fmt: skip
def test_what_went_wrong_is_said_and_fails_the_run(changes: dict[str, Any], words: str) -> None:
    results = made_up(**changes)
    assert not report.passed(results)
    assert words in report.markdown(results, date="2026-01-02", command="scripts/gpu")


def test_a_part_that_did_not_run_has_no_figure() -> None:
    results = {"machine": {"gpu": "made up"}, "failed": {}}
    assert report.targets(results) == []
    assert "stall" not in report.markdown(results, date="2026-01-02", command="scripts/gpu")
