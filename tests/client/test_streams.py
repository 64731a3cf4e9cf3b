"""What is asked of a GPU's runtime, in which order; the runtime is a stand-in that does everything at once.

The same on a real device is in `cuda/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corpus_client import errors
from corpus_client.streams import LEAST_AHEAD, StreamDevice

STORED = torch.arange(12).to(torch.uint16).view(3, 2, 2)


class Runtime:
    """`torch.cuda` as far as it is used; its clock goes on by a millisecond with each event."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing = False
        self.passed = True
        self.code = 0
        self.milliseconds = 0.0
        runtime = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                self.name = "transfer"

            def synchronize(self) -> None:
                runtime.log.append("synchronize the stream")

            def wait_event(self, event: Any) -> None:
                runtime.log.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
                self.timed = enable_timing

            def record(self, stream: Any) -> None:
                runtime.milliseconds += 1
                self.at = runtime.milliseconds
                self.name = f"{stream.name} {self.at:g}"
                runtime.log.append(f"event {self.name}")

            def query(self) -> bool:
                return runtime.passed

            def synchronize(self) -> None:
                runtime.log.append(f"synchronize {self.name}")

            def elapsed_time(self, later: Any) -> float:
                assert self.timed
                assert later.timed
                return float(later.at - self.at)

        self.Stream, self.Event = Stream, Event
        self.consumer = Stream(torch.device("cpu"))
        self.consumer.name = "consumer"

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    def current_stream(self, device: torch.device) -> Any:
        return self.consumer

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def cudart(self) -> Any:
        def register(address: int, num_bytes: int, flags: int) -> int:
            self.log.append(f"register {address} {num_bytes} {flags}")
            return self.code

        def unregister(address: int) -> int:
            self.log.append(f"unregister {address}")
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()

    def record_stream(tokens: torch.Tensor, stream: Any) -> None:
        runtime.log.append(f"record_stream {stream.name}")

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    return runtime


@pytest.fixture
def open_it(runtime: Runtime) -> Callable[..., StreamDevice]:
    return lambda dtype=torch.int64, **options: StreamDevice(torch.device("cpu"), dtype, runtime, **options)


def test_copy_and_widening_lie_on_the_transfer_stream_before_their_event(
    runtime: Runtime, open_it: Callable[..., StreamDevice]
) -> None:
    transfer = open_it().upload(STORED)
    assert runtime.log == ["enter transfer", "event transfer 1", "leave transfer"]
    runtime.log.clear()
    batches = [transfer.claim() for _ in range(3)]
    assert [batch.tolist() for batch in batches] == STORED.tolist()
    assert {batch.dtype for batch in batches} == {torch.int64}
    each = ["consumer waits for transfer 1", "record_stream consumer"]
    assert runtime.log == ["event consumer 2", *each, *each, *each]


def test_a_slot_is_free_when_the_event_has_passed(
    runtime: Runtime, open_it: Callable[..., StreamDevice]
) -> None:
    transfer = open_it().upload(STORED)
    runtime.passed = False
    assert not transfer.done()
    runtime.passed = True
    assert transfer.done()


def test_transfer_forgets_what_was_claimed(open_it: Callable[..., StreamDevice]) -> None:
    transfer = open_it().upload(STORED)
    for _ in range(3):
        transfer.claim()
    with pytest.raises(IndexError):
        transfer.claim()


@pytest.mark.parametrize(
    ("batch_bytes", "ahead"), [(16, (256 << 20) // 64), (32 << 20, LEAST_AHEAD), (8 << 20, 8)]
)
def test_training_loop_is_let_so_far_ahead_of_the_device(
    runtime: Runtime, open_it: Callable[..., StreamDevice], batch_bytes: int, ahead: int
) -> None:
    """By groups of 256 MiB together as int64, or four; batches here are uint16, a quarter."""
    device = open_it()
    stored = torch.empty(1, 1, batch_bytes // 2, dtype=torch.uint16)
    device.upload(stored)
    for _ in range(ahead):
        device.claimed(runtime.consumer)
    device.pace()
    assert not [line for line in runtime.log if line.startswith("synchronize")]
    device.claimed(runtime.consumer)
    device.pace()
    device.pace()
    assert [line for line in runtime.log if line.startswith("synchronize")] == ["synchronize consumer 2"]


def test_no_batch_is_moved_while_a_graph_is_captured(
    runtime: Runtime, open_it: Callable[..., StreamDevice]
) -> None:
    device = open_it()
    runtime.capturing = True
    with pytest.raises(errors.InvalidArgument, match=r"static.copy_\(batch.tokens\)"):
        device.pace()
    assert runtime.log == []


def test_copies_and_stalls_are_measured_by_events(
    runtime: Runtime, open_it: Callable[..., StreamDevice]
) -> None:
    device = open_it(timed=True)
    transfer = device.upload(STORED)
    assert device.seconds() == (0.0, 0.0)
    transfer.claim()  # events 3 (claim), 4 and 5 around the wait
    runtime.passed = False
    assert device.seconds() == (0.0, 0.0)
    runtime.passed = True
    assert device.seconds() == (0.001, 0.001)
    assert device.seconds() == (0.001, 0.001)
    interval = transfer.interval()
    assert interval is not None
    assert interval[1] - interval[0] == pytest.approx(0.001)


def test_transfers_that_nobody_claims_are_forgotten(open_it: Callable[..., StreamDevice]) -> None:
    """A pipeline was dropped with batches on their way; the next one's are measured."""
    device = open_it(timed=True)
    device.upload(STORED)
    device.drain()
    device.upload(STORED).claim()
    assert device.seconds()[0] == 0.001


def test_untimed_transfers_have_no_interval(open_it: Callable[..., StreamDevice]) -> None:
    device = open_it()
    transfer = device.upload(STORED)
    transfer.claim()
    assert transfer.interval() is None
    assert device.seconds() == (0.0, 0.0)


def test_memory_is_locked_for_every_device_and_unlocked_behind_the_last_copy(runtime: Runtime) -> None:
    device = StreamDevice(torch.device("cuda", 0), None, runtime)
    assert device.pin is not None
    device.pin(4096, 8192)()
    assert runtime.log == ["register 4096 8192 1", "synchronize the stream", "unregister 4096"]
    assert StreamDevice(torch.device("cpu"), None, runtime).pin is None


def test_refusal_to_lock_says_how_much_and_what_to_do(runtime: Runtime) -> None:
    runtime.code = 2
    device = StreamDevice(torch.device("cpu"), None, runtime)
    with pytest.raises(
        errors.PinningFailed, match=r"8,192 bytes .*CUDA error 2.*`ulimit -l` is .*lower prefetch_bytes"
    ):
        device._register(4096, 8192)
