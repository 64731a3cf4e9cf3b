"""`scripts/gpu` where there is no GPU: it says what is left out, ends in time, writes each cell, and goes on.

Figures in the report's tests are made up here, to see what becomes of them.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from scripts.benchmarks.report import Report
from scripts.gpu_lib import __main__ as command
from scripts.gpu_lib import child, needs, overlap, plots
from scripts.gpu_lib.parts import PARTS, copies, profile, stalls, training
from scripts.gpu_lib.record import QUICK, Record
from scripts.gpu_lib.run import FAILED, LEFT_OUT, Cell, Figures, Run
from scripts.processes import claim_port, is_ready, running
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer
from tests.corpora import some_tokens, write_raw
from tests.simulated_device import backend

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "scripts" / "results").glob("*-gpu.json"))
PNG = b"\x89PNG\r\n"


def gpu(*arguments: str, **variables: str) -> str:
    """Run the command in a process of its own; return what it printed."""
    words = [str(ROOT / "scripts" / "gpu"), "--no-setup", "--quick", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_gpu_each_part_says_why_it_is_left_out_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [name for name in PARTS if name != "server"]
    assert command.main(["--results", str(tmp_path), "--parts", ",".join(wanted)]) == command.NOTHING
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("] ")[1].partition(":")[0] for line in lines] == wanted
    for line in lines:
        assert f"left out, torch sees no CUDA device (torch {torch.__version__} is " in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "copies,speed"], f"--parts must be some of {','.join(PARTS)}, got speed"),
        (["--device", "simulated"], "--device simulated has no speed to measure; give --quick with it"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the process of a part is told on the simulated device, with a server of two corpora."""
    folder = tmp_path_factory.mktemp("gpu")
    with ReferenceServer([ReferenceCorpus("bench", [some_tokens(9000, vocabulary=50_257)])]) as server:
        path = write_raw(folder / "bench.bin", some_tokens(200_000))
        place = {"url": server.url, "corpus": "bench", "path": str(path), "folder": str(folder)}
        yield {"device": backend.NAME, "quick": True, "done": [], "until": time.monotonic() + 9999, **place}


