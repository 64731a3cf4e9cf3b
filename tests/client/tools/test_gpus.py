"""What is read from nvidia-smi, and what follows from it."""

from __future__ import annotations

import pytest

from corpus_client.tools.gpus import Bus, Gpu, parse_gpus


@pytest.mark.parametrize(
    ("line", "bus", "width_max", "is_narrow"),
    [
        ("5, 16, 16", Bus(generation=5, width=16), 16, False),
        ("4, 8, 16", Bus(generation=4, width=8), 16, True),
        ("4, 8, [N/A]", Bus(generation=4, width=8), None, False),
        ("[N/A], [N/A], [Not Supported]", None, None, False),
        ("9, 16, 16", None, 16, False),
    ],
    ids=["whole", "narrow", "narrow as far as known", "virtual", "generation of the future"],
)
def test_what_the_driver_lists(line: str, bus: Bus | None, width_max: int | None, is_narrow: bool) -> None:
    [gpu] = parse_gpus(f"NVIDIA H100, GPU-aa-1, 550.54, {line}\n")
    assert gpu == Gpu(name="NVIDIA H100", uuid="GPU-aa-1", driver="550.54", bus=bus, width_max=width_max)
    assert gpu.is_narrow == is_narrow


@pytest.mark.parametrize("listing", ["", "No devices were found\n", "\nbroken line\n"])
def test_what_lists_no_gpu(listing: str) -> None:
    assert parse_gpus(listing) == []


def test_several_gpus_in_their_order() -> None:
    listing = "A, GPU-1, 550, 4, 16, 16\nB, GPU-2, 550, 5, 16, 16\n"
    assert [gpu.name for gpu in parse_gpus(listing)] == ["A", "B"]


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"), [(1, 16, 4.0), (3, 16, 15.754), (4, 8, 15.754), (5, 16, 63.015)]
)
def test_theoretical_bandwidth(generation: int, width: int, gigabytes: float) -> None:
    """Table of PCI-SIG's rates, one way."""
    assert Bus(generation=generation, width=width).bytes_per_second / 1e9 == pytest.approx(
        gigabytes, abs=0.01
    )
