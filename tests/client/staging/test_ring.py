"""What the ring asks of a GPU's runtime; the GPU is the fake one. The same on a real device is in `cuda/`."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from corpus_client import Batch, errors
from corpus_client.staging.ring import NUM_BUFFERS, DeviceRing, transfer_stream
from corpus_client.staging.stager import Group, shifted
from tests.client.fake_gpu import FakeGpu, Stream

CPU = torch.device("cpu")
STORED = torch.arange(12).to(torch.uint16).view(3, 2, 2)


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu(0, (0,)) as gpu:  # nothing runs until it is waited for
        yield gpu


def open_ring(gpu: FakeGpu, *, timed: bool = False) -> DeviceRing:
    ring = DeviceRing(CPU, gpu, timed=timed)
    ring.prepare(STORED[0].nbytes)
    return ring


def read(ring: DeviceRing, group: Group) -> Batch:
    return Batch(group.read_next(partial(ring.make, torch.int64)))


def test_batches_are_widened_by_the_consumer_behind_the_copy(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    group = ring.upload(STORED)
    batches = [read(ring, group) for _ in range(3)]
    assert gpu.kinds == {
        ("transfer", "copy"),
        ("transfer", "mark"),
        ("consumer", "kernel"),
        ("consumer", "mark"),
    }
    gpu.finish()
    assert [batch.inputs.tolist() for batch in batches] == STORED[:, :, :-1].tolist()
    assert [batch.targets.tolist() for batch in batches] == STORED[:, :, 1:].tolist()
    for batch in batches:
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.is_contiguous()
        assert batch.targets.is_contiguous()
    with pytest.raises(IndexError):
        read(ring, group)


def test_a_slot_is_free_when_its_copy_has_run(gpu: FakeGpu) -> None:
    group = open_ring(gpu).upload(STORED)
    assert not group.done()
    gpu.finish()
    assert group.done()


def test_tensors_of_the_caller_are_filled(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    group = ring.upload(STORED)
    inputs, targets = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)[:, :1]
    group.read_next(partial(ring.fill, inputs, targets))
    gpu.finish()
    assert (inputs.tolist(), targets.tolist()) == ([[0], [2]], [[1], [3]])


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 1), torch.zeros(2, 1, device="meta")]
)
def test_tensors_that_do_not_fit_are_refused_and_the_batch_is_still_the_next(
    gpu: FakeGpu, wrong: torch.Tensor
) -> None:
    ring = open_ring(gpu)
    group = ring.upload(STORED)
    with pytest.raises(errors.InvalidArgument, match=r"targets must be an integer tensor of shape \(2, 1\)"):
        group.read_next(partial(ring.fill, torch.zeros(2, 1, dtype=torch.int64), wrong))
    batch = read(ring, group)
    gpu.finish()
    assert batch.tokens.tolist() == STORED[0].tolist()


def steps_beside_a_slow_copy(*, widen_on_transfer_stream: bool) -> list[int]:
    """Which of two training steps, whose batches are copied, run while the third batch is on the bus."""
    ran: list[int] = []
    with FakeGpu(connections=1) as gpu:
        ring = open_ring(gpu)
        groups = [ring.upload(stored[None]) for stored in STORED[:2]]
        gpu.finish()
        gpu.held.add("copy")
        ring.upload(STORED[2:])
        if widen_on_transfer_stream:
            gpu.launch(lambda: None, ring.stream)
        for number, group in enumerate(groups):
            read(ring, group)
            gpu.launch(lambda number=number: ran.append(number))
            ring.upload(STORED[:1])
        gpu.finish()
    return ran


def test_compute_does_not_queue_behind_a_copy_with_one_hardware_queue() -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1: a kernel on the transfer stream would hold up what comes after it."""
    assert steps_beside_a_slow_copy(widen_on_transfer_stream=False) == [0, 1]
    assert steps_beside_a_slow_copy(widen_on_transfer_stream=True) == []


def test_only_one_transfer_stream_of_high_priority_for_all_loaders(gpu: FakeGpu) -> None:
    rings = [open_ring(gpu) for _ in range(40)]
    assert len({id(ring.stream) for ring in rings}) == 1
    assert gpu.calls == ["stream of priority -1 ['cpu']"]
    assert transfer_stream(gpu, CPU) is rings[0].stream


