"""Read small tensors back from a device without waiting for it: a ring of page-locked slots, and events.

    training loop's stream    step 6 | losses 6 -> slot k | record event k | step 7 | losses 7 -> slot k+1 ...

The host looks at the events now and then, so a step's values are on the host some steps later. In host memory
they are there at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from corpus_client.staging import pinning
from corpus_client.staging.ring import DeviceRing
from corpus_client.staging.stager import Stager

NUM_SLOTS = 256  # steps that the device may be behind: a replayed CUDA graph runs behind by hundreds

T = TypeVar("T")


class Arrived(NamedTuple, Generic[T]):
    """A step's losses and sources in host memory, which later steps may be read back into: copy them."""

    what: T
    losses: torch.Tensor
    sources: torch.Tensor


class _Read(NamedTuple, Generic[T]):
    what: T
    losses: torch.Tensor
    sources: torch.Tensor
    event: Any


class ReadBack(Generic[T]):
    """Losses and sources of rows on their way from a device; used by one thread.

    Without a device that has streams, `push` copies at once.
    """

    def __init__(self, stager: Stager) -> None:
        self._ring = stager if isinstance(stager, DeviceRing) else None
        self._reads: deque[_Read[T]] = deque()
        self._slots: list[torch.Tensor] = []
        self._num_pushed = 0
        self._latest: list[Any] = []  # the event of the last copy; no view of the memory, which waits for it

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured, which a question about an event would break."""
        return self._ring is not None and self._ring.is_capturing()

    def push(self, what: T, losses: torch.Tensor, sources: torch.Tensor) -> bool:
        """Put a step's losses and sources on their way; False: the device is too far behind.

        losses: `(rows,)` of any floating type, on any device; sources: `(rows,) int64`.
        """
        losses = losses.detach()
        if self._ring is None:
            self._reads.append(_Read(what, losses.to("cpu", copy=True), sources, None))
            return True
        if len(self._reads) >= NUM_SLOTS:
            return False
        rows = len(sources)
        slot = self._slot(12 * rows)
        on_host = slot[8 * rows : 12 * rows].view(torch.float32), slot[: 8 * rows].view(torch.int64)
        # Converted on the device: a copy that converts would block.
        on_host[0].copy_(losses.to(torch.float32), non_blocking=True)
        on_host[1].copy_(sources, non_blocking=True)
        event = self._ring.event(self._ring.runtime.current_stream(self._ring.location))
        self._latest[:] = [event]
        self._reads.append(_Read(what, *on_host, event))
        return True

    def arrived(self, *, wait: bool = False) -> list[Arrived[T]]:
        """Return what has arrived since, in order; with `wait`, all that is on its way."""
        found: list[Arrived[T]] = []
        while self._reads:
            what, losses, sources, event = self._reads[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._reads.popleft()
            found.append(Arrived(what, losses, sources))
        return found

    def _slot(self, num_bytes: int) -> torch.Tensor:
        """Return a slot that no copy writes to: there are as many as reads may be under way."""
        assert self._ring is not None
        num_bytes += -num_bytes % 64
        if not self._slots or len(self._slots[0]) < num_bytes:
            wait = _Wait(self._latest)
            with torch.inference_mode(mode=False):  # else it could not be written to outside of it
                memory = pinning.staging_memory(
                    NUM_SLOTS * num_bytes, self._ring.location, self._ring.runtime, wait
                )
                self._slots = list(memory.view(NUM_SLOTS, num_bytes))
        self._num_pushed += 1
        return self._slots[self._num_pushed % NUM_SLOTS]


class _Wait:
    """Waits for the last copy, before the memory that it writes to is unlocked."""

    def __init__(self, latest: list[Any]) -> None:
        self._latest = latest

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # after a device error nothing is written any more
            for event in self._latest:
                event.synchronize()
