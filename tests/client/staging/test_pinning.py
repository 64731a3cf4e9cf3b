"""Page-locked memory: what is tried in which order, who unlocks it, and what a forked child sees."""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from corpus_client.staging import pinning

CPU = torch.device("cpu")
NUM_BYTES = 3 * mmap.PAGESIZE


class Runtime:
    """Stands for `torch.cuda`, with its names; knows what is locked, by address."""

    def __init__(self, error_code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.threads: set[int] = set()
        self.entered: list[torch.device] = []
        self.error_code = error_code
        self.module = mock.create_autospec(torch.cuda)
        self.module.device.side_effect = self._device
        self.module.cudart.return_value = mock.Mock(
            cudaHostRegister=self._register,
            cudaHostUnregister=self._unregister,
            cudaGetErrorString=lambda code: f"text of {code}",
            spec_set=["cudaHostRegister", "cudaHostUnregister", "cudaGetErrorString"],
        )

    def _device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        self.entered.append(device)
        return contextlib.nullcontext()

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1  # for every device of the process
        if not self.error_code:
            self.locked[address] = num_bytes
        return self.error_code

    def _unregister(self, address: int) -> int:
        self.threads.add(threading.get_ident())
        del self.locked[address]
        return 0


@pytest.fixture(autouse=True)
def warnings_are_new() -> Iterator[None]:
    pinning._warn.cache_clear()
    yield
    pinning._warn.cache_clear()


def test_without_a_runtime_memory_is_pageable_and_whole_pages() -> None:
    memory = pinning.staging_memory(NUM_BYTES, CPU)
    assert (memory.dtype, memory.shape, memory.data_ptr() % mmap.PAGESIZE) == (torch.uint8, (NUM_BYTES,), 0)
    assert not memory.is_pinned()


def test_memory_is_registered_on_the_loaders_own_device_and_stays_so_while_anything_reads_it() -> None:
    runtime, device = Runtime(), torch.device("cuda", 3)
    memory = pinning.staging_memory(NUM_BYTES, device, runtime.module)
    assert runtime.locked == {memory.data_ptr(): NUM_BYTES}
    part = memory[100:200].view(10, 10)
    del memory
    gc.collect()
    assert len(runtime.locked) == 1
    del part
    gc.collect()
    assert (runtime.locked, runtime.entered) == ({}, [device, device])


def test_copies_are_awaited_before_memory_is_unlocked() -> None:
    runtime, order = Runtime(), []
    memory = pinning.staging_memory(NUM_BYTES, CPU, runtime.module, lambda: order.append(len(runtime.locked)))
    del memory
    gc.collect()
    assert (order, runtime.locked) == ([1], {})


def test_memory_is_unlocked_when_the_loader_says_so_whatever_still_refers_to_it() -> None:
    """A fetcher that outlives its join may still write to the last slot."""
    runtime = Runtime()
    memory = pinning.staging_memory(NUM_BYTES, CPU, runtime.module)
    pinning.unlock(memory)
    assert runtime.locked == {}
    memory.fill_(3)
    pinning.unlock(memory)
    pinning.unlock(pinning.pageable(NUM_BYTES))
    del memory
    gc.collect()
    assert runtime.threads == {threading.get_ident()}


def test_memory_that_another_thread_drops_stays_locked_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That thread must not call the device while the loop's thread may be capturing a graph."""
    runtime = Runtime()
    held = [pinning.staging_memory(NUM_BYTES, CPU, runtime.module)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(runtime.locked) == 1
    maps = Path("/proc/self/maps").read_text()
    assert f"{next(iter(runtime.locked)):x}-" in maps  # its address was not given to anybody else
    assert runtime.threads == set()
    assert f"{NUM_BYTES} bytes stay page-locked" in caplog.text


def test_what_cannot_be_locked_is_pageable_and_each_failure_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The CPU build of torch has no pinned memory; neither is `ulimit -l` blamed nor the loader ended."""
    runtime = Runtime(error_code=801)
    with caplog.at_level(logging.WARNING):
        memories = [pinning.staging_memory(NUM_BYTES, CPU, runtime.module) for _ in range(3)]
    assert [memory.is_pinned() for memory in memories] == [False] * 3
    first, second = [record.getMessage() for record in caplog.records]
    assert first == (
        f"cudaHostRegister of {NUM_BYTES:,} bytes failed with error 801 (text of 801); falling back to "
        "memory that torch pins"
    )
    assert second.startswith(f"torch.empty(pin_memory=True) of {NUM_BYTES:,} bytes ")
    assert second.endswith("falling back to pageable memory, from which copies to the device block")


def test_a_runtime_that_cannot_register_is_asked_for_torchs_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(pinning, "pinned_by_torch", lambda num_bytes: found)
    assert pinning.staging_memory(NUM_BYTES, CPU, torch.xpu) is found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads is what is tested
def test_a_forked_child_that_drops_the_slots_keeps_its_own_memory_and_unlocks_nothing() -> None:
    """It finds zeros; what it allocates is never unmapped when it drops the slots."""
    runtime = Runtime()
    memory = pinning.staging_memory(NUM_BYTES, CPU, runtime.module)
    memory.fill_(7)
    child = os.fork()
    if child == 0:
        zeros = int(memory.sum()) == 0
        mine = [mmap.mmap(-1, NUM_BYTES) for _ in range(64)]
        for each in mine:
            each[:] = b"\1" * NUM_BYTES
        del memory
        gc.collect()
        whole = all(each[:] == b"\1" * NUM_BYTES for each in mine)
        os._exit(0 if zeros and whole and len(runtime.locked) == 1 else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (int(memory.sum()), len(runtime.locked)) == (7 * NUM_BYTES, 1)
