"""Ring sizes within their bounds; slots over one piece of memory."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corpus_client import Staging, errors
from corpus_client.staging.slots import (
    REQUEST_BYTES,
    RingSize,
    _limits,
    allocate_ring,
    host_memory_bytes,
    ring_size,
)


@given(
    batch_bytes=st.integers(1, 1 << 28),
    prefetch_bytes=st.integers(1 << 12, 1 << 33),
    in_flight=st.integers(1, 64),
)
def test_ring_stays_within_its_budget(batch_bytes: int, prefetch_bytes: int, in_flight: int) -> None:
    budget = min(prefetch_bytes, host_memory_bytes() // 2)
    try:
        size = ring_size(batch_bytes=batch_bytes, prefetch_bytes=prefetch_bytes, in_flight=in_flight)
    except errors.InvalidArgument:
        assert budget < 2 * batch_bytes + 2 * mmap.PAGESIZE
        return
    assert size.num_slots >= 2
    assert size.num_slots * size.slot_bytes <= budget
    assert size.slot_bytes >= size.steps_per_slot * batch_bytes
    assert 1 <= size.steps_per_slot <= 256
    assert size.steps_per_slot == 1 or size.steps_per_slot * batch_bytes <= REQUEST_BYTES


@pytest.mark.parametrize(
    ("batch_bytes", "steps"), [(64 * 1025 * 2, 127), (512 * 2049 * 2, 7), (2, 256), (1 << 20, 16)]
)
def test_requests_are_about_sixteen_mebibytes(batch_bytes: int, steps: int) -> None:
    size = ring_size(batch_bytes=batch_bytes, prefetch_bytes=256 << 20, in_flight=2)
    assert size.steps_per_slot == steps


def test_the_default_is_four_slots_of_a_whole_request() -> None:
    """Two in flight, one being read, one ready; a second loader for evaluation takes no more than that."""
    size = ring_size(batch_bytes=1 << 20, prefetch_bytes=Staging().prefetch_bytes, in_flight=2)
    assert (size.num_slots, size.slot_bytes) == (4, REQUEST_BYTES)


def test_there_are_at_most_1024_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few bytes would otherwise make millions of objects."""
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 1 << 40)
    assert ring_size(batch_bytes=2, prefetch_bytes=1 << 30, in_flight=2).num_slots == 1024


def test_too_small_a_budget_names_the_batch() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"two slots of 1,003,520 bytes.*got 1,500,000"):
        ring_size(batch_bytes=1_000_000, prefetch_bytes=1_500_000, in_flight=2)


def test_half_of_the_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 64 << 20)
    size = ring_size(batch_bytes=1 << 20, prefetch_bytes=256 << 20, in_flight=2)
    assert size.num_slots * size.slot_bytes == 32 << 20


def test_limits_of_a_cgroup_and_of_all_above_it_count(tmp_path: Path) -> None:
    group = tmp_path / "pods" / "one"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (tmp_path / "pods" / "memory.max").write_text("1234\n")
    (tmp_path / "memory.max").write_text("9999\n")
    assert list(_limits(str(tmp_path), "/pods/one", "memory.max")) == [1234, 9999]


def test_slots_are_page_aligned_and_apart() -> None:
    size = RingSize(num_slots=3, steps_per_slot=2, batch_bytes=2 * 3 * 2)
    slots = allocate_ring(size).slots
    for number, slot in enumerate(slots):
        assert slot.storage.data_ptr() % mmap.PAGESIZE == 0
        slot.view[:] = bytes([number]) * len(slot.view)
    assert [set(slot.storage.tolist()) for slot in slots] == [{0}, {1}, {2}]


def test_batches_of_a_slot_are_views_in_order() -> None:
    size = RingSize(num_slots=2, steps_per_slot=2, batch_bytes=2 * 3 * 2)
    (slot, _) = allocate_ring(size).slots
    slot.view[:24] = np.arange(65500, 65512, dtype="<u2").tobytes()
    batches = slot.batches(0, 2, (2, 3), torch.uint16)
    assert batches[0].tolist() == [[65500, 65501, 65502], [65503, 65504, 65505]]
    assert batches[1].tolist() == [[65506, 65507, 65508], [65509, 65510, 65511]]
    assert batches[1].data_ptr() == slot.storage.data_ptr() + 12
    assert slot.batches(1, 1, (2, 3), torch.uint16).tolist() == [batches[1].tolist()]


class Pinning:
    """Stands for a driver: what is locked, by address."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None]:
        self.locked[address] = num_bytes
        return lambda: self.locked.__delitem__(address)


SIZE = RingSize(num_slots=3, steps_per_slot=2, batch_bytes=2 * 3 * 2)


def test_pinned_slots_are_one_locked_piece_of_whole_pages() -> None:
    pinning = Pinning()
    ring = allocate_ring(SIZE, pinning)
    first = ring.slots[0].storage.data_ptr()
    assert first % mmap.PAGESIZE == 0
    assert pinning.locked == {first: SIZE.num_bytes}
    assert SIZE.num_bytes == 3 * mmap.PAGESIZE
    offsets = [slot.storage.data_ptr() - first for slot in ring.slots]
    assert offsets == [0, mmap.PAGESIZE, 2 * mmap.PAGESIZE]


@pytest.mark.parametrize("kept", ["view", "batch"])
def test_memory_stays_locked_while_anything_can_be_read_from_it(kept: str) -> None:
    pinning = Pinning()
    ring = allocate_ring(SIZE, pinning)
    slot = ring.slots[1]
    part = slot.view[:4] if kept == "view" else slot.batches(0, 1, (2, 3), torch.uint16)[0]
    del ring, slot
    gc.collect()
    assert len(pinning.locked) == 1
    del part
    gc.collect()
    assert pinning.locked == {}


def test_what_cannot_be_locked_is_given_back() -> None:
    def refuse(address: int, num_bytes: int) -> Callable[[], None]:
        raise errors.PinningFailed("no")

    size = RingSize(num_slots=64, steps_per_slot=1, batch_bytes=1 << 20)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        with pytest.raises(errors.PinningFailed):
            allocate_ring(size, refuse)
    gc.collect()
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 20


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads is what is tested
def test_forked_child_neither_sees_nor_unlocks_the_slots() -> None:
    pinning = Pinning()
    ring = allocate_ring(SIZE, pinning)
    address = ring.slots[0].storage.data_ptr()
    child = os.fork()
    if child == 0:
        mapped = any(
            int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
            for line in Path("/proc/self/maps").read_text().splitlines()
        )
        del ring
        gc.collect()
        os._exit(2 * mapped + (len(pinning.locked) != 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(pinning.locked) == 1


def test_ranks_of_a_host_share_half_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 64 << 20)
    size = ring_size(batch_bytes=1 << 20, prefetch_bytes=256 << 20, in_flight=2, ranks_on_host=4)
    assert size.num_slots * size.slot_bytes == 8 << 20
    with pytest.raises(errors.InvalidArgument, match="gives each of 32 ranks 1,048,576"):
        ring_size(batch_bytes=1 << 20, prefetch_bytes=256 << 20, in_flight=2, ranks_on_host=32)
