"""The simulated accelerator is as late, and as strict, as a real one."""

from __future__ import annotations

import ast
import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.simulated_device import backend

pytestmark = pytest.mark.skipif(bool(backend.missing()), reason=backend.missing())

LATE = 0.1
"""Seconds after which a stream goes on for which something waits."""


@pytest.fixture
def device() -> Iterator[Any]:
    with backend.present() as module:
        yield module


class Gate:
    """Lets the current stream do nothing more until it is open, which it is by itself after some seconds."""

    def __init__(self, device: Any, seconds: float) -> None:
        self.is_open = False
        self._library = ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)  # a `sem_t` has 32 bytes
        self._library.sem_init(self._semaphore, 0, 0)
        device.call(ctypes.cast(self._library.sem_wait, ctypes.c_void_p), self._semaphore)
        self.open_in(seconds)

    def open_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.open)
        timer.daemon = True
        timer.start()

    def open(self) -> None:
        if not self.is_open:
            self.is_open = True
            self._library.sem_post(self._semaphore)


Hold = Callable[..., Gate]


@pytest.fixture
def hold(device: Any) -> Iterator[Hold]:
    """Make gates; all are open at the end.

    Whether something waits for a stream is seen at its gate, and not at a clock: a machine may stand still.
    """
    gates: list[Gate] = []

    def make(seconds: float = 60.0) -> Gate:
        gates.append(Gate(device, seconds))
        return gates[-1]

    yield make
    for gate in gates:
        gate.open()
    device.synchronize()  # until then a stream reads its semaphore


def test_torch_finds_it_only_where_it_is_present() -> None:
    with backend.present() as module:
        assert torch.accelerator.is_available()
        assert module.device_count() == torch.accelerator.device_count() == 2
    assert not torch.accelerator.is_available()
    with pytest.raises(RuntimeError, match="no accelerator is available"):
        torch.ones(1).pin_memory()


def test_what_torch_computes_there_is_what_the_cpu_computes(device: Any) -> None:
    values = torch.arange(12.0).view(3, 4)
    there = values.to("simulated")
    assert torch.equal((there * 2 + 1).sum(dim=1).cpu(), (values * 2 + 1).sum(dim=1))
    there[1:, ::2] = 7
    assert there.cpu()[1:, ::2].eq(7).all()
    assert there.t().contiguous().to(torch.int32).tolist()[0] == [0, 7, 7]
    weight = torch.ones(4, device="simulated", requires_grad=True)
    (there[0] * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2, 3]


