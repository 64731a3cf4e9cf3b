"""Copy batches to a GPU through a ring of staging buffers in its memory.

    transfer stream     wait consumed[k] | copy a group into buffer k | record copied
    consumer's stream   step 6 | wait copied | widen batch 7 | record consumed[k] | step 7 | widen batch 8 ...

A staging buffer holds tokens as stored, 2 or 4 bytes each. The consumer's stream is the one that is current
in the training loop when it asks for a batch. Why the work is divided like this:

- A batch is made on the consumer's stream, so it is an ordinary tensor there: the allocator reuses its
  memory in that stream's order. `record_stream` is not needed, and a loop that runs ahead of its GPU (a
  replayed CUDA graph: by hundreds of steps) needs no more memory for it.
- The transfer stream runs copies only. With `CUDA_DEVICE_MAX_CONNECTIONS=1` (Megatron's setting) all kernels
  share one hardware queue, so a kernel behind a copy would hold up the training step queued after it.
- A buffer is refilled after `consumed`, a slot after `copied`. The GPU waits for the first. For the second
  the training loop's thread asks the event whenever it comes for a batch.

While a CUDA graph is captured nothing is called here: such a call would break the capture, or become part of
the graph. A captured step reads tensors of its own, which `next_into` fills before each replay.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from corpus_client import errors
from corpus_client.network.layout import ALIGNMENT
from corpus_client.plan.world import WHOLE, Context
from corpus_client.staging import pinning
from corpus_client.staging.stager import Group, Stager, Stored, T

NUM_BUFFERS = 3
"""One is read, the next is full, the one after it is being filled."""

GROUP_BYTES = 4 << 20
"""Bytes of one copy: 0.17 ms at the 25 GB/s of PCIe 4, long beside the call that queues it.

Not measured yet; `corpus-client transfer` shows speed by size on a machine with a GPU.
"""

MAX_LOOKS, LOOK_SECONDS = 5, 1e-3
"""At the clocks of this CPU and the device, until one takes no longer; it takes 0.02 ms by itself."""


@functools.cache
def transfer_stream(runtime: Any, device: torch.device) -> Any:
    """Return the stream that all loaders of the process copy on; one each would use up torch's pool of 32."""
    with runtime.device(device):
        return runtime.Stream(device, priority=-1)