def test_buffers_are_allocated_once_and_given_back(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    num_bytes = ring.num_bytes
    assert num_bytes == NUM_BUFFERS * ring.group_bytes
    memory = ring._buffers[0].memory.data_ptr()
    ring.prepare(STORED[0].nbytes)
    ring.prepare(ring.group_bytes)
    for _ in range(10):
        read(ring, ring.upload(STORED))
    assert (ring.num_bytes, ring._buffers[0].memory.data_ptr()) == (num_bytes, memory)
    ring.prepare(ring.group_bytes + 1)
    assert ring.num_bytes == num_bytes + NUM_BUFFERS * 512
    ring.prepare(2 * ring.group_bytes)
    assert ring.num_bytes == 2 * num_bytes
    ring.close()
    ring.close()
    assert ring.num_bytes == 0


@pytest.mark.parametrize(
    ("group_bytes", "batch_bytes", "buffer_bytes"),
    [
        (1, 1, 512),
        (1, 512, 512),
        (1, 513, 1024),
        (513, 512, 1024),
        (512, 512, 512),
        (1000, 1025, 1536),
        (4 << 20, 1, 4 << 20),
    ],
)
def test_a_buffer_holds_a_batch_or_a_group_and_ends_where_a_copy_likes_to_begin(
    gpu: FakeGpu, group_bytes: int, batch_bytes: int, buffer_bytes: int
) -> None:
    ring = DeviceRing(CPU, gpu, group_bytes=group_bytes)
    ring.prepare(batch_bytes)
    assert ring.num_bytes == 3 * buffer_bytes
    assert [len(buffer.memory) for buffer in ring._buffers] == [buffer_bytes] * 3


def test_uploads_take_the_buffers_in_turn(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    groups = [ring.upload(STORED[number % 3 :]) for number in range(5)]
    gpu.finish()
    assert [group.unread[0][0].tolist() for group in groups[2:]] == [[[8], [10]], [[0], [2]], [[4], [6]]]
    places = [group.unread[0][0].data_ptr() for group in groups]
    assert len(set(places)) == 3
    assert places[3:] == places[:2]


def test_four_mebibytes_travel_together_unless_told_otherwise(gpu: FakeGpu) -> None:
    """Where copies are timed, too: events measure each one, whatever its size."""
    assert [DeviceRing(CPU, gpu, timed=timed).group_bytes for timed in (False, True)] == [4 << 20] * 2
    ring = DeviceRing(CPU, gpu)
    found = (ring.num_buffers, ring.num_bytes, ring.copies_on_host, ring.timed, ring.context)
    assert found == (3, 0, False, False, (0, 1))


def test_a_ring_made_for_an_evaluation_works_outside_of_inference_mode(gpu: FakeGpu) -> None:
    with torch.inference_mode():
        ring = open_ring(gpu)
    assert not ring._buffers[0].memory.is_inference()


def test_the_end_of_the_process_frees_the_memory_without_a_call_to_the_device(gpu: FakeGpu) -> None:
    assert open_ring(gpu)._release.atexit is False


@pytest.mark.parametrize("how", ["closed", "dropped", "outgrown"])
def test_memory_given_back_waits_for_its_last_reader(gpu: FakeGpu, how: str) -> None:
    """The memory belongs to the transfer stream: whoever gets it next writes behind this wait."""
    ring = open_ring(gpu)
    stream: Stream = ring.stream
    read(ring, ring.upload(STORED[:1]))
    if how == "closed":
        ring.close()
    elif how == "outgrown":
        ring.prepare(ring.group_bytes + 1)
    else:
        del ring
        gc.collect()
    assert {work.stream for work in stream.waits} == {"consumer"}


@pytest.mark.parametrize("held", ["copy", "kernel"])
def test_a_group_is_waited_for_on_every_stream_that_reads_of_it(gpu: FakeGpu, held: str) -> None:
    """The second one waits for the copy, and the next copy into the buffer for the readers on both."""
    ring = open_ring(gpu)
    group = ring.upload(STORED)
    gpu.held.add(held)
    read(ring, group)
    ran: list[str] = []
    with gpu.stream(other := Stream(gpu, "other")):
        group.read_next(len)
        gpu.queue("reader", other, lambda: ran.append("reader"))
    later = [ring.upload(STORED) for _ in range(NUM_BUFFERS)]
    gpu.finish()
    assert [each.done() for each in later] == ([False] * 3 if held == "copy" else [True, True, False])
    assert ran == []
    gpu.held.clear()
    gpu.finish()
    assert (ran, later[-1].done()) == (["reader"], True)


def test_no_batch_is_moved_while_a_graph_is_captured(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    ring.check_not_capturing()
    gpu.capturing = True
    with pytest.raises(errors.InvalidArgument) as caught:
        ring.check_not_capturing()
    assert str(caught.value) == (
        "a batch was asked for while a CUDA graph is being captured; capture the step on tensors of its own, "
        "and fill them before each replay: loader.next_into(inputs, targets)"
    )
    ring.runtime = SimpleNamespace()  # of a device without graphs
    ring.check_not_capturing()


def test_copies_and_stalls_are_measured_by_events(gpu: FakeGpu) -> None:
    """A millisecond for each piece of work: of a copy and its end, and between two marks of the consumer."""
    ring = open_ring(gpu, timed=True)
    for number in range(1, 3):
        group = ring.upload(STORED)
        assert group.interval() is None
        group.copied.synchronize()
        assert ring.seconds() == pytest.approx((0.002 * (number - 1), 0.001 * (number - 1)))
        for _ in range(3):
            read(ring, group)
        gpu.finish()
        assert ring.seconds() == pytest.approx((0.002 * number, 0.001 * number))
        assert ring.seconds() == pytest.approx((0.002 * number, 0.001 * number))


def test_a_copy_ended_before_now_by_what_ran_since(gpu: FakeGpu) -> None:
    group = open_ring(gpu, timed=True).upload(STORED)
    gpu.finish()
    for _ in range(50):
        gpu.launch(lambda: None)
    gpu.finish()
    before = time.perf_counter()
    interval = group.interval()
    after = time.perf_counter()
    assert interval is not None
    start, stop = interval
    assert stop - start == pytest.approx(0.002)
    assert before <= stop + 0.051 <= after


def test_seconds_may_be_asked_for_at_any_time(gpu: FakeGpu) -> None:
    """Events of which one is not over have no time between them."""
    ring = open_ring(gpu, timed=True)
    groups = [ring.upload(STORED) for _ in range(2)]
    groups[1].copied.synchronize()
    read(ring, groups[0])
    found = []
    while gpu.num_pending:
        gpu._run_one()
        found.append(ring.seconds())
    assert found == [(0.0, 0.0), *[pytest.approx((0.002, 0.001))] * (len(found) - 1)]
    assert len(found) > 2


def test_copies_that_are_over_are_not_kept(gpu: FakeGpu) -> None:
    """Though nobody asks how long they took."""
    ring = open_ring(gpu, timed=True)
    kept: weakref.WeakSet[Group] = weakref.WeakSet()
    for _ in range(20):
        group = ring.upload(STORED)
        kept.add(group)
        read(ring, group)
        gpu.finish()
    del group
    assert len(kept) == 1


@pytest.mark.parametrize(("timed", "num_works"), [(False, 4), (True, 7)])
def test_a_batch_is_a_copy_and_a_kernel_with_a_mark_behind_each(
    gpu: FakeGpu, timed: bool, num_works: int
) -> None:
    """Marks before them, and before and behind what the consumer waits for, only where they are timed."""
    ring = open_ring(gpu, timed=timed)
    read(ring, ring.upload(STORED))
    assert gpu.num_pending == num_works


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(("location", "blocking"), [("cuda:1", {"blocking": True}), ("cpu", {})])
def test_a_thread_that_waits_for_a_gpu_does_not_spin(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, timed: bool, location: str, blocking: dict[str, bool]
) -> None:
    made: list[dict[str, bool]] = []
    event = FakeGpu.Event
    monkeypatch.setattr(
        FakeGpu, "Event", lambda self, **options: made.append(options) or event(self, **options)
    )
    DeviceRing(torch.device(location), gpu, timed=timed).event(gpu.consumer)
    assert made == [{"enable_timing": timed, **blocking}]


def test_what_was_measured_is_kept_when_the_rest_is_forgotten(gpu: FakeGpu) -> None:
    ring = open_ring(gpu, timed=True)
    group = ring.upload(STORED)
    group.copied.synchronize()
    read(ring, group)
    gpu.finish()
    ring.drain()
    assert ring.seconds() == pytest.approx((0.002, 0.001))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, None])
def test_a_context_rank_gets_its_slice_and_the_whole_rows(gpu: FakeGpu, dtype: torch.dtype | None) -> None:
    ring = open_ring(gpu)
    stored = torch.arange(30).to(torch.uint16).view(3, 2, 5)
    views = shifted(stored, (1, 2))[0]
    made = ring.make(dtype, views)
    gpu.finish()
    assert len(made) == len(views) == 3
    for copy, view in zip(made, views, strict=True):
        assert copy.dtype == (dtype or torch.uint16)
        assert copy.is_contiguous()
        assert copy.tolist() == view.tolist()


def test_copies_that_nobody_reads_are_forgotten(gpu: FakeGpu) -> None:
    """A pipeline was dropped with batches on their way; the next one's are measured."""
    ring = open_ring(gpu, timed=True)
    ring.upload(STORED)
    ring.drain()
    with pytest.MonkeyPatch.context() as patched:  # there is nothing left to wait for
        patched.setattr("tests.client.fake_gpu.Event.synchronize", lambda _: pytest.fail("waited again"))
        ring.drain()
    read(ring, ring.upload(STORED))
    gpu.finish()
    assert ring.seconds()[0] > 0


def test_untimed_copies_have_no_interval(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    group = ring.upload(STORED)
    read(ring, group)
    gpu.finish()
    assert group.interval() is None
    assert ring.seconds() == (0.0, 0.0)


def test_draining_after_a_device_error_does_not_hide_it(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` runs while the error that the training step raised is on its way up."""
    ring = open_ring(gpu)
    ring.upload(STORED)

    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("tests.client.fake_gpu.Event.synchronize", fail)
    monkeypatch.setattr("tests.client.fake_gpu.Stream.wait_event", lambda *_: fail(None))
    ring.drain()
    ring.close()


def test_streams_are_entered_on_the_loaders_own_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving a stream makes the device current that was so before: it must not be the first of all."""
    entered: list[list[str]] = []
    enter = FakeGpu.stream

    def noted(self: FakeGpu, stream: Stream) -> object:
        entered.append(list(self.devices))
        return enter(self, stream)

    monkeypatch.setattr(FakeGpu, "stream", noted)
    open_ring(gpu).upload(STORED)
    assert entered == [["cpu"], ["cpu"]]
