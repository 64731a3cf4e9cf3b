"""What is read from nvidia-smi, and what follows from it."""

from __future__ import annotations

import pytest
import torch

from corpus_client.staging.ring import find_device
from corpus_client.staging.slots import host_memory_bytes
from corpus_client.tools.machine import describe, links, measurable_bytes, one_line, parse_gpus


@pytest.mark.parametrize(
    ("line", "bus", "is_narrow"),
    [
        ("5, 16, 16", "PCIe 5 x16", False),
        ("4, 8, 16", "PCIe 4 x8", True),
        ("4, 8, [N/A]", "PCIe 4 x8", False),
        ("[N/A], [N/A], [Not Supported]", "PCIe link unknown", False),
    ],
    ids=["whole", "narrow", "narrow as far as known", "virtual"],
)
def test_what_the_driver_lists(line: str, bus: str, is_narrow: bool) -> None:
    [gpu] = parse_gpus(f"NVIDIA H100, 550.54, {line}\n")
    assert (gpu.name, gpu.driver) == ("NVIDIA H100", "550.54")
    assert (gpu.bus, gpu.is_narrow) == (bus, is_narrow)


@pytest.mark.parametrize("listing", ["", "No devices were found\n", "\nbroken line\n"])
def test_what_lists_no_gpu(listing: str) -> None:
    assert parse_gpus(listing) == []


def test_several_gpus_in_their_order() -> None:
    gpus = parse_gpus("A, 550, 4, 16, 16\nB, 550, 4, 16, 16\n")
    assert [gpu.name for gpu in gpus] == ["A", "B"]
    assert links(gpus) == "PCIe 4 x16"


def test_default_device_is_one_that_is_here() -> None:
    assert find_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_machine_in_one_line() -> None:
    machine = describe(torch.device("cpu"))
    assert machine["cpu"]
    assert f"torch {torch.__version__}" in one_line(machine)
    assert 0 < measurable_bytes(torch.device("cpu")) <= host_memory_bytes() // 4
