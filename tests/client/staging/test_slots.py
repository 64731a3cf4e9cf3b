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


@pytest.mark.parametrize(
    ("batch_bytes", "prefetch_bytes", "in_flight", "num_slots", "steps"),
    [
        pytest.param(1_000_000, 2 * 1_003_520, 2, 2, 1, id="exactly two slots"),
        pytest.param(1_000_000, 3 * 1_003_520 - 1, 2, 2, 1, id="not yet three"),
        pytest.param(1_000_000, 3 * 1_003_520, 2, 3, 1, id="three"),
        pytest.param(4096, 8192, 1, 2, 1, id="batches of a page"),
        pytest.param(1024, 5 * 4096 - 1, 2, 4, 4, id="slots of a page"),
        pytest.param(1024, 8 * 4096 - 1, 2, 7, 4, id="slots are whole pages"),
        pytest.param(1024, 8 * 4096, 2, 4, 8, id="slots of two pages"),
        pytest.param(1024, 8 * 4096, 6, 8, 4, id="more in flight"),
        pytest.param(5 << 20, 256 << 20, 2, 17, 3, id="a request of less than sixteen mebibytes"),
        pytest.param(17 << 20, 256 << 20, 2, 15, 1, id="a request of one batch"),
        pytest.param(32, 256 << 20, 2, 1024, 256, id="as many as may be"),
    ],
)
def test_slots_are_as_many_and_as_large_as_fit(
    batch_bytes: int,
    prefetch_bytes: int,
    in_flight: int,
    num_slots: int,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 1 << 40)
    size = ring_size(batch_bytes=batch_bytes, prefetch_bytes=prefetch_bytes, in_flight=in_flight)
    assert size == RingSize(num_slots=num_slots, steps_per_slot=steps, batch_bytes=batch_bytes)


@pytest.mark.parametrize(
    ("steps", "batch_bytes", "pages"), [(1, 1, 1), (1, 4096, 1), (2, 2048, 1), (1, 4097, 2), (3, 4096, 3)]
)
def test_a_slot_takes_the_pages_that_its_batches_begin(steps: int, batch_bytes: int, pages: int) -> None:
    size = RingSize(num_slots=5, steps_per_slot=steps, batch_bytes=batch_bytes)
    found = (size.used_bytes, size.slot_bytes, size.num_bytes)
    assert found == (steps * batch_bytes, pages * mmap.PAGESIZE, 5 * pages * mmap.PAGESIZE)


@pytest.mark.parametrize(
    ("memory", "prefetch_bytes", "ranks", "share"),
    [
        pytest.param(1 << 40, 2_007_039, 1, "549,755,813,888", id="a byte too few"),
        pytest.param(2 * 2_007_040 - 1, 1 << 30, 1, "2,007,039", id="half of the memory is a byte too few"),
        pytest.param(16 * 2_007_040 - 1, 1 << 30, 8, "2,007,039", id="an eighth of that is a byte too few"),
    ],
)
def test_too_small_a_budget_names_the_batch(
    memory: int, prefetch_bytes: int, ranks: int, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: memory)
    with pytest.raises(errors.InvalidArgument) as caught:
        ring_size(batch_bytes=1_000_000, prefetch_bytes=prefetch_bytes, in_flight=2, ranks_on_host=ranks)
    assert str(caught.value) == (
        f"prefetch_bytes must hold two slots of 1,003,520 bytes, got {prefetch_bytes:,}, and half of the "
        f"host's memory gives each of {ranks} ranks {share}; raise it or lower global_batch_size"
    )


def test_half_of_the_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 64 << 20)
    size = ring_size(batch_bytes=1 << 20, prefetch_bytes=256 << 20, in_flight=2)
    assert size.num_slots * size.slot_bytes == 32 << 20


@pytest.mark.parametrize(
    ("group", "limits"),
    [
        ("/pods/one", [1234, 9999]),
        ("/pods", [1234, 9999]),
        ("/pods/gone/too", [1234, 9999]),
        ("/other", [9999]),
        ("/", [9999]),
    ],
)
def test_limits_of_a_cgroup_and_of_all_above_it_count(tmp_path: Path, group: str, limits: list[int]) -> None:
    """Those above the root are no cgroups."""
    root = tmp_path / "cgroup"
    (root / "pods" / "one").mkdir(parents=True)
    (root / "pods" / "one" / "memory.max").write_text("max\n")
    (root / "pods" / "memory.max").write_text("1234\n")
    (root / "memory.max").write_text("9999\n")
    (tmp_path / "memory.max").write_text("7\n")
    assert list(_limits(str(root), group, "memory.max")) == limits


@pytest.mark.parametrize(
    ("cgroup", "limited"),
    [
        pytest.param("0::/user/a", ["/sys/fs/cgroup /user/a memory.max"], id="version 2"),
        pytest.param("0::/a:b:c", ["/sys/fs/cgroup /a:b:c memory.max"], id="colons in the name"),
        pytest.param(
            "9:cpu,memory:/a:b\n8:cpuset:/c\n7:memory:/d\n1:name=memory:/e",
            [
                "/sys/fs/cgroup/memory /a:b memory.limit_in_bytes",
                "/sys/fs/cgroup/memory /d memory.limit_in_bytes",
            ],
            id="version 1",
        ),
        pytest.param("", [], id="none"),
        pytest.param(None, [], id="another system"),
    ],
)
def test_the_memory_is_the_machines_or_the_least_of_the_cgroups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroup: str | None, limited: list[str]
) -> None:
    asked: list[str] = []

    def limits(root: str, group: str, name: str) -> list[int]:
        asked.append(f"{root} {group} {name}")
        return [5000 - len(asked), 1 << 60]

    def self_cgroup(path: str) -> Path:
        assert path == "/proc/self/cgroup"
        return tmp_path / "cgroup"

    if cgroup is not None:
        (tmp_path / "cgroup").write_text(cgroup)
    monkeypatch.setattr("corpus_client.staging.slots._limits", limits)
    monkeypatch.setattr("corpus_client.staging.slots.Path", self_cgroup)
    machine = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert host_memory_bytes() == (5000 - len(limited) if limited else machine)
    assert asked == limited


def test_slots_are_page_aligned_and_apart() -> None:
    size = RingSize(num_slots=3, steps_per_slot=2, batch_bytes=2 * 3 * 2)
    slots = allocate_ring(size).slots
    for number, slot in enumerate(slots):
        assert slot.storage.data_ptr() % mmap.PAGESIZE == 0
        slot.view[:] = bytes([number]) * len(slot.view)
    assert [set(slot.storage.tolist()) for slot in slots] == [{0}, {1}, {2}]


def test_slots_lie_in_no_file(tmp_path: Path) -> None:
    """Whatever standard input is: here a file that is shorter than they are."""
    before = os.dup(0)
    try:
        with (tmp_path / "input").open("wb+") as file:
            os.dup2(file.fileno(), 0)
        allocate_ring(SIZE).slots[2].view[:] = bytes(mmap.PAGESIZE)
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert (tmp_path / "input").stat().st_size == 0


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
    size = ring_size(batch_bytes=1 << 20, prefetch_bytes=256 << 20, in_flight=2, ranks_on_host=16)
    assert size.num_slots * size.slot_bytes == 2 << 20
