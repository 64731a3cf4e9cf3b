"""Slots within their bounds, and cut from one piece of memory."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corpus_client import Staging, errors
from corpus_client.staging.slots import REQUEST_BYTES, SlotSizes, choose_slot_sizes, host_memory_bytes
from tests.client.staging.counting import new_slots


@given(
    batch_bytes=st.integers(1, 1 << 28),
    prefetch_bytes=st.integers(1 << 12, 1 << 33),
    in_flight=st.integers(1, 64),
    ranks_on_host=st.integers(1, 8),
)
def test_slots_stay_within_their_budget(
    batch_bytes: int, prefetch_bytes: int, in_flight: int, ranks_on_host: int
) -> None:
    """The ranks of a host share half of its memory."""
    options = {"in_flight": in_flight, "ranks_on_host": ranks_on_host}
    budget = min(prefetch_bytes, host_memory_bytes() // 2 // ranks_on_host)
    try:
        size = choose_slot_sizes(batch_bytes=batch_bytes, prefetch_bytes=prefetch_bytes, **options)
    except errors.InvalidArgument:
        assert budget < 2 * batch_bytes + 2 * mmap.PAGESIZE
        return
    assert 2 <= size.num_slots <= 1024
    assert size.num_slots * size.slot_bytes <= budget
    assert size.slot_bytes >= size.steps_per_slot * batch_bytes
    assert 1 <= size.steps_per_slot <= 256
    assert size.steps_per_slot == 1 or size.steps_per_slot * batch_bytes <= REQUEST_BYTES


def test_the_default_is_four_slots_of_a_whole_request() -> None:
    """Two in flight, one being read, one ready; larger only where two batches are."""
    size = choose_slot_sizes(batch_bytes=1 << 20, prefetch_bytes=Staging().prefetch_bytes, in_flight=2)
    assert (size.num_slots, size.slot_bytes) == (4, REQUEST_BYTES)
    size = choose_slot_sizes(batch_bytes=64_000_000, prefetch_bytes=None, in_flight=2)
    assert (size.num_slots, size.steps_per_slot) == (2, 1)


@pytest.mark.parametrize(
    ("batch_bytes", "prefetch_bytes", "in_flight", "num_slots", "steps"),
    [
        pytest.param(1_000_000, 2 * 1_003_520, 2, 2, 1, id="exactly two slots"),
        pytest.param(1_000_000, 3 * 1_003_520 - 1, 2, 2, 1, id="not yet three"),
        pytest.param(1024, 8 * 4096 - 1, 2, 7, 4, id="slots are whole pages"),
        pytest.param(1024, 8 * 4096, 6, 8, 4, id="more in flight"),
        pytest.param(5 << 20, 256 << 20, 2, 17, 3, id="a request of less than sixteen mebibytes"),
        pytest.param(32, 256 << 20, 2, 1024, 256, id="as many as may be"),
    ],
)
def test_slots_are_as_many_and_as_large_as_fit(
    batch_bytes: int, prefetch_bytes: int, in_flight: int, num_slots: int, steps: int
) -> None:
    size = choose_slot_sizes(batch_bytes=batch_bytes, prefetch_bytes=prefetch_bytes, in_flight=in_flight)
    assert size == SlotSizes(num_slots=num_slots, steps_per_slot=steps, batch_bytes=batch_bytes)


def test_batches_of_a_slot_are_views_in_order() -> None:
    size = SlotSizes(num_slots=3, steps_per_slot=2, batch_bytes=2 * 3 * 2)
    slots = new_slots(size)
    for number, slot in enumerate(slots):
        assert slot.storage.data_ptr() % mmap.PAGESIZE == 0
        slot.view[:] = bytes([number]) * len(slot.view)
    assert [set(slot.storage.tolist()) for slot in slots] == [{0}, {1}, {2}]
    slots[1].view[:24] = np.arange(65500, 65512, dtype="<u2").tobytes()
    batches = slots[1].batches(0, 2, (2, 3), torch.uint16)
    assert batches.tolist() == np.arange(65500, 65512).reshape(2, 2, 3).tolist()
    assert slots[1].batches(1, 1, (2, 3), torch.uint16).data_ptr() == slots[1].storage.data_ptr() + 12
