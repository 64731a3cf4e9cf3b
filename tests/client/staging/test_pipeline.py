"""Slots go round exactly, whenever copies finish."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import tracemalloc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_client.observe.attribution import Meter
from corpus_client.observe.trace import Tracer
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.ring import NUM_BUFFERS, DeviceRing, _Copy
from corpus_client.staging.slots import SlotSizes
from corpus_client.staging.stager import Views
from tests.client import fake_gpu
from tests.client.fake_gpu import FakeGpu
from tests.client.staging.counting import (
    BATCH_BYTES,
    CPU,
    STEPS,
    CountingSource,
    MakePipeline,
    batches_of,
    new_slots,
    take,
)


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_steps_come_in_order_with_their_own_tokens(
    make_pipeline: MakePipeline, dtype: torch.dtype | None, num_slots: int
) -> None:
    pipeline = make_pipeline(num_slots=num_slots)
    for expected, batch in zip(range(5, 205), batches_of(pipeline, dtype), strict=False):
        assert batch.step == expected
        assert batch.tokens.tolist() == [[expected] * 3] * 2


def wrong_steps(
    gpu: FakeGpu,
    *,
    num_slots: int = 2,
    group_bytes: int = 0,
    dtype: torch.dtype | None = torch.int64,
    num_steps: int = 60,
    num_streams: int = 1,
) -> list[int]:
    """Steps of which the training step, run when the device comes to it, reads other tokens."""
    size = SlotSizes(num_slots=num_slots, steps_per_slot=4, batch_bytes=BATCH_BYTES)
    streams = [gpu.consumer, *(fake_gpu.Stream(gpu, f"consumer {n}") for n in range(1, num_streams))]
    seen: list[tuple[int, set[int]]] = []
    with gpu:
        device = DeviceRing(CPU, gpu, group_bytes=group_bytes)
        make = partial(device.make, dtype)
        pipeline = Pipeline(CountingSource(), new_slots(size), device, STEPS)
        try:
            for expected in range(5, 5 + num_steps):
                with gpu.stream(streams[expected % num_streams]):
                    step, views = pipeline.take(make)
                    assert step == expected

                    def train(step: int = step, views: Views = views) -> None:
                        inputs, targets = (view.numpy() for view in views)
                        seen.append((step, {*inputs.ravel().tolist(), *targets.ravel().tolist()}))

                    gpu.launch(train)
        finally:
            gpu.held.clear()
            assert pipeline.close()
        gpu.finish()
    assert len(seen) == num_steps
    return [step for step, found in seen if found != {step}]


@given(
    seed=st.integers(0, 1 << 32),
    pace=st.lists(st.sampled_from([0, 0, 0, 1, 5]), min_size=1, max_size=12).filter(any),
    group_bytes=st.sampled_from([0, 2 * BATCH_BYTES, 3 * BATCH_BYTES, 1 << 20]),
    num_slots=st.integers(2, 6),
    dtype=st.sampled_from([torch.int64, None]),
    connections=st.sampled_from([1, 8]),
    num_streams=st.integers(1, 2),
)
@settings(max_examples=100, deadline=None)
def test_late_and_reordered_work_never_sees_a_reused_slot_or_buffer(
    seed: int,
    pace: list[int],
    group_bytes: int,
    num_slots: int,
    dtype: torch.dtype | None,
    connections: int,
    num_streams: int,
) -> None:
    gpu = FakeGpu(seed, tuple(pace), connections=connections)
    options = {"num_slots": num_slots, "group_bytes": group_bytes, "num_streams": num_streams}
    assert wrong_steps(gpu, dtype=dtype, **options) == []
    # Not the fetcher: an event query of another thread breaks the capture of a CUDA graph.
    assert gpu.threads == {threading.get_ident()}
    assert {kind for stream, kind in gpu.kinds if stream == "transfer"} == {"copy", "mark"}


@pytest.mark.parametrize(
    ("where", "name"), [(_Copy, "done"), (fake_gpu.Event, "query")], ids=["pipeline", "device"]
)
def test_slots_that_are_freed_before_their_copy_are_noticed(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str
) -> None:
    monkeypatch.setattr(where, name, lambda _: True)
    gpu = FakeGpu()
    gpu.held.add("copy")
    assert wrong_steps(gpu) != []


@pytest.mark.parametrize(("forgetful", "late"), [("transfer", "kernel"), ("consumer", "copy")])
def test_a_stream_that_does_not_wait_is_noticed(
    monkeypatch: pytest.MonkeyPatch, forgetful: str, late: str
) -> None:
    """The transfer stream must wait for a buffer's last reader, the consumer's for the copy."""
    wait = fake_gpu.Stream.wait_event

    def sometimes_wait(stream: fake_gpu.Stream, event: fake_gpu.Event) -> None:
        if stream.name != forgetful:
            wait(stream, event)

    monkeypatch.setattr(fake_gpu.Stream, "wait_event", sometimes_wait)
    gpu = FakeGpu(0, (9,))
    gpu.held.add(late)
    assert wrong_steps(gpu, num_slots=8, num_steps=15) != []


def test_readers_on_other_streams_that_are_not_waited_for_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer is consumed when the batch read last is: that one must wait for the others."""
    wait = fake_gpu.Stream.wait_event

    def wait_for_copies(stream: fake_gpu.Stream, event: fake_gpu.Event) -> None:
        if stream.name == "transfer" or event.mark is None or event.mark.stream == "transfer":
            wait(stream, event)

    monkeypatch.setattr(fake_gpu.Stream, "wait_event", wait_for_copies)
    options = {"num_slots": 8, "group_bytes": 1 << 20, "num_streams": 2, "num_steps": 100}
    assert any(wrong_steps(FakeGpu(seed, (0, 0, 0, 1)), **options) for seed in range(20))


