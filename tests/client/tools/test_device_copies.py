"""Transfers by the CPU's own meter: every copy is made and checked, only the bus is missing.

The same functions with a GPU are in tests/client/cuda.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from corpus_client.tools import device_copies
from corpus_client.tools.measurement import SECTIONS
from corpus_client.tools.timing import HostMeter, Meter

SIZE = 8200  # four rows of the strided copies


@pytest.fixture(autouse=True)
def short_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "QUEUED_SECONDS", 1e-4)


@pytest.mark.parametrize(
    ("function", "arguments", "section"),
    [
        (device_copies.by_size, ([4096, SIZE], 3), "copies"),
        (device_copies.calls, (SIZE, 3), "calls"),
        (device_copies.in_pieces, (SIZE, [2050, SIZE], 3), "pieces"),
        (device_copies.strided, (SIZE, 3), "strided"),
        (device_copies.widening, (100, 3), "widening"),
        (device_copies.waits, (SIZE, 3), "waits"),
        (device_copies.concurrent, (SIZE, 3), "concurrent"),
        (device_copies.by_loader, ([4096, SIZE], 3), "loader"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_section_measures_what_it_names(function: Any, arguments: tuple[Any, ...], section: str) -> None:
    meter: Meter = HostMeter()
    found = function(meter, *arguments)
    assert section in SECTIONS
    assert {each.section for each in found} == {section}
    assert len({(each.name, each.bytes, each.parts) for each in found}) == len(found)
    for each in found:
        assert each.bytes > 0
        assert each.seconds.repeats == 3
        assert 0 < each.seconds.p10 <= each.seconds.median <= each.seconds.p90
        assert (each.waited is None) == (section != "waits")


def test_a_non_blocking_copy_is_right_after_waiting() -> None:
    assert device_copies.read_too_early(HostMeter(), SIZE)["right_after_waiting"]


def test_batches_queued_at_once_stay_within_their_memory() -> None:
    assert [device_copies.queued_batches(size) for size in (4096, 2 << 20, 16 << 20, 1 << 30)] == [
        32,
        32,
        4,
        4,
    ]


def test_host_tensor_is_pageable_and_written() -> None:
    assert device_copies.host_tensor(300).tolist() == [*range(256), *range(44)]
    assert not device_copies.host_tensor(300).is_pinned() if torch.cuda.is_available() else True
