"""A GPU made of CPU memory, whose work runs late and in any order that its streams and events allow.

It stands for `torch.cuda` in a `DeviceRing`. While it is entered, `Tensor.copy_` queues work on the current
stream and copies nothing; the work runs later, a random choice among what may run. A slot or a staging buffer
that is reused too early, and a batch that is read too early, therefore show as wrong tokens.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


@dataclass(eq=False, slots=True)
class Work:
    """Something queued on a stream. kind: "copy" (of the copy engine), "kernel", or "mark" (an event)."""

    kind: str
    stream: str
    run: Callable[[], None] | None
    after: tuple[Work, ...]
    done_at: float | None = None


@dataclass(eq=False)
class Stream:
    """Work in order. waits: for which events what comes next has to wait."""

    gpu: FakeGpu
    name: str
    last: Work | None = None
    waits: list[Work] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.gpu.called()
        if event.mark is not None:
            self.waits.append(event.mark)

    def synchronize(self) -> None:
        if self.last is not None:
            self.gpu.run_until(self.last)


class Event:
    def __init__(self, gpu: FakeGpu, enable_timing: bool, blocking: bool) -> None:
        self.gpu = gpu
        self.timed = enable_timing
        self.mark: Work | None = None

    def record(self, stream: Stream) -> None:
        self.mark = self.gpu.queue("mark", stream, None)

    def query(self) -> bool:
        self.gpu.called()
        return self.mark is None or self.mark.done_at is not None

    def synchronize(self) -> None:
        if self.mark is not None:
            self.gpu.run_until(self.mark)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds; each piece of work takes one."""
        assert self.timed
        assert later.timed
        assert self.mark is not None
        assert later.mark is not None
        assert self.mark.done_at is not None
        assert later.mark.done_at is not None
        return later.mark.done_at - self.mark.done_at


class FakeGpu(TorchFunctionMode):
    """Streams, events, one copy engine and one compute engine.

    Args:
        seed: of the choice among what may run.
        pace: how much work runs with each call, the next of these over and over; 0 is none.
        connections: 1: kernels of all streams run in the order in which they were queued, each held up by
            what the one before it waits for, as under CUDA_DEVICE_MAX_CONNECTIONS=1.
    """

    def __init__(self, seed: int = 0, pace: tuple[int, ...] = (1,), *, connections: int = 8) -> None:
        super().__init__()
        self.connections = connections
        self.pace = pace
        self.held: set[str] = set()  # kinds of work that do not run
        self.capturing = False
        self.error_code = 0
        self.devices: list[str] = []  # entered now
        self.calls: list[str] = []
        self.kinds: set[tuple[str, str]] = set()  # (stream, kind of work) of all that was queued
        self.history: list[Work] = []
        self.threads: set[int] = set()
        self.consumer = Stream(self, "consumer")
        self._current = self.consumer
        self._pending: list[Work] = []
        self._draw = random.Random(seed)
        self._num_calls = 0
        self._clock = 0.0
        self._running = False

    # What DeviceRing asks of torch.cuda.

    def Stream(self, device: torch.device, priority: int) -> Stream:  # noqa: N802
        self.calls.append(f"stream of priority {priority} {self.devices}")
        return Stream(self, "transfer")

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:  # noqa: N802
        return Event(self, enable_timing, blocking)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(str(device))
        yield
        self.devices.pop()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self, device: torch.device) -> Stream:
        return self._current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def cudart(self) -> Any:
        def register(address: int, num_bytes: int, flags: int) -> int:
            self.calls.append(f"register {num_bytes} {flags} {self.devices}")
            return self.error_code

        def unregister(address: int) -> int:
            self.calls.append(f"unregister {self.devices}")
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    # What tests ask of it.

    def launch(self, run: Callable[[], None], stream: Stream | None = None) -> Work:
        """Queue a kernel on the current stream."""
        return self.queue("kernel", stream or self._current, run)

    def finish(self) -> None:
        """Run everything, as far as it is not held."""
        while self._run_one():
            pass

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    # Inside.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.Tensor.copy_:
            return func(*args, **(kwargs or {}))
        into, source = args
        plain = into.dtype == source.dtype and into.is_contiguous() and source.is_contiguous()
        into_view, source_view = into.numpy(), source.numpy()

        def run() -> None:
            np.copyto(into_view, source_view, casting="unsafe")

        self.queue("copy" if plain and (kwargs or {}).get("non_blocking") else "kernel", self._current, run)
        return into

    def called(self) -> None:
        self.threads.add(threading.get_ident())
        self._num_calls += 1
        for _ in range(self.pace[self._num_calls % len(self.pace)]):
            self._run_one()

    def queue(self, kind: str, stream: Stream, run: Callable[[], None] | None) -> Work:
        self.called()
        before = () if stream.last is None else (stream.last,)
        after = tuple(work for work in (*before, *stream.waits) if work.done_at is None)
        stream.waits.clear()
        stream.last = work = Work(kind, stream.name, run, after)
        self._pending.append(work)
        self.kinds.add((stream.name, kind))
        return work

    def run_until(self, wanted: Work) -> None:
        while wanted.done_at is None:
            assert self._run_one(), "the device waits for something that never happens"

    def _run_one(self) -> bool:
        ready = [work for work in self._pending if self._may_run(work)]
        if not ready:
            return False
        work = self._draw.choice(ready)
        self._pending.remove(work)
        if work.run is not None:
            work.run()
        self._clock += 1
        work.done_at, work.run, work.after = self._clock, None, ()
        return True

    def _may_run(self, work: Work) -> bool:
        if work.kind in self.held or any(each.done_at is None for each in work.after):
            return False
        if self.connections > 1 or work.kind != "kernel":
            return True
        return work is next(each for each in self._pending if each.kind == "kernel")
