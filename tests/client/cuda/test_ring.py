"""Pinned slots and staging buffers on a real device: nothing is reused too early, nothing grows."""

from __future__ import annotations

import gc
import math
import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch

from corpus_client import CorpusLoader, Staging, errors
from corpus_client.plan.schedule import StepRange
from corpus_client.staging import pinning, ring
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.ring import GROUP_BYTES, NUM_BUFFERS, DeviceRing
from corpus_client.staging.slots import SlotSizes, cut_slots
from scripts.gpu_lib.soak import mismatches
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer
from tests.client.staging.counting import STEPS, CountingSource

pytestmark = pytest.mark.needs_cuda
MakeLoader = Callable[..., CorpusLoader]
MOST_CYCLES = 200_000  # about a tenth of a millisecond


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class SlowRing(DeviceRing):
    """Each copy begins late: the transfer stream is kept busy for a random time before it."""

    def __init__(self, seed: int, most_cycles: int, group_bytes: int = GROUP_BYTES) -> None:
        super().__init__(cuda(), torch.cuda, group_bytes=group_bytes)
        self._draw = random.Random(seed)
        self._most_cycles = most_cycles

    def upload(self, stored: torch.Tensor) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self._draw.randrange(self._most_cycles))
        return super().upload(stored)


def pipeline_on(device: DeviceRing, *, rows: int = 2, num_slots: int = 3, steps: int = 4) -> Pipeline:
    batch_bytes = rows * 3 * 4
    size = SlotSizes(num_slots=num_slots, steps_per_slot=steps, batch_bytes=batch_bytes)
    fetched = replace(
        STEPS,
        start_step=0,
        step_ranges=(StepRange(start_step=0, stop_step=None, shape=(rows, 3)),),
        slot_bytes=steps * batch_bytes,
    )
    memory = device.host_memory(size.num_bytes)
    assert memory.is_pinned()
    return Pipeline(WideSource(), cut_slots(memory, size), device, fetched)


class WideSource(CountingSource):
    """Step n is full of n, whatever its rows."""

    def finish(self, ticket: range, view: memoryview) -> None:
        size = math.prod(self.shapes.pop(ticket.start))
        tokens = torch.frombuffer(view, dtype=torch.int32)[: size * len(ticket)].view(len(ticket), size)
        for row, step in zip(tokens.numpy(), ticket, strict=True):
            row[:] = step


@contextmanager
def closed(pipeline: Pipeline) -> Iterator[Pipeline]:
    try:
        yield pipeline
    finally:
        assert pipeline.close()


def batches_of(pipeline: Pipeline, dtype: torch.dtype | None = torch.int64) -> Iterator[torch.Tensor]:
    """Inputs of the steps in order, each full of its number."""
    for expected in count():
        step, (inputs, _) = pipeline.take(partial(pipeline._stager.make, dtype))
        assert step == expected
        yield inputs


@pytest.mark.parametrize("dtype", [torch.int64, None])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
@pytest.mark.parametrize("num_slots", [2, 3, 8])
def test_ten_thousand_steps_with_random_delays_are_exact(
    num_slots: int, group_bytes: int, dtype: torch.dtype | None
) -> None:
    """Delays before copies and before reads; every batch is compared on the device, none waited for."""
    device = SlowRing(num_slots, MOST_CYCLES, group_bytes)
    draw = random.Random(0)

    def late() -> None:
        if draw.random() < 0.2:
            torch.cuda._sleep(draw.randrange(MOST_CYCLES))

    with closed(pipeline_on(device, num_slots=num_slots)) as pipeline:
        # As stored is int32 here, which can be compared on the device.
        wrong = mismatches(batches_of(pipeline, dtype), range(10_000), late, cuda())
    assert wrong.item() == 0


def test_the_same_check_notices_slots_that_are_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring._Copy, "done", lambda _: True)
    device = SlowRing(0, 20_000_000)
    with closed(pipeline_on(device, num_slots=2)) as pipeline:
        wrong = mismatches(batches_of(pipeline), range(200), lambda: None, cuda())
    assert wrong.item() > 0


