"""Slots on their way round: one thread fills them, the training loop empties them.

    free --> fetcher thread fills --> ready --> uploaded in groups of batches --> leased --> free
                                                                    (when every transfer is done)

The device is the training loop's: only its thread uploads, claims, and asks whether a transfer is done.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from corpus_client.attribution import Meter
from corpus_client.buffers import Slot
from corpus_client.device import Device
from corpus_client.fetcher import Belt, Filled, Filler, Span, fetch
from corpus_client.groups import Transfer

TRANSFER_POLL_SECONDS = 0.001
"""Only while nothing is ready and slots are being copied; a copy takes a fraction of this."""


@dataclass(slots=True)
class _Emptying:
    """A slot whose batches are being put on their way.

    Args:
        num_uploaded: of its batches.
    """

    filled: Filled
    transfers: list[Transfer]
    num_uploaded: int = 0

    def is_free(self) -> bool:
        """Whether every copy out of the slot is done; never blocks."""
        return all(transfer.done() for transfer in self.transfers)


class Pipeline:
    """Batches in order, on the device; used by one thread.

    `close` is idempotent; dropping the pipeline, or ending the interpreter, closes it too.
    """

    def __init__(
        self, filler: Filler, slots: Sequence[Slot], device: Device, span: Span, meter: Meter | None = None
    ) -> None:
        self._meter = meter = meter if meter is not None else Meter()
        self._device = device
        self._span = span
        # With two slots one must stay with the fetcher: uploading both ahead would leave it idle.
        self._lookahead = min(device.lookahead, len(slots) - 2)
        self._uploaded: deque[tuple[int, Transfer]] = deque()
        self._current: _Emptying | None = None
        self._borrowed: _Emptying | None = None
        self._leased: deque[_Emptying] = deque()
        self._belt = Belt(slots, filler, meter.fetcher)
        self._belt.thread = threading.Thread(
            target=fetch, args=(self._belt, span, meter.tracer), name="corpus-fetcher", daemon=True
        )
        self._closer = weakref.finalize(self, self._belt.stop)
        self._belt.thread.start()

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[int, torch.Tensor]:
        """(step, tokens): `(rows, seq_len + 1)` on the device, ordered behind the current stream."""
        self._meter.ask()
        step = None
        try:
            if self._borrowed is not None and not self._uploaded:
                self._belt.put_free(self._borrowed.filled.slot)
                self._borrowed = None
            self._reclaim()
            if not self._uploaded and not self._upload_next(wait=True):
                raise StopIteration
            while len(self._uploaded) <= self._lookahead and self._upload_next(wait=False):
                pass
            step, transfer = self._uploaded.popleft()
            return step, transfer.claim()
        finally:
            self._meter.get(step)

    @property
    def num_ready(self) -> int:
        """Filled slots that wait."""
        return self._belt.num_ready

    def close(self) -> bool:
        """Stop the thread, also while it waits for the network; wait a bounded time for its end.

        Returns:
            Whether nothing writes or reads the slots any more.
        """
        self._closer()
        if os.getpid() != self._belt.pid:
            return False
        self._device.drain()
        return not (self._belt.thread and self._belt.thread.is_alive())

    def _reclaim(self) -> None:
        """Give the fetcher every slot whose copies are done, in whichever order they are."""
        for _ in range(len(self._leased)):
            emptied = self._leased.popleft()
            if emptied.is_free():
                self._belt.put_free(emptied.filled.slot)
            else:
                self._leased.append(emptied)

    def _upload_next(self, *, wait: bool) -> bool:
        """Put the next group on its way; False: none is ready, or with `wait`, the run is over."""
        if self._current is None:
            filled = self._belt.take_ready()
            if filled is None and wait:
                filled = self._await_filled()
            if filled is None:
                return False
            self._current = _Emptying(filled, [])
        self._upload(self._current)
        if self._current.num_uploaded == self._current.filled.num_steps:
            if self._device.borrows:
                self._borrowed = self._current
            else:
                self._leased.append(self._current)
            self._current = None
        return True

    def _await_filled(self) -> Filled | None:
        before = self._meter.fetcher.reading()
        try:
            # The fetcher may itself wait for a slot, and only this thread sees that a copy is done.
            while not self._belt.await_ready(TRANSFER_POLL_SECONDS if self._leased else None):
                self._reclaim()
        finally:
            self._meter.waited(before)
        filled = self._belt.take_ready()
        if filled is None:
            self._belt.check_end()
        return filled

    def _upload(self, emptying: _Emptying) -> None:
        filled, first = emptying.filled, emptying.num_uploaded
        shape = (filled.num_rows, self._span.window)
        batch_bytes = shape[0] * shape[1] * self._span.dtype.itemsize
        count = min(filled.num_steps - first, max(1, self._device.group_bytes // batch_bytes))
        stored = filled.slot.batches(first, count, shape, self._span.dtype)
        started = time.perf_counter()
        with self._meter.tracer.range("transfer"):
            transfer = self._device.upload(stored)
        self._meter.uploaded(time.perf_counter() - started)
        step = filled.start_step + first
        self._meter.tracer.transfer(step, count, transfer)
        self._uploaded.extend((step + number, transfer) for number in range(count))
        emptying.transfers.append(transfer)
        emptying.num_uploaded += count
