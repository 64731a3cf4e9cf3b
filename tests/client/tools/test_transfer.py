"""`corpus-client transfer`, run for real on the host with tiny sizes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from corpus_client.cli import app
from corpus_client.tools import plots, transfer
from corpus_client.tools.gpus import Bus
from corpus_client.tools.machine import find_device
from corpus_client.tools.measurement import measured
from corpus_client.tools.sizes import parse_size, parse_sizes, seconds_name, size_name
from corpus_client.tools.timing import LEAST_REPEATS, WARM_UPS, HostMeter, Spread, Timing

run = partial(CliRunner().invoke, env={"COLUMNS": "500"})
TINY = ["transfer", "--device", "cpu", "--sizes", "4KiB,64KiB", "--repeats", "3"]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_json_for_machines() -> None:
    done = run(app, [*TINY, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert set(report) == {"machine", "bus_bytes_per_second", "measurements", "read_too_early", "missing"}
    assert report["machine"]["device"] == "cpu"
    assert report["bus_bytes_per_second"] is None
    assert {each["section"] for each in report["measurements"]} == {"copies", "pieces", "strided", "widening"}
    for each in report["measurements"]:
        assert each["bytes_per_second"] == pytest.approx(each["bytes"] / each["seconds"]["median"])
        assert each["held"] == each["seconds"]
    copies = {(each["name"], each["bytes"]) for each in report["measurements"] if each["section"] == "copies"}
    for name in ("host to host", "host to host, fresh pages", "host to host, 1 byte off the page"):
        assert {(name, 4096), (name, 65536)} <= copies
    [missing] = report["missing"]
    assert missing.startswith(f"transfers to a GPU: torch {torch.__version__} sees no CUDA device")


def test_tables_for_people_say_what_is_missing() -> None:
    done = run(app, TINY)
    assert done.exit_code == 0, done.output
    for words in ("one copy, by size", "64 KiB", "16 x 4 KiB", "from a transposed array", "widened to int64"):
        assert words in done.stdout
    assert "not measured: transfers to a GPU" in done.stdout


def test_plots_are_written(tmp_path: Path) -> None:
    done = run(app, [*TINY, "--plots", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    written = {path.stem for path in (tmp_path / "new").iterdir() if is_png(path)}
    assert written == {f"transfer-{name}" for name in ("bandwidth", "time", "pieces", "strided", "widening")}


def test_a_report_from_a_gpu_has_more_plots_and_its_bus_as_a_line(tmp_path: Path) -> None:
    """The figures are made up here: what is tested is that they can be drawn and shown."""
    spread = Spread(median=1e-3, p10=9e-4, p90=2e-3, repeats=5)
    timing = Timing(done=spread, held=spread.divided(100))
    found = [measured(section, "one", 1 << 20, timing) for section in transfer.SECTIONS]
    report = transfer.TransferReport(
        machine={"cpu": "a CPU", "gpu": "a GPU", "memory_bytes": 1 << 30, "bus": "PCIe 4 x16"},
        bus_bytes_per_second=Bus(generation=4, width=16).bytes_per_second,
        measurements=found,
        read_too_early={"right_at_once": False, "right_after_waiting": True},
        missing=[],
    )
    console = transfer.Console(record=True, width=150)
    transfer.show(report, console)
    shown = console.export_text()
    assert "bus: PCIe 4 x16, 31.5 GB/s in theory" in shown
    assert "read at once: old bytes; after torch.cuda.synchronize(): the new bytes" in shown
    paths = plots.save(tmp_path, "transfer", plots.of_transfer(report))
    assert {"transfer-calls.png", "transfer-waits.png", "transfer-concurrent.png"} <= {p.name for p in paths}
    assert all(is_png(path) for path in paths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4 parsecs"], "a size must be a number and one of B, kB, MB"),
        (["--sizes", "1B"], "a size must be whole bytes in [64, 64GiB], got '1B'"),
        (["--device", "gpu"], "device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (["--device", "cuda:99"], "device 'cuda:99' is not here: torch"),
        (["--sizes", "32GiB", "--device", "cpu"], "no more than a quarter of the memory that is free"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(arguments: list[str], message: str) -> None:
    done = run(app, ["transfer", *arguments])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_sizes_beyond_a_quarter_of_the_free_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "measurable_bytes", lambda device: 10 * 4096)
    report = transfer.measure(torch.device("cpu"), [4096, 8192], 3)
    assert max(each.bytes for each in report.of("copies")) == 4096
    assert report.missing[0].startswith("sizes above 6.7 KiB")


def test_without_matplotlib_plots_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(transfer, "measure", lambda *_: pytest.fail("it measured"))
    done = run(app, [*TINY, "--plots", str(tmp_path)])
    assert done.exit_code == 1
    assert (
        "--plots needs matplotlib, which is not installed; pip install 'corpus-client[plots]'" in done.stderr
    )


@pytest.mark.parametrize(
    ("text", "size", "name"),
    [
        ("64", 64, "64 B"),
        ("4kB", 4000, "4 kB"),
        ("4 KiB", 4096, "4 KiB"),
        ("1.5MiB", 1572864, "1.5 MiB"),
        ("64mb", 64_000_000, "64 MB"),
        ("1GiB", 1 << 30, "1 GiB"),
    ],
)
def test_sizes_read_and_write(text: str, size: int, name: str) -> None:
    assert parse_size(text) == size
    assert size_name(size) == name


def test_several_sizes_are_sorted_and_distinct() -> None:
    assert parse_sizes("1MiB, 4KiB,4096") == [4096, 1 << 20]


@pytest.mark.parametrize(
    ("seconds", "name"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-6, "4.2 us"), (1.2e-7, "120 ns")]
)
def test_durations_in_the_unit_that_fits(seconds: float, name: str) -> None:
    assert seconds_name(seconds) == name


def test_default_device_is_one_that_is_here() -> None:
    assert find_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_meter_warms_up_and_repeats() -> None:
    calls, befores = [], []
    timing = HostMeter().time(lambda: calls.append(1), repeats=5, before=lambda: befores.append(1))
    assert len(calls) == len(befores) == WARM_UPS + 5
    assert timing.done.repeats == 5
    assert timing.held == timing.done


def test_a_long_measurement_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_client.tools.timing.LIMIT_SECONDS", 0.0)
    assert HostMeter().time(lambda: None, repeats=1000).done.repeats == LEAST_REPEATS
