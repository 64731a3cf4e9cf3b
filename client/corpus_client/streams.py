"""A GPU: non-blocking copies on a stream of its own, widened on that same stream.

    transfer stream     copy 7 | widen 7 | event 7 | copy 8 | widen 8 | event 8 | ...
    consumer's stream   step 5 ............. step 6 ......... wait 7 | step 7 ...

How memory is kept from being reused too early:

- A slot is refilled only after the event behind its last copy has passed. The events are asked by the
  training loop's thread, when it comes for a batch.
- A batch is the caller's own, so nobody here knows when its last reader is queued: it is allocated on the
  transfer stream, and `claim` tells the allocator of the consumer's (`record_stream`). Dropping it in
  Python then gives its memory back when the work that is queued on the consumer's stream by that moment
  has run. Kept references and an event at the next batch would be wrong for a batch that is kept longer.
  A consumer that reads a batch on a further stream must call `record_stream` for that one.
- The price of `record_stream` is that a CPU that runs ahead of its GPU (a replayed CUDA graph: by hundreds
  of steps) needs new memory for every batch ahead. So `pace` lets it be at most `AHEAD_BYTES` of batches
  ahead, at least `LEAST_AHEAD` groups: enough that the GPU never waits, and memory has a bound.
- The copy as stored is allocated, read and freed on the transfer stream alone, whose order protects it.

No call is made here while a CUDA graph is captured: such a call would break the capture, or become part
of the graph. A captured step reads a tensor of its own, into which each batch is copied before a replay.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from corpus_client import errors
from corpus_client.buffers import Pin, host_memory_bytes
from corpus_client.groups import Group, Transfer

GROUP_BYTES = 1 << 20
"""Here the bus is near its full speed, and a copy still takes only tens of microseconds."""

AHEAD_BYTES = 256 << 20
LEAST_AHEAD = 4

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class StreamDevice:
    """An accelerator with streams and events.

    Args:
        runtime: its module, `torch.cuda` or one with the same names (`torch.xpu`).
    """

    borrows = False
    lookahead = 2  # one being copied while one waits to be claimed
    group_bytes = GROUP_BYTES
    copies_on_host = False

    def __init__(
        self, device: torch.device, dtype: torch.dtype | None, runtime: Any, *, timed: bool = False
    ) -> None:
        self.device = device
        self.runtime = runtime
        self.dtype = dtype
        self.timed = timed
        self.stream = runtime.Stream(device)
        self._claims: deque[Any] = deque()
        self._most_ahead = LEAST_AHEAD
        self._unmeasured: deque[_Copy] = deque()
        self._copy_seconds = self._stall_seconds = 0.0
        # A thread that waits long for the device must not spin: it may share its core.
        self._waitable = {"blocking": True} if device.type == "cuda" else {}

    @property
    def pin(self) -> Pin | None:
        """`cudaHostRegister`; other runtimes offer nothing like it, and copy from pageable memory."""
        return self._register if self.device.type == "cuda" else None

    def pace(self) -> None:
        """Wait until the device has reached the claim of some groups ago."""
        capturing = getattr(self.runtime, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            raise errors.InvalidArgument(
                "a batch was asked for while a CUDA graph is being captured; capture the step on a tensor "
                "of its own, and before each replay copy the batch into it: static.copy_(batch.tokens)"
            )
        while len(self._claims) > self._most_ahead:
            self._claims.popleft().synchronize()
        self._measure()

    def upload(self, stored: torch.Tensor) -> Transfer:
        """Queue copy, widening and event; returns before any of them has run."""
        with self.runtime.stream(self.stream):
            begun = self._event(self.stream) if self.timed else None
            tokens = stored.to(self.device, non_blocking=True)
            if self.dtype is not None:
                tokens = tokens.to(self.dtype)
            copy = _Copy(self, tokens, begun, self._event(self.stream))
        if self.timed:
            self._unmeasured.append(copy)
        self._most_ahead = max(LEAST_AHEAD, AHEAD_BYTES // max(1, tokens.nbytes))
        return copy

    def drain(self) -> None:
        """Wait for the transfer stream; what was not claimed by then is nobody's any more."""
        self.stream.synchronize()
        self._measure()
        self._unmeasured.clear()

    def seconds(self) -> tuple[float, float]:
        """Of copies with their widening, and of the consumer's stream; of those that are over."""
        self._measure()
        return self._copy_seconds, self._stall_seconds

    def claimed(self, stream: Any) -> None:
        """A group's first batch was claimed on `stream`."""
        event = self.runtime.Event(**self._waitable)
        event.record(stream)
        self._claims.append(event)

    def ended_at(self, event: Any) -> float:
        """When an event passed, `time.perf_counter` seconds; waits for the transfer stream."""
        now = self._event(self.stream)
        now.synchronize()
        return time.perf_counter() - float(event.elapsed_time(now)) / 1e3

    def _event(self, stream: Any) -> Any:
        event = self.runtime.Event(enable_timing=self.timed)
        event.record(stream)
        return event

    def _measure(self) -> None:
        """Add up the copies that are over, in order."""
        while self._unmeasured and self._unmeasured[0].over():
            copy_seconds, stall_seconds = self._unmeasured.popleft().measured()
            self._copy_seconds += copy_seconds
            self._stall_seconds += stall_seconds

    def _register(self, address: int, num_bytes: int) -> Callable[[], None]:
        cudart = self.runtime.cudart()
        with self.runtime.device(self.device):
            code = int(cudart.cudaHostRegister(address, num_bytes, PORTABLE))
        if code:
            # The runtime reports a failure once more at the next launch, whoever's that is: launch here.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.device)
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
            raise errors.PinningFailed(
                f"{num_bytes:,} bytes for the slots could not be page-locked (CUDA error {code}); this "
                f"process may use {host_memory_bytes():,} bytes of memory, and `ulimit -l` is {limit}; "
                "lower prefetch_bytes, or raise these limits"
            )

        def unregister() -> None:
            with contextlib.suppress(RuntimeError):  # after a device error there is nothing left to wait for
                self.stream.synchronize()
            cudart.cudaHostUnregister(address)

        return unregister


class _Copy:
    """A group on its way. begun: event before the copy, if it is timed; ended: behind the widening."""

    def __init__(self, device: StreamDevice, tokens: torch.Tensor, begun: Any, ended: Any) -> None:
        self._device = device
        self._group = Group(tokens)
        self._begun = begun
        self._ended = ended
        self._stall: tuple[Any, Any] | None = None

    def claim(self) -> torch.Tensor:
        device = self._device
        number, tokens = self._group.take()
        current = device.runtime.current_stream(device.device)
        if number == 0:
            device.claimed(current)
        if number == 0 and self._begun is not None:
            before = device._event(current)
            current.wait_event(self._ended)
            self._stall = (before, device._event(current))
        else:
            current.wait_event(self._ended)
        tokens.record_stream(current)
        return tokens

    def done(self) -> bool:
        return bool(self._ended.query())

    def interval(self) -> tuple[float, float] | None:
        if self._begun is None or not self.done():
            return None
        stop = self._device.ended_at(self._ended)
        return stop - float(self._begun.elapsed_time(self._ended)) / 1e3, stop

    def over(self) -> bool:
        """Whether both the copy and the wait of its consumer are."""
        return self._stall is not None and self.done() and bool(self._stall[1].query())

    def measured(self) -> tuple[float, float]:
        """Seconds of the copy, and of the consumer's stream that stood still for it."""
        assert self._stall is not None
        before, after = self._stall
        return float(self._begun.elapsed_time(self._ended)) / 1e3, float(before.elapsed_time(after)) / 1e3