def test_the_same_check_notices_buffers_that_are_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer stream does not wait for the consumer, who is slow."""
    device = SlowRing(0, 1000)
    pipeline = pipeline_on(device, num_slots=8)
    for buffer in device._buffers:
        monkeypatch.setattr(buffer, "consumed", _Unrecorded())
    with closed(pipeline):
        sleep = lambda: torch.cuda._sleep(2_000_000)  # noqa: E731
        wrong = mismatches(_late(batches_of(pipeline), sleep), range(200), lambda: None, cuda())
    assert wrong.item() > 0


class _Unrecorded(torch.cuda.Event):
    def record(self, stream: Any = None) -> None:
        """Forget it."""


def _late(batches: Iterator[torch.Tensor], sleep: Callable[[], None]) -> Iterator[torch.Tensor]:
    """The widening of each batch is queued behind a long kernel."""
    while True:
        sleep()
        yield next(batches)


def test_a_dropped_batch_is_not_reused_before_its_last_reader() -> None:
    """The reader is queued behind a long kernel, and the batch is dropped at once."""
    device = SlowRing(1, 1000)
    sums = []
    with closed(pipeline_on(device, rows=4096)) as pipeline:
        for step, inputs in zip(range(300), batches_of(pipeline), strict=False):
            torch.cuda._sleep(1_000_000)
            sums.append((step, inputs.sum()))
            del inputs
    assert [int(total.item()) for _, total in sums] == [step * 4096 * 2 for step, _ in sums]


def test_batches_read_on_two_streams_are_exact() -> None:
    device = SlowRing(4, MOST_CYCLES)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    sums = []
    with closed(pipeline_on(device, rows=64, num_slots=8)) as pipeline:
        for number in range(1000):
            with torch.cuda.stream(streams[number % 2]):
                torch.cuda._sleep(100_000 * (number % 2))
                step, (inputs, _) = pipeline.take(partial(device.make, torch.int64))
                sums.append((step, inputs.sum()))
    torch.cuda.synchronize()
    assert [int(total.item()) for _, total in sums] == [step * 64 * 2 for step, _ in sums]


@pytest.mark.parametrize("keep", [0, 3])
def test_device_memory_does_not_grow(keep: int) -> None:
    """Also where the loop is far ahead of the device, as with replayed graphs: nothing waits for a stream."""
    device = SlowRing(2, 10_000)
    kept: list[torch.Tensor] = []
    reserved: dict[int, int] = {}
    with closed(pipeline_on(device, rows=4096)) as pipeline:
        for number, inputs in zip(range(5001), batches_of(pipeline), strict=False):
            torch.cuda._sleep(100_000)
            kept = [*kept, inputs][-keep:] if keep else []
            if number in (100, 5000):
                reserved[number] = torch.cuda.memory_stats()["reserved_bytes.all.current"]
    assert reserved[5000] == reserved[100]


def test_staging_buffers_are_all_that_the_loader_keeps_on_the_device(make_loader: MakeLoader) -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loader = make_loader(device="cuda")
    for _ in range(100):
        next(loader)
    assert loader.stats().device_bytes == NUM_BUFFERS * GROUP_BYTES
    assert torch.cuda.memory_allocated() - before == loader.stats().device_bytes
    loader.close()
    assert torch.cuda.memory_allocated() == before


def test_loaders_share_one_transfer_stream(make_loader: MakeLoader) -> None:
    streams = {make_loader(device="cuda")._stager.stream.cuda_stream for _ in range(40)}
    assert len(streams) == 1


def test_slots_are_page_locked_to_the_byte(make_loader: MakeLoader) -> None:
    loader = make_loader(device="cuda", prefetch_bytes=300_000)
    next(loader)
    stats = loader.stats()
    assert 0 < stats.pinned_bytes == stats.slot_bytes <= 300_000
    assert loader._slot_memory is not None
    assert loader._slot_memory.is_pinned()
    assert loader._slot_memory.data_ptr() % mmap.PAGESIZE == 0


def test_memory_is_locked_until_its_last_view_goes() -> None:
    device = DeviceRing(torch.device("cuda", 0), torch.cuda)
    for _ in range(3):
        memory = device.host_memory(1 << 20)
        assert memory.is_pinned()
        part = memory[:10]
        del memory
        assert part.is_pinned()


def test_too_much_to_lock_falls_back_and_the_failure_does_not_show_up_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_new_map", lambda num_bytes: mmap.mmap(-1, num_bytes, prot=mmap.PROT_READ))
    memory = DeviceRing(torch.device("cuda", 0), torch.cuda).host_memory(1 << 20)
    assert memory.is_pinned()  # by torch's allocator
    assert "cudaHostRegister of 1,048,576 bytes failed" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_loaders_dropped_with_copies_under_way_leave_nothing(server: ReferenceServer, num_steps: int) -> None:
    reserved = 0
    for number in range(30):
        loader = CorpusLoader(
            server.url,
            corpus="web",
            seq_len=16,
            global_batch_size=12,
            device="cuda",
            staging=Staging(prefetch_bytes=1 << 16),
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