class DeviceRing(Stager):
    """Staging buffers on an accelerator with streams and events.

    runtime: the accelerator's module, `torch.cuda` or one with the same names (`torch.xpu`).
    """

    num_buffers = NUM_BUFFERS
    copies_on_host = False

    def __init__(
        self,
        device: torch.device,
        runtime: Any,
        *,
        context: Context = WHOLE,
        timed: bool = False,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        super().__init__(device, context=context, timed=timed)
        self.group_bytes = group_bytes
        self.runtime = runtime
        self.stream = transfer_stream(runtime, device)
        self._buffers: list[_Buffer] = []
        self._release: Callable[[], object] = lambda: None
        self._num_uploads = 0
        self._latest: _Copy | None = None
        self._unmeasured: deque[_Copy] = deque()

    def is_capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph, which must hold no call of ours."""
        capturing = getattr(self.runtime, "is_current_stream_capturing", None)
        return capturing is not None and bool(capturing())

    def check_not_capturing(self) -> None:
        """Refuse to move batches while a CUDA graph is captured."""
        if self.is_capturing():
            raise errors.InvalidArgument(
                "a batch was asked for while a CUDA graph is being captured; capture the step on tensors "
                "of its own, and fill them before each replay: loader.next_into(inputs, targets)"
            )

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return memory for the slots: page-locked, unless the runtime and torch both fail to."""
        return pinning.staging_memory(num_bytes, self.location, self.runtime, self._await_copies)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Return what torch says: registering memory may do less than was asked."""
        return memory.is_pinned()

    def prepare(self, batch_bytes: int) -> None:
        """Allocate the buffers, unless those that exist hold a batch of this size."""
        if self.num_bytes and batch_bytes <= self.num_bytes // NUM_BUFFERS:
            return
        self.close()
        # Whole groups, and each buffer where a copy likes to begin.
        buffer_bytes = -(-max(batch_bytes, self.group_bytes) // 512) * 512
        # Made under `inference_mode`, as in an evaluation, the memory could not be written to outside of it.
        with torch.inference_mode(mode=False), self._on_transfer_stream():
            memory = torch.empty(NUM_BUFFERS, buffer_bytes, dtype=torch.uint8, device=self.location)
        self.num_bytes = memory.nbytes
        self._buffers = [_Buffer(part, consumed=self.runtime.Event()) for part in memory]
        self._release = weakref.finalize(self, _release, self.stream, self._buffers)
        self._release.atexit = False  # the process's end frees the memory too

    def upload(
        self, stored: torch.Tensor, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> _Copy:
        """Queue one copy, and one for each array beside the tokens; return before they have run."""
        buffer = self._buffers[self._num_uploads % NUM_BUFFERS]
        self._num_uploads += 1
        staged = buffer.memory[: stored.nbytes].view(stored.dtype).view(stored.shape)
        staged_beside, end = {}, stored.nbytes
        for name, array in beside.items():
            end += -end % ALIGNMENT
            staged_beside[name] = buffer.memory[end : end + array.nbytes].view(array.dtype).view(array.shape)
            end += array.nbytes
        with self._on_transfer_stream():
            self.stream.wait_event(buffer.consumed)
            begun = self.event(self.stream) if self.timed else None
            staged.copy_(stored, non_blocking=True)
            for name, array in beside.items():
                staged_beside[name].copy_(array, non_blocking=True)
            copied = self.event(self.stream)
            self._latest = copy = _Copy(self, buffer, (staged, staged_beside), begun, copied)
        if self.timed:
            self._measure()
            self._unmeasured.append(copy)
        return copy

    def copied_pair(self, stored: Stored, dtype: torch.dtype) -> Iterable[torch.Tensor]:
        """Queue one copy that makes inputs and targets, on the consumer's stream."""
        return self.copied(stored.pair, dtype).unbind()

    def copied(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Queue a copy into a new tensor of another type, on the consumer's stream."""
        copy = torch.empty(source.shape, dtype=dtype, device=self.location)
        self.copy(source, copy)
        return copy

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Queue a widening copy within the device, on the consumer's stream."""
        into.copy_(source, non_blocking=True)

    def drain(self) -> None:
        """Wait until no slot is read any more; forget copies that nobody will read."""
        self._await_copies()
        with contextlib.suppress(RuntimeError):
            self._measure()
        self._latest = None
        self._unmeasured.clear()

    def close(self) -> None:
        """Give the buffers' memory back to the allocator."""
        self._release()
        self._buffers, self.num_bytes = [], 0

    def measure(self) -> None:
        """Add up the copies that are over, and the consumer's stream standing still for them."""
        if self.timed and not self.is_capturing():
            self._measure()

    def event(self, stream: Any) -> Any:
        """Return a new event, recorded on `stream`."""
        # A thread that waits for the device must not spin: it may share its core.
        blocking = {"blocking": True} if self.location.type == "cuda" else {}
        event = self.runtime.Event(enable_timing=self.timed, **blocking)
        event.record(stream)
        return event

    @contextlib.contextmanager
    def _on_transfer_stream(self) -> Iterator[None]:
        # Stager first: leaving `stream` alone would make the process's first device current again, and with
        # that a context there, hundreds of megabytes, in every rank that never called `set_device`.
        with self.runtime.device(self.location), self.runtime.stream(self.stream):
            yield

    def _await_copies(self) -> None:
        """Wait until every copy that was queued has run."""
        # After a device error no slot is read any more, and the error is raised where the loop meets it:
        # raised from here as well, it would hide the cause behind the loader's `close`.
        if (latest := self._latest) is not None:
            with contextlib.suppress(RuntimeError):
                latest.copied.synchronize()

    def _measure(self) -> None:
        """Add up the copies that are over, in order."""
        while self._unmeasured and (seconds := self._unmeasured[0].measured()) is not None:
            self._unmeasured.popleft()
            self.copy_seconds += seconds[0]
            self.stall_seconds += seconds[1]


@dataclass(slots=True, eq=False)
class _Buffer:
    """One staging buffer. consumed: recorded on the consumer's stream behind everything that reads it."""

    memory: torch.Tensor
    consumed: Any


def _release(stream: Any, buffers: list[_Buffer]) -> None:
    """Let the allocator reuse the buffers' memory, in the order of the transfer stream it belongs to."""
    with contextlib.suppress(RuntimeError):  # after a device error
        for buffer in buffers:
            stream.wait_event(buffer.consumed)
    for buffer in buffers:
        del buffer.memory  # a trace may keep a copy, and with it the buffer
    buffers.clear()


class _Copy(Group):
    """A group of batches in a buffer. begun: event before the copy, if timed; copied: behind it."""

    def __init__(
        self,
        ring: DeviceRing,
        buffer: _Buffer,
        staged: tuple[torch.Tensor, Mapping[str, torch.Tensor]],
        begun: Any,
        copied: Any,
    ) -> None:
        super().__init__(ring, *staged)
        self.copied = copied
        self._ring = ring
        self._buffer = buffer
        self._begun = begun
        self._reader: Any = None
        self._stall: tuple[Any, Any] | None = None

    def read_next(self, use: Callable[[Stored], T]) -> T:
        current = self._ring.runtime.current_stream(self._ring.location)
        if self._reader is None or self._reader != current:
            self._wait(current)
        made = use(self.unread[0])
        # After each batch and not only the last: the others may never be read, if the loader goes elsewhere.
        self._buffer.consumed.record(current)
        self.unread.popleft()
        return made

    def done(self) -> bool:
        return bool(self.copied.query())

    def interval(self) -> tuple[float, float] | None:
        if self._begun is None or not self.done():
            return None
        # The device has a clock of its own, and this thread may stand still between looks at the two.
        looks: list[tuple[float, float]] = []  # how far apart they were, and the end by this one
        while len(looks) < MAX_LOOKS and (not looks or looks[-1][0] > LOOK_SECONDS):
            asked = time.perf_counter()
            now = self._ring.event(self._ring.stream)
            now.synchronize()
            came = time.perf_counter()
            looks.append((came - asked, came - float(self.copied.elapsed_time(now)) / 1e3))
        stop = min(looks)[1]
        return stop - float(self._begun.elapsed_time(self.copied)) / 1e3, stop

    def measured(self) -> tuple[float, float] | None:
        """Return seconds (of the copy, of the consumer's stream standing still for it); None: not over."""
        if self._stall is None or not self.done() or not self._stall[1].query():
            return None
        before, after = self._stall
        return float(self._begun.elapsed_time(self.copied)) / 1e3, float(before.elapsed_time(after)) / 1e3

    def _wait(self, current: Any) -> None:
        """Order what `current` does from now on behind the copy, and behind readers on other streams."""
        before = self._ring.event(current) if self._begun is not None and self._stall is None else None
        current.wait_event(self.copied)
        current.wait_event(self._buffer.consumed)
        if before is not None:
            self._stall = (before, self._ring.event(current))
        self._reader = current


def open_stager(
    device: str | torch.device | None, *, context: Context = WHOLE, timed: bool = False
) -> Stager:
    """Return what brings batches to the device; the arguments are those of `Stager`."""
    device = find_device(device)
    if (runtime := runtime_of(device)) is None:
        return Stager(device, context=context, timed=timed)
    return DeviceRing(device, runtime, context=context, timed=timed)


def runtime_of(device: torch.device) -> Any:
    """Return the module of an accelerator with streams: `torch.cuda` or one with its names; else None."""
    runtime = getattr(torch, device.type, None)
    return runtime if device.type != "cpu" and hasattr(runtime, "Stream") else None


def find_device(named: str | torch.device | None, environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device with its index, checked to exist; None is CUDA, another accelerator or the CPU.

    Without an index it is the current device if that is not the first, so somebody set it; else the one
    of LOCAL_RANK, which torchrun sets: eight ranks that all forgot `set_device` do not share one GPU.
    """
    try:
        device = _default_device() if named is None else torch.device(named)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    runtime: Any = getattr(torch, device.type, None)
    count = int(runtime.device_count()) if hasattr(runtime, "device_count") else 0
    if count == 0:
        raise errors.InvalidArgument(
            f"device must be 'cpu' or an accelerator that torch sees here, got {str(named)!r}; "
            f"the one it sees is {str(_default_device())!r}"
        )
    index = device.index
    if index is None:
        index = int(runtime.current_device()) if hasattr(runtime, "current_device") else 0
        local_rank = environ.get("LOCAL_RANK", "")
        if index == 0 and local_rank.isdecimal() and int(local_rank) < count:
            index = int(local_rank)
    if not index < count:
        raise errors.InvalidArgument(
            f"device must be {device.type}:0 to {device.type}:{count - 1}, got {str(device)!r}; "
            "does CUDA_VISIBLE_DEVICES hide it?"
        )
    return torch.device(device.type, index)


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator())
    return torch.device("cpu")
