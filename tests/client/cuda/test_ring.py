"""Pinned slots and device memory on a real device: nothing is reused too early, nothing grows."""

from __future__ import annotations

import gc
import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader, buffers, errors, streams
from corpus_client.pipeline import Pipeline, _Emptying
from corpus_client.schedule import Stretch
from corpus_client.streams import StreamDevice
from scripts.gpu_lib.soak import mismatches
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer
from tests.client.test_pipeline import SPAN, CountingFiller

pytestmark = pytest.mark.needs_cuda
MakeLoader = Callable[..., CorpusLoader]
MOST_CYCLES = 200_000  # about a tenth of a millisecond


class SlowDevice(StreamDevice):
    """Each copy begins late: the transfer stream is kept busy for a random time before it."""

    def __init__(self, seed: int, most_cycles: int, dtype: torch.dtype | None = torch.int64) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()), dtype, torch.cuda)
        self._draw = random.Random(seed)
        self._most_cycles = most_cycles

    def upload(self, stored: torch.Tensor) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self._draw.randrange(self._most_cycles))
        return super().upload(stored)


def pipeline_on(device: StreamDevice, *, rows: int = 2, num_slots: int = 3, steps: int = 4) -> Pipeline:
    batch_bytes = rows * 3 * 4
    size = buffers.RingSize(num_slots=num_slots, steps_per_slot=steps, batch_bytes=batch_bytes)
    span = replace(
        SPAN,
        start_step=0,
        stretches=(Stretch(start_step=0, stop_step=None, num_rows=rows),),
        slot_bytes=steps * batch_bytes,
    )
    ring = buffers.allocate_ring(size, device.pin)
    assert all(slot.storage.is_pinned() for slot in ring.slots)
    return Pipeline(WideFiller(), ring.slots, device, span)


class WideFiller(CountingFiller):
    """Step n is full of n, whatever its rows."""

    def finish(self, ticket: range, view: memoryview) -> None:
        size = self.rows.pop(ticket.start) * 3
        tokens = torch.frombuffer(view, dtype=torch.int32)[: size * len(ticket)].view(len(ticket), size)
        for row, step in zip(tokens.numpy(), ticket, strict=True):
            row[:] = step


@contextmanager
def closed(pipeline: Pipeline) -> Iterator[Pipeline]:
    try:
        yield pipeline
    finally:
        assert pipeline.close()


def batches_of(pipeline: Pipeline, device: StreamDevice | None = None) -> Iterator[torch.Tensor]:
    """Steps in order, each full of its number; with `device`, as a loader takes them."""
    for expected in count():
        if device is not None:
            device.pace()
        step, tokens = next(pipeline)
        assert step == expected
        yield tokens


@pytest.mark.parametrize("dtype", [torch.int64, None])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
@pytest.mark.parametrize("num_slots", [2, 3, 8])
def test_ten_thousand_steps_with_random_delays_are_exact(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, group_bytes: int, dtype: torch.dtype | None
) -> None:
    """Delays before copies and before reads; every batch is compared on the device, none waited for."""
    monkeypatch.setattr(StreamDevice, "group_bytes", group_bytes)
    device = SlowDevice(num_slots, MOST_CYCLES, dtype)
    draw = random.Random(0)

    def late() -> None:
        if draw.random() < 0.2:
            torch.cuda._sleep(draw.randrange(MOST_CYCLES))

    with closed(pipeline_on(device, num_slots=num_slots)) as pipeline:
        wrong = mismatches(batches_of(pipeline, device), range(10_000), late, torch.device("cuda"))
    assert wrong.item() == 0


def test_the_same_check_notices_slots_that_are_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Emptying, "is_free", lambda _: True)
    device = SlowDevice(0, 20_000_000)
    with closed(pipeline_on(device, num_slots=2)) as pipeline:
        wrong = mismatches(batches_of(pipeline), range(200), lambda: None, torch.device("cuda"))
    assert wrong.item() > 0


def test_a_dropped_batch_is_not_reused_before_its_last_reader() -> None:
    """The reader is queued behind a long kernel, and the batch is dropped at once."""
    device = SlowDevice(1, 1000)
    sums = []
    with closed(pipeline_on(device, rows=4096)) as pipeline:
        for _ in range(300):
            device.pace()
            step, tokens = next(pipeline)
            torch.cuda._sleep(1_000_000)
            sums.append((step, tokens.sum()))
            del tokens
    assert [int(total.item()) for _, total in sums] == [step * 4096 * 3 for step, _ in sums]


@pytest.mark.parametrize("keep", [0, 3])
def test_device_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """The loop may get further ahead of the device in the course of time, by 4 MiB at most."""
    monkeypatch.setattr(streams, "AHEAD_BYTES", 4 << 20)
    device = SlowDevice(2, 10_000)
    kept: list[torch.Tensor] = []
    reserved: dict[int, int] = {}
    with closed(pipeline_on(device, rows=4096)) as pipeline:
        for number in range(5001):
            device.pace()
            _, tokens = next(pipeline)
            kept = [*kept, tokens][-keep:] if keep else []
            if number in (500, 5000):
                reserved[number] = torch.cuda.memory_stats()["reserved_bytes.all.current"]
    assert reserved[5000] - reserved[500] <= 4 << 20


