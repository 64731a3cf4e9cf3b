"""`corpus-client transfer`, run for real on the host with tiny sizes.

By the CPU's own clock every copy is made, only the bus is missing. With a GPU: tests/client/cuda.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from corpus_client.tools import transfer
from corpus_client.tools.app import app
from corpus_client.tools.timing import (
    LEAST_REPEATS,
    WARM_UPS,
    Clock,
    parse_size,
    size_name,
)
from corpus_client.tools.transfer import KINDS, host_memory

run = partial(CliRunner().invoke, app, env={"COLUMNS": "500"})
CPU = torch.device("cpu")
SIZE = 8200
TINY = ["transfer", "--device", "cpu", "--sizes", "4KiB,64KiB", "--repeats", "3"]


def test_json_for_machines() -> None:
    done = run([*TINY, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"machine", "measurements", "missing"}
    assert found["machine"]["device"] == "cpu"
    for each in found["measurements"]:
        assert each["bytes_per_second"] == pytest.approx(each["bytes"] / each["seconds"]["median"])
        assert each["held"] == each["seconds"]
    copies = {(each["name"], each["bytes"]) for each in found["measurements"]}
    names = ("host to host", "host to host, fresh pages")
    assert copies == {(name, size) for name in names for size in (4096, 65536)}
    [missing] = found["missing"]
    assert missing.startswith(f"transfers to a GPU: torch {torch.__version__} sees no CUDA device")


def test_copies_to_a_device_are_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stands in for the device: every copy is made, only the bus is missing."""
    monkeypatch.setattr(transfer, "on_host", transfer.to_device)
    found = transfer.measure(CPU, [4096, SIZE], 3)
    names = [each["name"] for each in found.data["measurements"]]
    assert names[:3] == ["pageable to device", "torch-pinned to device", "registered to device"]
    assert names == list(dict.fromkeys(names)) * 2
    for each in found.data["measurements"]:
        assert 0 < each["seconds"]["p10"] <= each["seconds"]["median"] <= each["seconds"]["p90"]
    console = Console(record=True, width=150)
    console.print(*found.shown)
    shown = console.export_text()
    for words in ("one copy, by size", "8.008 KiB", "device to device", " us"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4 parsecs"], "a size must be a whole number of B, kB, MB"),
        (["--sizes", "1B"], "in [64B, 64GiB], got '1B'"),
        (["--device", "gpu"], "device must be 'cpu' or an accelerator that torch sees here, got 'gpu'"),
        (["--device", "cuda:99"], "got 'cuda:99'"),
        (["--sizes", "32GiB", "--device", "cpu"], "no more than a quarter of the memory that is free"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run(["transfer", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_sizes_beyond_a_quarter_of_the_free_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "measurable_bytes", lambda device: 10 * 4096)
    found = transfer.measure(CPU, [4096, 8192], 3).data
    assert max(each["bytes"] for each in found["measurements"]) == 4096
    assert found["missing"][0].startswith("sizes above 6.666 KiB")


@pytest.mark.parametrize(
    ("text", "size", "name"),
    [
        ("64", 64, "64 B"),
        ("4kB", 4000, "3.906 KiB"),
        ("4 KiB", 4096, "4 KiB"),
        ("64mb", 64_000_000, "61.04 MiB"),
        ("1GiB", 1 << 30, "1 GiB"),
    ],
)
def test_sizes_read_and_write(text: str, size: int, name: str) -> None:
    assert parse_size(text) == size
    assert size_name(size) == name


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_every_kind_is_written_and_writable(kind: Any) -> None:
    memory = host_memory(kind, 300, CPU)
    assert memory.tolist() == [*range(256), *range(44)]
    assert memory.zero_().sum() == 0


def test_a_clock_warms_up_and_repeats() -> None:
    calls: list[int] = []
    done, held = Clock(CPU).time(lambda: calls.append(1), repeats=5, in_a_row=2)
    assert len(calls) == 2 * (WARM_UPS + 5)
    assert done.repeats == 5
    assert held == done


def test_a_long_measurement_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_client.tools.timing.LIMIT_SECONDS", 0.0)
    assert Clock(CPU).time(lambda: None, repeats=1000)[0].repeats == LEAST_REPEATS
