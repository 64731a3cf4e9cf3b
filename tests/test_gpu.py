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

import numpy as np
import pytest
import torch

from scripts.gpu_lib import needs, parts, report
from scripts.gpu_lib.soak import soak
from scripts.gpu_lib.table import PARTS
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

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
    assert "--parts must be some of tests,transfer,overlap,delivered,soak,server, got speed" in done.stderr


def test_a_package_that_is_missing_costs_only_the_parts_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = needs.importlib.util.find_spec
    monkeypatch.setattr(
        needs.importlib.util, "find_spec", lambda name: None if name == "fastapi" else everything(name)
    )
    lacking = {name: needs.missing(set(part.needs) - {needs.CUDA}) for name, part in PARTS.items()}
    assert lacking["transfer"] == ""
    for name in ("overlap", "delivered", "soak", "server"):
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
    second = gpu("--quick", "--results", str(tmp_path), "--parts", "transfer,soak")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"transfer: skipped, {tmp_path}" in second.stdout
    assert "--again repeats it" in second.stdout
    assert written(tmp_path) == ["gpu-soak.md", "gpu-transfer.md"]
    assert next(tmp_path.glob("*-gpu-transfer.md")).stat().st_mtime_ns == before
    soaked = data_of(tmp_path, "soak")
    assert (soaked["steps"], soaked["mismatched_tokens"]) == (parts.QUICK_STEPS, 0)
    third = gpu("--quick", "--results", str(tmp_path), "--parts", "transfer", "--again")
    assert third.returncode == 0
    assert next(tmp_path.glob("*-gpu-transfer.md")).stat().st_mtime_ns > before


def test_parts_that_need_a_server_have_their_limits_with_them(tmp_path: Path) -> None:
    """On the CPU; the same code goes to the GPU, where its figures mean something."""
    done = gpu("--quick", "--results", str(tmp_path), "--parts", "overlap,delivered")
    assert done.returncode == 0, done.stdout + done.stderr
    overlap = data_of(tmp_path, "overlap")
    assert overlap["server_bytes_per_second"] > 0
    assert overlap["bus_bytes_per_second"] is None
    assert "corpus-loader" in [outcome["name"] for outcome in overlap["cells"][0]["outcomes"]]
    assert [each["stored"] for each in data_of(tmp_path, "delivered")] == [True, False]


def test_a_part_that_fails_writes_no_file_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts.gpu_lib import __main__ as command

    def fails(run: parts.Run) -> None:
        raise parts.PartFailed("it broke")

    table = {
        name: parts_of(run) for name, run in {"first": fails, "second": lambda run: {"steps": 1}}.items()
    }
    monkeypatch.setattr(command, "PARTS", table)
    monkeypatch.setattr(parts.signal, "setitimer", lambda *_: None)  # the test's own limit uses it
    chosen = command.argparse.Namespace(again=False, quick=True, device="cpu")
    assert command.run(["first", "second"], tmp_path, chosen) == command.MISSED
    assert "first: FAILED, no file is written: it broke" in capsys.readouterr().err
    assert written(tmp_path) == ["gpu-second.md"]


def parts_of(run: Any) -> Any:
    from scripts.gpu_lib.table import Part

    return Part("made up", (), run, lambda data: iter(["shown"]))


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


@pytest.fixture(scope="module")
def token_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return write_raw(folder / "tokens.bin", some_tokens(200_000, seed=3))


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


def soak_data(*, wrong: int = 0, device: int = 0) -> dict[str, Any]:
    return {
        "steps": 10_000,
        "mismatched_tokens": wrong,
        "device_bytes": [5, 5 + device],
        "host_bytes": [7, 9],
    }


@pytest.mark.parametrize(
    ("part", "data", "reached"),
    [
        ("transfer", transfer_data(), [40, 0.92]),
        ("overlap", overlap_data(), [0.5, 4, 0.1, 4]),
        ("soak", soak_data(), [0, 0, 2 / 2**20]),
        ("tests", {"tests": 30, "failures": 0, "errors": 0, "skipped": 0}, [0, 0, 0]),
    ],
)
def test_figures_that_reach_what_is_wanted(part: str, data: Any, reached: list[float]) -> None:
    """Cells that bus or server cannot feed are no targets."""
    targets = PARTS[part].targets(data)
    assert [target.reached for target in targets] == pytest.approx(reached)
    assert all(target.met for target in targets)


@pytest.mark.parametrize(
    ("part", "data", "words"),
    [
        ("soak", soak_data(wrong=1), "| wrong tokens in 10,000 steps | 1 | at most 0 | MISSED |"),
        ("soak", soak_data(device=1 << 25), "| growth of device memory | 32 MiB | at most 16 MiB | MISSED |"),
        ("tests", {"tests": 3, "failures": 0, "errors": 0, "skipped": 1},
         "| skipped of 3 tests | 1 | at most 0 | MISSED |"),
        ("transfer", transfer_data(stored=20.0), "| 0.8 | at least 0.9 | MISSED |"),
        ("transfer", transfer_data(held=9e-5), "| 90 us | at most 50 us | MISSED |"),
        ("overlap", overlap_data(loader=0.02),
         "| stall of (e) from a server, steps of 5 ms and more | 2 % | at most 1 % | MISSED |"),
    ],
)  # fmt: skip
def test_what_was_missed_is_said(part: str, data: Any, words: str) -> None:
    assert words in shown(part, data)


def shown(part: str, data: Any) -> str:
    found = {"machine": {"gpu": "made up"}, "seconds": 12.3, "plots": ["a/overlap-stall.png"], "data": data}
    chosen = PARTS[part]
    lines = chosen.lines(data)
    return report.markdown(f"scripts/gpu {part}", found, chosen.targets(data), lines, command="scripts/gpu")


def test_the_report_names_what_limits_each_cell() -> None:
    page = shown("overlap", overlap_data())
    assert "| 1 | 1.00 | 1.00 | 1.00 | compute | +50.0% | +4.0% | +3.0% |" in page
    assert "| 1 | 1.00 | 8.00 | 8.00 | server | +50.0% | +300.0% | +4.0% |" in page
    assert "| 1 | 1.00 | 64.00 | 64.00 | bus | +50.0% | +900.0% | +200.0% |" in page
    assert "- gpu: made up\n- measured in 12 s\n" in page
    assert "![a/overlap-stall.png](a/overlap-stall.png)" in page


def test_every_part_can_be_shown_and_read_back() -> None:
    tables = [{"title": "workers x clients", "columns": ["", "M tokens/s"], "rows": [["ours, 1 x 1", "500"]]}]
    delivered = {"rows": 64, "seq_len": 1024, "stored": True, "tokens_per_second": 5e8, "wait_share": 0.9}
    delivered |= {"wait": {"median": 1e-3, "p99": 2e-3}}
    every = {
        "tests": {"tests": 3, "failures": 0, "errors": 0, "skipped": 0},
        "transfer": transfer_data(),
        "overlap": overlap_data(),
        "delivered": [delivered],
        "soak": soak_data(),
        "server": {"tables": tables, "notes": ["All on 16 cores."]},
    }
    assert every.keys() == PARTS.keys()
    for part, data in every.items():
        page = shown(part, data)
        assert json.loads(page.rpartition("```json\n")[2].removesuffix("\n```\n")) == data
    assert "| ours, 1 x 1 | 500 |" in shown("server", every["server"])