def test_training_loop_far_ahead_of_the_device_does_not_fill_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of one long kernel, as a replayed graph is; batches of 1 MiB, 8 MiB of them ahead."""
    monkeypatch.setattr(streams, "AHEAD_BYTES", 8 << 20)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    rows = (1 << 20) // (3 * 8)
    device = SlowDevice(3, 1000)
    with closed(pipeline_on(device, rows=rows, num_slots=4, steps=1)) as pipeline:
        for _ in range(400):
            device.pace()
            next(pipeline)
            torch.cuda._sleep(5_000_000)
    # Active counts what was dropped but may not be reused yet: batches ahead, looked ahead, as stored.
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before < (8 + 8) << 20


def test_slots_are_page_locked_to_the_byte(make_loader: MakeLoader) -> None:
    loader = make_loader(device="cuda", prefetch_bytes=300_000)
    next(loader)
    stats = loader.stats()
    assert 0 < stats.pinned_bytes == stats.ring_bytes <= 300_000
    assert loader._ring is not None
    for slot in loader._ring.slots:
        assert slot.storage.is_pinned()
        assert slot.storage.data_ptr() % mmap.PAGESIZE == 0


def test_memory_can_be_locked_again_after_it_was_unlocked() -> None:
    device = StreamDevice(torch.device("cuda", 0), None, torch.cuda)
    assert device.pin is not None
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    storage = torch.frombuffer(memory, dtype=torch.uint8)
    for _ in range(3):
        assert not storage.is_pinned()
        unpin = device.pin(memory.ctypes.data, memory.nbytes)
        assert storage.is_pinned()
        unpin()
    assert not storage.is_pinned()


def test_ring_is_unlocked_when_its_last_slot_is_dropped(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked = []
    register = StreamDevice._register

    def noted(self: StreamDevice, address: int, num_bytes: int) -> Callable[[], None]:
        unpin = register(self, address, num_bytes)
        return lambda: (unpin(), unlocked.append(address))[1]

    monkeypatch.setattr(StreamDevice, "_register", noted)
    loader = make_loader(device="cuda")
    next(loader)
    assert loader._ring is not None
    slot = loader._ring.slots[0]
    address = slot.storage.data_ptr()
    loader.close()
    gc.collect()
    assert unlocked == []
    del slot
    gc.collect()
    assert unlocked == [address]


def test_too_much_to_lock_is_a_clear_error() -> None:
    device = StreamDevice(torch.device("cuda", 0), None, torch.cuda)
    assert device.pin is not None
    with pytest.raises(errors.PinningFailed, match="could not be page-locked"):
        device.pin(mmap.PAGESIZE, 1 << 40)  # an address that nothing is mapped at
    assert torch.ones(3, device="cuda").sum().item() == 3  # the failure does not show up again


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_loaders_dropped_with_copies_under_way_leave_nothing(server: ReferenceServer, num_steps: int) -> None:
    reserved = 0
    for number in range(30):
        loader = CorpusLoader(
            server.url, corpus="web", seq_len=16, global_batch_size=12, device="cuda", prefetch_bytes=1 << 16
        )
        for _ in range(num_steps):
            next(loader)
        del loader
        gc.collect()
        if number == 5:
            reserved = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= reserved


def test_several_loaders_in_a_process_do_not_disturb_each_other(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    train = make_loader(device="cuda", order="shuffle", prefetch_bytes=1 << 14)
    evaluation = make_loader(device="cuda", seed=1, order="shuffle", prefetch_bytes=1 << 14)
    taken = []
    for number in range(200):
        loader = evaluation if number % 3 == 0 else train
        batch = next(loader)
        torch.cuda._sleep(20_000)
        taken.append((loader.plan, batch.step, batch.tokens))
    for plan, step, tokens in taken:
        assert tokens.cpu().numpy().tolist() == tokens_of_step(corpus, plan, step).tolist()


def test_batches_go_to_the_device_that_is_meant(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = torch.cuda.device_count() - 1
    assert next(make_loader(device=f"cuda:{last}")).tokens.device == torch.device("cuda", last)
    monkeypatch.setenv("LOCAL_RANK", str(last))
    assert next(make_loader(device="cuda")).tokens.device == torch.device("cuda", last)
    monkeypatch.delenv("LOCAL_RANK")
    with torch.cuda.device(last):
        assert next(make_loader(device="cuda")).tokens.device == torch.device("cuda", last)
    with pytest.raises(errors.InvalidArgument, match="device must be cuda:0 to"):
        make_loader(device=f"cuda:{last + 1}")
