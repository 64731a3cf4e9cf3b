"""What the ring asks of a GPU's runtime; the GPU is the fake one. The same on a real device is in `cuda/`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from corpus_client import Batch, errors
from corpus_client.staging.device import Group, shifted
from corpus_client.staging.ring import NUM_BUFFERS, DeviceRing, transfer_stream
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
    for _ in range(10):
        read(ring, ring.upload(STORED))
    assert (ring.num_bytes, ring._buffers[0].memory.data_ptr()) == (num_bytes, memory)
    ring.prepare(2 * ring.group_bytes)
    assert ring.num_bytes == 2 * num_bytes
    ring.close()
    ring.close()
    assert ring.num_bytes == 0


def test_a_ring_made_for_an_evaluation_works_outside_of_inference_mode(gpu: FakeGpu) -> None:
    with torch.inference_mode():
        ring = open_ring(gpu)
    assert not ring._buffers[0].memory.is_inference()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_memory_given_back_waits_for_its_last_reader(gpu: FakeGpu, how: str) -> None:
    """The memory belongs to the transfer stream: whoever gets it next writes behind this wait."""
    ring = open_ring(gpu)
    stream: Stream = ring.stream
    read(ring, ring.upload(STORED[:1]))
    if how == "closed":
        ring.close()
    else:
        del ring
        gc.collect()
    assert {work.stream for work in stream.waits} == {"consumer"}


def test_no_batch_is_moved_while_a_graph_is_captured(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    gpu.capturing = True
    with pytest.raises(errors.InvalidArgument, match=r"loader.next_into\(inputs, targets\)"):
        ring.check_not_capturing()


def test_copies_and_stalls_are_measured_by_events(gpu: FakeGpu) -> None:
    ring = open_ring(gpu, timed=True)
    group = ring.upload(STORED)
    assert ring.seconds() == (0.0, 0.0)
    assert group.interval() is None
    read(ring, group)
    assert ring.seconds() == (0.0, 0.0)
    gpu.finish()
    copy_seconds, stall_seconds = ring.seconds()
    assert copy_seconds > 0
    assert stall_seconds > 0
    assert ring.seconds() == (copy_seconds, stall_seconds)
    interval = group.interval()
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(copy_seconds)


def test_a_context_rank_gets_its_slice_and_the_whole_rows(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    stored = torch.arange(30).to(torch.uint16).view(3, 2, 5)
    views = shifted(stored, (1, 2))[0]
    made = ring.make(torch.int64, views)
    gpu.finish()
    assert len(made) == len(views) == 3
    for copy, view in zip(made, views, strict=True):
        assert copy.dtype == torch.int64
        assert copy.is_contiguous()
        assert torch.equal(copy, view.long())


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


def test_memory_is_locked_and_unlocked_on_the_loaders_own_device(gpu: FakeGpu) -> None:
    """Without the guard the process's first device would be asked, and get a context."""
    device = torch.device("cuda", 3)
    ring = DeviceRing(device, gpu)
    gpu.calls.clear()
    assert ring.pin is not None
    ring.pin(4096, 8192)()
    assert gpu.calls == ["register 8192 1 ['cuda:3']", "unregister ['cuda:3']"]
    assert DeviceRing(CPU, gpu).pin is None


def test_slots_are_unlocked_behind_the_last_copy(gpu: FakeGpu) -> None:
    ring = open_ring(gpu)
    unpin = ring._register(4096, 8192)
    group = ring.upload(STORED)
    unpin()
    assert group.done()


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


def test_refusal_to_lock_says_how_much_and_what_to_do(gpu: FakeGpu) -> None:
    gpu.error_code = 2
    with pytest.raises(
        errors.PinningFailed, match=r"8,192 bytes .*CUDA error 2.*`ulimit -l` is .*lower prefetch_bytes"
    ):
        DeviceRing(CPU, gpu)._register(4096, 8192)
