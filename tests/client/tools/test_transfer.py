"""`corpus-client transfer`, run for real on the host with tiny sizes.

By the CPU's own clock every copy is made, only the bus is missing. With a GPU: tests/client/cuda.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from corpus_client.tools.app import app
from corpus_client.tools.copies import KINDS, host_memory

run = partial(CliRunner().invoke, app, env={"COLUMNS": "500"})
CPU = torch.device("cpu")

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


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_every_kind_is_written_and_writable(kind: Any) -> None:
    memory = host_memory(kind, 300, CPU)
    assert memory.tolist() == [*range(256), *range(44)]
    assert memory.zero_().sum() == 0
