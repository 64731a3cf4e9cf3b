"""Devices whose copies finish late and out of order, as adversary of the pipeline.

A claimed batch is filled when its copy runs, as on a GPU: a slot that is refilled before that shows as
wrong tokens.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import weakref
from collections.abc import Iterable

import torch

NEVER = 1 << 62


class DelayedTransfer:
    """One group; its copy runs when the device lets it."""

    def __init__(self, device: DelayedDevice, stored: torch.Tensor) -> None:
        self._device = device
        self._stored: torch.Tensor | None = stored
        self._tokens: torch.Tensor | None = torch.full_like(stored, torch.iinfo(stored.dtype).max)
        self._unclaimed = [self._tokens[number] for number in reversed(range(len(stored)))]
        self._lock = threading.Lock()
        device.live.update(self._unclaimed)

    def claim(self) -> torch.Tensor:
        self._device.called()
        return self._unclaimed.pop()

    def done(self) -> bool:
        self._device.called()
        return self._stored is None

    def interval(self) -> tuple[float, float] | None:
        return None

    def copy(self) -> None:
        """Read the slot, now."""
        with self._lock:
            if self._stored is not None:
                assert self._tokens is not None
                self._tokens.copy_(self._stored)
                self._stored = self._tokens = None


class DelayedDevice:
    """A clock that ticks with every call; a copy runs so many ticks after it was queued.

    Args:
        delays: ticks of the first, second... copy, over and over; different ones reorder.
        live: the batches that somebody still holds.
        threads: who called.
    """

    pin = None
    borrows = False
    copies_on_host = False

    def __init__(self, delays: Iterable[int] = (0,), *, lookahead: int = 2, group_bytes: int = 0) -> None:
        self.lookahead = lookahead
        self.group_bytes = group_bytes
        self.live: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.threads: set[int] = set()
        self.num_uploads = 0
        self._delays = itertools.cycle(delays)
        self._queued: list[tuple[int, DelayedTransfer]] = []
        self._now = 0

    def called(self) -> None:
        """The clock goes on; what is due is copied, the latest queued first."""
        self.threads.add(threading.get_ident())
        self._now += 1
        due = [transfer for at, transfer in self._queued if at <= self._now]
        self._queued = [(at, transfer) for at, transfer in self._queued if at > self._now]
        for transfer in reversed(due):
            transfer.copy()

    def pace(self) -> None:
        self.called()

    def upload(self, stored: torch.Tensor) -> DelayedTransfer:
        self.called()
        self.num_uploads += 1
        transfer = DelayedTransfer(self, stored)
        self._queued.append((self._now + next(self._delays), transfer))
        return transfer

    def drain(self) -> None:
        """Everything queued is copied, the latest first."""
        self.threads.add(threading.get_ident())
        for _, transfer in reversed(self._queued):
            transfer.copy()
        self._queued.clear()

    def seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


class EngineDevice(DelayedDevice):
    """A copy engine with a thread of its own: random delays, a random choice among what is queued."""

    def __init__(self, seed: int, most_seconds: float, **options: int) -> None:
        super().__init__(**options)
        self._draw = random.Random(seed)
        self._most_seconds = most_seconds
        self._changed = threading.Condition()
        self._copying = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="copy-engine", daemon=True)
        self._thread.start()

    def called(self) -> None:
        self.threads.add(threading.get_ident())

    def upload(self, stored: torch.Tensor) -> DelayedTransfer:
        self.called()
        transfer = DelayedTransfer(self, stored)
        with self._changed:
            self._queued.append((0, transfer))
            self._changed.notify_all()
        return transfer

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._queued and not self._copying)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queued or self._closed)
                if self._closed:
                    return
                _, transfer = self._queued.pop(self._draw.randrange(len(self._queued)))
                self._copying = True
            time.sleep(self._draw.uniform(0, self._most_seconds))
            transfer.copy()
            with self._changed:
                self._copying = False
                self._changed.notify_all()