def test_the_host_cannot_read_device_memory(device: Any) -> None:
    there = torch.ones(4, device="simulated")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's handler would print the crash
        ctypes.string_at(there.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


CALLS: dict[str, Any] = {
    "is_pinned": lambda device, tensor: tensor.is_pinned(),
    "pin_memory": lambda device, tensor: tensor.pin_memory(),
    "empty": lambda device, tensor: torch.empty(1, device="simulated"),
    "current_device": lambda device, tensor: device.current_device(),
    "is_available": lambda device, tensor: device.is_available(),
    "stream": lambda device, tensor: device.Stream(),
    "event": lambda device, tensor: device.Event().record(),
    "page_lock": lambda device, tensor: device.cudart().cudaHostRegister(0, 0, 0),
}


def refusals(device: Any) -> dict[str, str]:
    """Return what each call is refused with; "" if it is not."""
    found = {}
    for name, call in CALLS.items():
        try:
            call(device, torch.ones(1))
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
    return found


def test_a_forked_child_is_refused_every_call(device: Any) -> None:
    assert set(refusals(device).values()) == {""}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, repr(refusals(device)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = ast.literal_eval(os.read(reader, 1 << 16).decode())
    for descriptor in (reader, writer):
        os.close(descriptor)
    assert {name for name, text in found.items() if "must not touch" in text} == set(CALLS)


def test_another_thread_is_refused_every_call_unless_it_is_torchs(device: Any) -> None:
    weight = torch.ones(4, device="simulated", requires_grad=True)
    device.library.allow_only_this_thread(True)
    found: dict[str, str] = {}
    try:
        thread = threading.Thread(target=lambda: found.update(refusals(device)))
        thread.start()
        thread.join()
        assert set(refusals(device).values()) == {""}
        (weight * weight).sum().backward()
    finally:
        device.library.allow_only_this_thread(False)
    assert {name for name, text in found.items() if "another thread" in text} == set(CALLS)


def test_only_copies_from_page_locked_memory_return_at_once(device: Any, hold: Hold) -> None:
    pageable = torch.arange(1000)
    pinned = pageable.pin_memory()
    there = torch.zeros(1000, dtype=torch.int64, device="simulated")
    for source, non_blocking, waits in ((pinned, True, False), (pinned, False, True), (pageable, True, True)):
        there.zero_()
        gate = hold(LATE if waits else 60)
        there.copy_(source, non_blocking=non_blocking)
        assert gate.is_open == waits
        gate.open()
        assert there.cpu().equal(pageable)
    device.library.refuse_waits(True)
    try:
        there.copy_(pinned, non_blocking=True)
        with pytest.raises(RuntimeError, match="synchronizing operation"):
            there.cpu()
    finally:
        device.library.refuse_waits(False)


def test_a_copy_reads_its_source_when_its_turn_comes(hold: Hold) -> None:
    """So a slot that is refilled too early shows."""
    pinned = torch.zeros(10).pin_memory()
    gate = hold()
    there = pinned.to("simulated", non_blocking=True)
    pinned.fill_(5)
    gate.open()
    assert there.tolist() == [5] * 10


def test_streams_wait_for_events_alone(device: Any, hold: Hold) -> None:
    side = device.Stream()
    there = torch.zeros(10, device="simulated")
    device.synchronize()
    ones = torch.ones(10).pin_memory()
    written = device.Event()
    with device.stream(side):
        gate = hold()
        there.copy_(ones, non_blocking=True)
        written.record(side)
    assert there.tolist() == [0] * 10  # read on the current stream, which does not wait
    assert not written.query()
    device.current_stream().wait_event(written)
    gate.open_in(LATE)
    assert there.tolist() == [1] * 10
    assert written.query()


def test_waiting_means_the_recording_before_the_wait(device: Any, hold: Hold) -> None:
    side, event = device.Stream(), device.Event()
    event.record(side)
    device.current_stream().wait_event(event)
    with device.stream(side):
        gate = hold()
    event.record(side)  # again, and late
    device.current_stream().synchronize()
    assert not gate.is_open
    assert not event.query()
    gate.open_in(LATE)
    event.synchronize()
    assert gate.is_open


def test_events_measure_time(device: Any) -> None:
    before, after = device.Event(enable_timing=True), device.Event(enable_timing=True)
    began = time.perf_counter()
    before.record()
    device.sleep(LATE)
    after.record()
    after.synchronize()
    assert LATE * 1e3 <= before.elapsed_time(after) <= (time.perf_counter() - began) * 1e3


def test_a_freed_block_goes_back_to_its_stream_at_once(device: Any) -> None:
    side = device.Stream()
    allocated = device.memory_allocated()
    first = torch.empty(5000, dtype=torch.uint8, device="simulated")
    assert device.memory_allocated() == allocated + 8192
    address = first.data_ptr()
    device.sleep(LATE)
    del first  # the stream is still busy
    assert device.memory_allocated() == allocated
    with device.stream(side):
        assert torch.empty(5000, dtype=torch.uint8, device="simulated").data_ptr() != address
    assert torch.empty(5000, dtype=torch.uint8, device="simulated").data_ptr() == address


def test_page_locked_memory_is_known_by_address(device: Any) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    runtime = device.cudart()
    assert not tensor.is_pinned()
    assert runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 1) == 0
    assert runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 1) == 712  # already registered
    assert tensor.is_pinned()
    assert tensor[40_000:].is_pinned()
    assert runtime.cudaHostUnregister(memory.ctypes.data) == 0
    assert runtime.cudaHostUnregister(memory.ctypes.data) == 713
    assert not tensor.is_pinned()
    assert runtime.cudaHostRegister(mmap.PAGESIZE, 1 << 40, 1) == 1  # nothing is mapped there


def test_page_locked_memory_of_torch_outlives_the_copies_from_it(device: Any) -> None:
    pinned = torch.full((100_000,), 3).pin_memory()
    device.sleep(LATE)
    there = pinned.to("simulated", non_blocking=True)
    del pinned
    torch.full((100_000,), 4).pin_memory()
    assert there.cpu().eq(3).all()


def test_each_thread_and_each_device_has_its_current_stream(device: Any) -> None:
    side = device.Stream()
    found: list[Any] = []
    with device.stream(side):
        thread = threading.Thread(target=lambda: found.append(device.current_stream()))
        thread.start()
        thread.join()
        assert device.current_stream() == side
        assert device.current_stream(1) != side
    assert found == [device.current_stream()]
    with device.device(1):
        assert torch.empty(1, device="simulated").device.index == 1
        assert device.current_device() == 1
    assert device.current_device() == 0


def test_every_operation_is_late_by_a_random_time() -> None:
    with backend.present(seed=1, delay=0.02) as device:
        there = torch.empty(4, device="simulated")
        pinned = torch.ones(4).pin_memory()
        began = time.perf_counter()
        for _ in range(20):
            there.copy_(pinned, non_blocking=True)
        device.synchronize()
        assert time.perf_counter() - began > 0.1