REHEARSED = {
    "copies": "measurements",
    "training": "tokens_per_second",
    "graphs": "next_into_seconds",
    "stalls": "outcomes",
    "locking": "lock_seconds",
    "groups": "measurements",
    "delivered": "tokens_per_second",
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(bool(backend.missing()), reason=backend.missing() or "it can be loaded")
@pytest.mark.parametrize("part", REHEARSED)
def test_a_part_runs_on_the_simulated_device(
    part: str,
    job: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same code goes to a card, where its figures mean something."""
    monkeypatch.setattr(overlap, "POOL_TOKENS", 1 << 16)
    with backend.present():
        child.main({**job, "part": part})
    cells = told(capsys)
    assert cells
    record = Record(tmp_path / "2026-01-02-gpu.json", head())
    for name, figures in cells.items():
        assert FAILED not in figures, figures
        assert REHEARSED[part] in figures
        record.add(part, name, figures)
    assert f"## {part}" in record.write_page().read_text()
    if part == "stalls":
        (cell,) = cells.values()
        assert {"pageable", "dataloader", "corpus-loader", "constant"} <= {
            each["name"] for each in cell["outcomes"]
        }
    if part == "training":
        assert {each["way"] for each in cells.values()} == set(training.WAYS)
    for picture in plots.draw(record, tmp_path):
        assert picture.read_bytes().startswith(PNG)
    assert (tmp_path / f"2026-01-02-gpu-{part}.png").exists() == (part in plots.PICTURES)


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--results", str(tmp_path), "--minutes", "20", "--parts"]
    assert "locking, 1 MiB: " in gpu(*options, "locking")
    (path,) = tmp_path.glob("*-gpu-quick.json")
    before = json.loads(path.read_text())["parts"]
    assert QUICK in path.with_suffix(".md").read_text()
    assert "locking, 1 MiB: " not in gpu(*options, "locking")
    assert json.loads(path.read_text())["parts"] == before


def test_plugins_of_the_machines_pytest_that_warn_are_not_loaded(tmp_path: Path) -> None:
    """A warning is an error here, so one that warns would let no test begin."""
    plugin = tmp_path / "warns"
    (plugin / "warns-1.dist-info").mkdir(parents=True)
    (plugin / "warns-1.dist-info" / "entry_points.txt").write_text("[pytest11]\nwarns = warns\n")
    (plugin / "warns-1.dist-info" / "METADATA").write_text("Name: warns\nVersion: 1\n")
    (plugin / "warns.py").write_text("def pytest_configure(config): raise SystemError('it was loaded')\n")
    said = gpu("--results", str(tmp_path), "--parts", "tests", PYTHONPATH=str(plugin))
    assert "tests, tests: " in said
    (path,) = tmp_path.glob("*-gpu-quick.json")
    assert json.loads(path.read_text())["parts"]["tests"]["tests"]["tests"] > 60


def test_a_run_ends_when_its_time_is_over_whatever_a_part_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured until then is in the file."""
    told = json.dumps({"cell": "first", "figures": {"took_seconds": 0.1}})
    monkeypatch.setattr(command.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{told}'\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    record = Record(tmp_path / "2026-01-02-gpu.json", head())
    job = {"part": "locking", "until": time.monotonic() + 5, "done": [], "device": "cpu"}
    command._run_part(job, record, command.Log())
    assert list(Record.read(record.path).cells("locking")) == ["first"]
    command._run_part(job, record, command.Log())
    said = capsys.readouterr().out
    assert "locking: ended, the time is over; what it had measured is written" in said
    assert "locking: left out, the time is over" in said


def head(**machine: str) -> dict[str, Any]:
    return {
        "title": "some",
        "command": "scripts/gpu",
        "machine": {"device": "made up", **machine},
        "notes": [],
    }


class MadeUp:
    """A part with three cells, of which the second fails and the third takes long."""

    def cells(self, run: Run) -> Iterator[Cell]:
        yield Cell(name="works", seconds=1, measure=lambda: {"speed": 1})
        yield Cell(name="fails", seconds=1, measure=partial(int, "no number"))
        yield Cell(name="long", seconds=1000, measure=lambda: {"speed": 2})

    def report(self, cells: Mapping[str, Figures]) -> Report:
        return Report(data=dict(cells), tables=[])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Figures]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return {each["cell"]: each["figures"] for each in lines}


def test_a_cell_that_fails_or_takes_too_long_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "load", lambda name: MadeUp())
    run = {"device": "cpu", "url": "", "corpus": "", "path": "", "quick": False, "folder": ""}
    child.main({"part": "made-up", "done": [], "until": time.monotonic() + 500, **run})
    found = told(capsys)
    assert found["works"]["speed"] == 1
    assert found["fails"][FAILED].startswith("ValueError: invalid literal")
    assert found["long"][LEFT_OUT].startswith("it takes up to 1000 s, ")
    child.main({"part": "made-up", "done": ["works", "fails"], "until": time.monotonic() + 5000, **run})
    assert list(told(capsys)) == ["long"]


def test_what_failed_is_measured_again_and_another_machine_needs_another_file(tmp_path: Path) -> None:
    path = tmp_path / "2026-01-02-gpu.json"
    record = Record(path, head())
    record.add("copies", "copy 1", {FAILED: "it broke"})
    record.add("copies", "copy 2", {"measurements": [], "took_seconds": 1})
    assert record.failures() == ["copies copy 1: it broke"]
    assert "Failed: copies copy 1: it broke" in record.write_page().read_text()
    assert list(Record(path, head()).data["parts"]["copies"]) == ["copy 2"]
    with pytest.raises(SystemExit, match="another machine; give --again to replace it, or another --results"):
        Record(path, head(cpu="another"))


def test_packages_are_those_that_the_projects_declare() -> None:
    """Both of them, with what the commands and these tests need; torch is the machine's."""
    names = {Requirement(line).name for line in needs.wanted()}
    for project in (".", "client"):
        declared = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["dependencies"]
        assert {Requirement(line).name for line in declared} <= names
    assert {"typer", "rich", "pytest", "pytest-timeout", "hypothesis"} <= names
    assert "torch" not in names


def test_a_package_that_is_missing_or_old_costs_only_the_parts_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a package of ours needs itself counts: pydantic names its core to the digit."""
    real = metadata.distribution

    def distribution(name: str) -> metadata.Distribution:
        if name == "fastapi":
            raise metadata.PackageNotFoundError(name)
        found = real(name)
        if name.replace("_", "-") == "pydantic-core":
            old = real(name)
            monkeypatch.setattr(
                type(old), "version", property(lambda its: "0.1" if its._path == old._path else "99")
            )
            return old
        return found

    monkeypatch.setattr(needs.metadata, "distribution", distribution)
    lacking = {
        name: needs.missing(need for need in part.needs if need != needs.CUDA) for name, part in PARTS.items()
    }
    assert "fastapi" not in lacking["copies"]
    assert "fastapi>=0.115" in lacking["server"]
    assert re.search(r"pydantic-core==\S+ \(here is 0.1\)", lacking["server"])


def test_the_command_imports_no_package_before_it_knows_that_it_is_there() -> None:
    code = "import sys, scripts.gpu_lib.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(loaded.stdout.split()).isdisjoint(
        {"torch", "numpy", "httpx", "typer", "fastapi", "corpus_client"}
    )


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name.replace('-', '_')}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")


def test_only_wheels_that_the_other_machine_lacks_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs.subprocess, "run", lambda *_, **__: None)  # pip, which would ask the network
    write_wheel(tmp_path, "pydantic", "2.12", "pydantic-core==2.41.5", "typing-extensions>=4.14")
    for name, version in (
        ("pydantic-core", "2.41.5"),
        ("typing-extensions", "4.15"),
        ("numpy", "2.4"),
        ("rich", "14"),
    ):
        write_wheel(tmp_path, name, version)
    (tmp_path / "have.txt").write_text(
        "pydantic_core==2.40\ntyping_extensions==4.14.1\nnumpy==1.26\nRich==13.9\nx @ y\n"
    )
    kept = needs.fetch(tmp_path, "3.12", needs.read_list(tmp_path / "have.txt"))
    assert [path.name.partition("-")[0] for path in kept] == ["numpy", "pydantic", "pydantic_core"]


def test_wheels_that_a_folder_lacks_are_named_and_cost_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "wanted", lambda: ["no-such-module>=1", "pytest"])
    needs.install(tmp_path)
    assert re.search(r"^scripts/gpu: no-such-module>=1 was not installed: .*\n$", capsys.readouterr().err)


def installed(lines: Iterable[str], found: dict[str, metadata.Distribution] | None = None) -> dict[str, Any]:
    """Return the distributions here that meet requirements, and what those need."""
    found = {} if found is None else found
    for wish in map(Requirement, lines):
        if "extra ==" in str(wish.marker or "") or (wish.marker and not wish.marker.evaluate()):
            continue
        its = metadata.distribution(wish.name)
        if its.name not in found:
            found[its.name] = its
            installed(its.requires or (), found)
    return found


def test_the_server_and_the_client_run_where_only_torch_and_those_packages_are(tmp_path: Path) -> None:
    """As on a bare machine: of this environment's packages all others are out of sight."""
    packages = tmp_path / "packages"
    packages.mkdir()
    places = [Path(each) for each in site.getsitepackages()]
    for distribution in installed([*needs.wanted(), "torch"]).values():
        for file in distribution.files or ():
            top = Path(file).parts[0]
            here = next((place / top for place in places if (place / top).exists()), None)
            if top != ".." and top != "__pycache__" and here is not None and not (packages / top).exists():
                (packages / top).symlink_to(here)
    corpus = write_raw(tmp_path / "web.bin", some_tokens(5000))
    path = f"sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(packages)!r}]"
    begin = f"import sys; {path}; "
    port = claim_port()
    words = [sys.executable, "-S", "-m", "corpus_server", "serve", f"web={corpus}", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    environment = f"PYTHONPATH={packages}:{ROOT}:{ROOT / 'client'}"
    serving = ["env", environment, *words, "--state-dir", str(tmp_path / "state")]
    with running(serving, ready=partial(is_ready, url)):
        take = (
            f"{begin}from corpus_client import CorpusLoader\n"
            f"loader = CorpusLoader({url!r}, corpus='web', seq_len=16, global_batch_size=4, device='cpu')\n"
            "print(tuple(next(loader).inputs.shape)); loader.close()\n"
            "from corpus_client.__main__ import main\n"
            "import scripts.gpu_lib.parts, scripts.gpu_lib.plots, pytest, tests.client.cuda.conftest\n"
            "sys.argv[1:] = ['bench', '--help']; main()\n"
        )
        client = ["env", environment, sys.executable, "-S", "-c", take]
        done = subprocess.run(client, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(4, 16)\n")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_that_were_kept_are_shown_in_the_chapter(path: Path, tmp_path: Path) -> None:
    record, chapter = Record.read(path), (ROOT / "docs" / "gpu.md").read_text()
    assert record.reports()
    assert record.data["notes"]
    for picture in plots.draw(record, tmp_path):
        assert picture.read_bytes().startswith(PNG)
        # scripts/charts.py draws the stalls for the chapter, light and dark.
        name = "chart-stalls.svg" if picture.stem.endswith("stalls") else picture.name
        assert (ROOT / "docs" / "images" / name).exists()
        assert f"images/{name}" in chapter


def copy_of(name: str, size: int, gigabytes: float, held: float = 5e-6) -> dict[str, Any]:
    figures = {"seconds": {"median": size / gigabytes / 1e9}, "held": {"median": held}}
    return {"name": name, "bytes": size, "bytes_per_second": gigabytes * 1e9, **figures}


def copies_report(*, stored: float = 23.0, held: float = 4e-5) -> Report:
    copied = [
        copy_of("torch-pinned to device", 1 << 28, 24.0),
        copy_of("registered to device", 1 << 28, 25.0),
        copy_of("device to device", 1 << 28, 2000.0),  # no bus: it must not count as one
    ]
    small = [copy_of("as stored", 1 << 12, 3.0)]  # small batches are not asked of
    large = [copy_of("as stored", 1 << 22, stored), copy_of("widened to int64 there", 1 << 22, 21.0, held)]
    cells = {"copy 1": copied, "batch 1": small, "batch 2": large}
    return copies.report({name: {"measurements": its} for name, its in cells.items()})


def stalls_report(*, loader: float = 0.005) -> Report:
    def cell(seconds: float, **found: float) -> Figures:
        outcomes = [
            {"name": name.replace("_", "-"), "stall": {"median": stall}, "seconds": {"median": seconds}}
            for name, stall in {"pageable": 0.5, **found, "constant": 0.0}.items()
        ]
        return {"asked_seconds": seconds, "batch_bytes": 1_000_000, "outcomes": outcomes}

    short, long = (
        cell(0.001, corpus_loader=0.04, full_slots=0.03),
        cell(0.005, corpus_loader=loader, full_slots=0.001),
    )
    return stalls.report({"short": short, "long": long})


def training_report(*, loader: float = 99.5) -> Report:
    def cell(way: str, speed: float) -> Figures:
        return {"rows": 16, "seq_len": 1024, "way": way, "looks": False, "tokens_per_second": speed}

    return training.report(
        {"a": cell("constant", 100.0), "b": cell("CorpusLoader", loader), "c": cell("nanoGPT", 50)}
    )


def traced(
    category: str, name: str, stream: int, start: float, seconds: float, **more: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": seconds,
        "args": {"stream": stream, **more},
    }


def profile_report(*, late: float = 0.0, stream: int = 20) -> Report:
    copied = "Memcpy HtoD (Pinned -> Device)"
    events = [
        traced("kernel", "matmul", 7, 0, 100),
        traced("kernel", "matmul", 7, 90, 110),
        traced("kernel", "other", 7, 201, 99),
        traced("gpu_memcpy", copied, stream, 50 + late, 10, bytes=500_000),
        traced("gpu_memcpy", copied, stream, 150, 10, bytes=500_000),
        traced("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7, 150, 10, bytes=4),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    return profile.report({"one": profile.analysis(events)})


@pytest.mark.parametrize(
    ("report", "reached"),
    [
        (copies_report(), [40, 0.92]),
        (stalls_report(), [4, 0.5, 3, 0.1]),
        (training_report(), [0.5025]),
        (profile_report(), [0, 0, 1, 299 / 300]),
    ],
)
def test_figures_that_reach_what_is_wanted(report: Report, reached: list[float]) -> None:
    assert sorted(target.reached for target in report.targets) == pytest.approx(sorted(reached), rel=1e-3)
    assert all(target.met for target in report.targets)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (copies_report(stored=20.0), "| 0.8 | at least 0.9 | NO |"),
        (copies_report(held=3e-4), "| 300 us | at most 100 us | NO |"),
        (
            stalls_report(loader=0.02),
            "| stall of (e) from a server, steps of 5 ms and more | 2 % | at most 1 % | NO |",
        ),
        (training_report(loader=90.0), "| stall of b | 11.1 % | at most 1 % | NO |"),
        (profile_report(late=245), "| share of the copies' time under a kernel | 0.75 | at least 0.9 | NO |"),
        (profile_report(stream=7), "| streams that copies share with kernels | 1 | at most 0 | NO |"),
    ],
)
def test_what_was_missed_is_said(report: Report, words: str) -> None:
    assert words in "\n".join(report.lines())
