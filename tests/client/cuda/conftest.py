"""An accelerator for each test: the simulated one in every run, and a GPU where there is one."""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.simulated_device import backend


@dataclass(frozen=True)
class Accelerator:
    """name: of the device; runtime: `torch.cuda`, or what has its names."""

    name: str
    runtime: Any

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy; return at once."""
        if self.name == "cuda":
            torch.cuda._sleep(int(seconds * 2e9))
        else:
            self.runtime.sleep(seconds)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let the current stream do nothing more until the block ends, however long that takes.

        The stream calls `sem_wait` of the C library on a thread of the driver. Nothing in the block may wait
        for the stream.
        """
        library = ctypes.CDLL(None)
        semaphore = ctypes.create_string_buffer(64)  # a `sem_t` has 32 bytes
        library.sem_init(semaphore, 0, 0)
        function = ctypes.cast(library.sem_wait, ctypes.c_void_p)
        if self.name == "cuda":
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            assert ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(stream, function, semaphore) == 0
        else:
            self.runtime.call(function, semaphore)
        try:
            yield
        finally:
            library.sem_post(semaphore)
            self.runtime.synchronize()  # until then the stream reads the semaphore

    def allow_threads(self) -> None:
        """Let every thread call the simulated device, and not only the test's."""
        if self.name != "cuda":
            self.runtime.library.allow_only_this_thread(False)

    def refuse_waits(self, refuse: bool) -> None:
        """Make an operation that waits for the device an error."""
        if self.name == "cuda":
            torch.cuda.set_sync_debug_mode("error" if refuse else "default")
        else:
            self.runtime.library.refuse_waits(refuse)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """Yield the accelerator; the simulated one delays each operation by up to 0.2 ms."""
    if request.param == "cuda":
        yield Accelerator("cuda", torch.cuda)
        return
    if reason := backend.missing():
        pytest.skip(reason)
    with backend.present(seed=zlib.crc32(request.node.name.encode()), delay=2e-4) as runtime:
        runtime.library.allow_only_this_thread(True)
        try:
            yield Accelerator(backend.NAME, runtime)
        finally:
            runtime.library.allow_only_this_thread(False)