def test_small_batches_of_a_slot_travel_together(make_pipeline: MakePipeline) -> None:
    """The first batch comes alone, as its request did; then slots of 2 and 4 batches, in groups of 3."""
    with FakeGpu() as gpu:
        device = DeviceRing(CPU, gpu, group_bytes=3 * BATCH_BYTES)
        pipeline = make_pipeline(stager=device, num_slots=2)
        uploads = []
        for _ in range(11):
            take(pipeline)
            uploads.append(device._num_uploads)
    assert uploads == [1, 2, 2, 3, 3, 3, 4, 5, 5, 5, 6]


@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_nothing_grows_over_thousands_of_steps(make_pipeline: MakePipeline, group_bytes: int) -> None:
    """Not the host's memory, and not the device's: staging buffers are made once, batches go at once."""
    live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    with FakeGpu(0, (1, 3, 2)) as gpu:
        device = DeviceRing(CPU, gpu, group_bytes=group_bytes)
        pipeline = make_pipeline(stager=device, meter=Meter(Tracer(20)))
        gc.collect()
        tracemalloc.start()
        try:
            most_live = traced = 0
            for number in range(6000):
                _, (inputs, _) = pipeline.take(partial(device.make, torch.int64))
                live.add(inputs)
                most_live = max(most_live, len(live))
                if number == 1000:
                    gc.collect()
                    traced, _ = tracemalloc.get_traced_memory()
                    device_bytes = device.num_bytes
            assert most_live <= 2
            assert device.num_bytes == device_bytes == NUM_BUFFERS * max(group_bytes, 512)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - traced < 100_000
        finally:
            tracemalloc.stop()


def test_two_slots_keep_the_fetcher_busy(make_pipeline: MakePipeline) -> None:
    """Both slots put on their way ahead would leave nothing to fill during a step."""
    with FakeGpu() as gpu:
        device = DeviceRing(CPU, gpu)
        gpu.held.add("copy")
        pipeline = make_pipeline(stager=device, steps=replace(STEPS, slot_bytes=BATCH_BYTES), num_slots=2)
        take(pipeline)
        assert device._num_uploads == 1
        gpu.held.clear()
        pipeline.close()


@pytest.mark.parametrize(("num_slots", "num_uploads"), [(2, 1), (3, 2), (4, 3), (5, 3)])
def test_a_slot_for_each_buffer_is_put_on_its_way_and_one_is_left(
    make_pipeline: MakePipeline, num_slots: int, num_uploads: int
) -> None:
    with FakeGpu() as gpu:
        device = DeviceRing(CPU, gpu)
        gpu.held.add("copy")
        steps = replace(STEPS, slot_bytes=BATCH_BYTES)
        pipeline = make_pipeline(stager=device, steps=steps, num_slots=num_slots)
        deadline = time.monotonic() + 20
        while pipeline.queues.num_ready < num_slots:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        take(pipeline)
        assert device._num_uploads == num_uploads
        gpu.held.clear()
        pipeline.close()


def test_batch_as_stored_lives_until_the_next_one(make_pipeline: MakePipeline) -> None:
    """Two slots, a filler much faster than the loop: the held view must not change under it."""
    pipeline = make_pipeline(num_slots=2)
    for batch in itertools.islice(batches_of(pipeline, None), 30):
        time.sleep(0.002)
        assert set(batch.tokens.flatten().tolist()) == {batch.step}
