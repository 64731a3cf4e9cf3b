"""Read small tensors back from a device without waiting for it: a ring of page-locked slots, and events.

    training loop's stream    step 6 | losses 6 -> slot k | record event k | step 7 | losses 7 -> slot k+1 ...

The host looks at the events now and then, so a step's values are on the host some steps later. In host memory
they are there at once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Generic, TypeVar

import torch

from corpus_client import errors
from corpus_client.staging import pinning
from corpus_client.staging.ring import DeviceRing
from corpus_client.staging.stager import Stager

NUM_SLOTS = 256  # steps that the device may be behind: a replayed CUDA graph runs behind by hundreds

T = TypeVar("T")


class ReadBack(Generic[T]):
    """Losses and sources of rows on their way from a device; used by one thread.

    Without a device that has streams, `push` copies the losses at once, and keeps the sources as they are.
    """

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._ring = stager if isinstance(stager, DeviceRing) else None
        self._reads: deque[tuple[T, torch.Tensor, torch.Tensor, Any]] = deque()
        self._rows = 0  # of each slot
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_pushed = 0
        self._latest: list[Any] = []  # the event of the last copy; no view of the memory, which waits for it

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured, which a question about an event would break."""
        return self._ring is not None and self._ring.is_capturing()

    def push(self, what: T, losses: torch.Tensor, sources: torch.Tensor, rows: int) -> bool:
        """Put a step's losses and sources on their way; False: the device is too far behind.

        losses: `(rows,)` of any floating type, on any device; sources: `(rows,) int64`.
        """
        ring = self._ring
        if ring is not None and ring.is_capturing():
            raise errors.InvalidArgument(
                "losses were recorded while a CUDA graph is being captured; record them after each replay"
            )
        if len(self._reads) >= NUM_SLOTS:
            return False
        if rows > self._rows:
            self._make_slots(rows)
        into, sources_into = self._slots[self._num_pushed % NUM_SLOTS]
        if rows < self._rows:
            into, sources_into = into[:rows], sources_into[:rows]
        losses, event = losses.detach(), None
        if ring is None:
            into.copy_(losses)  # not to a new tensor, which takes half as long again
        else:
            # Converted on the device: a copy that converts would block.
            into.copy_(losses.to(torch.float32), non_blocking=True)
            sources = sources_into.copy_(sources, non_blocking=True)
            event = ring.event(ring.runtime.current_stream(ring.location))
            self._latest[:] = [event]
        self._num_pushed += 1
        self._reads.append((what, into, sources, event))
        return True

    def arrived(self, *, wait: bool = False) -> list[tuple[T, torch.Tensor, torch.Tensor]]:
        """Return what has arrived since, in order; with `wait`, all that is on its way.

        Copy the losses and sources before the next `push`, which may write to their memory.
        """
        found = []
        while self._reads:
            what, losses, sources, event = self._reads[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
            self._reads.popleft()
            found.append((what, losses, sources))
        return found

    def _make_slots(self, rows: int) -> None:
        """Make as many slots as reads may be under way; reads into smaller ones keep those alive."""
        self._latest = []
        place = self._stager.location, self._ring and self._ring.runtime, _Wait(self._latest)
        with torch.inference_mode(mode=False):  # else they could not be written to outside of it
            memory = pinning.staging_memory(12 * NUM_SLOTS * rows, *place)
            after_sources = 2 * len(memory) // 3
            parts = memory[after_sources:].view(torch.float32), memory[:after_sources].view(torch.int64)
            self._slots = list(zip(*(part.view(NUM_SLOTS, -1).unbind() for part in parts), strict=True))
        self._rows = rows


class _Wait:
    """Waits for the last copy, before the memory that it writes to is unlocked."""

    def __init__(self, latest: list[Any]) -> None:
        self._latest = latest

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # after a device error nothing is written any more
            for event in self._latest:
                event.synchronize()
