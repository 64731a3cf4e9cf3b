"""Slots on their way round: one thread fills them, the training loop empties them.

    free --> fetcher thread fills --> ready --> uploaded batch by batch --> leased --> free
                                                                    (when every transfer is done)

The thread knows a `_Belt` and never the `Pipeline`, so a pipeline that is dropped can be collected;
its finaliser then stops the thread. Every field of the belt is guarded by its condition.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from corpus_client import errors
from corpus_client.buffers import MAX_STEPS_PER_REQUEST, Slot
from corpus_client.device import Device, Transfer
from corpus_client.replicas import Stopped
from corpus_client.schedule import Stretch

JOIN_SECONDS = 15.0
"""Above the longest wait that stopping cannot interrupt, a question on the control plane."""

TRANSFER_POLL_SECONDS = 0.001
"""Only while every slot is full or being copied; a copy takes a fraction of this."""


class Filler(Protocol):
    """Fills slots with consecutive steps; `stop` comes from any thread, the rest from the fetcher."""

    def begin(self, start_step: int, num_steps: int, num_rows: int) -> Any:
        """Ask for these steps of `num_rows` rows without waiting for them; the ticket goes to `finish`."""

    def finish(self, ticket: Any, view: memoryview) -> None:
        """Put the tokens of the steps at the start of `view`."""

    def stop(self) -> None:
        """Wake whoever waits in `begin` or `finish` with `Stopped`."""

    def close(self) -> None:
        """Release connections and files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What is fetched, and how.

    Args:
        stretches: how many rows a batch has from which step on; the last one has no end.
        window: tokens of a row, seq_len + 1.
        dtype: of the tokens as stored.
        end_step: where to stop; None: never.
        request_bytes: bound of one answer, at least one batch of the most rows; the first requests ask
            for 1, 2, 4... steps so that the first batch comes after one small answer.
        in_flight: requests on the wire at a time.
    """

    stretches: tuple[Stretch, ...]
    window: int
    dtype: torch.dtype
    start_step: int
    end_step: int | None
    request_bytes: int
    in_flight: int

    def requests(self) -> Iterator[tuple[int, int, int]]:
        """(first step, number of steps, rows) of each request, in order; none has steps of two stretches."""
        step, count = self.start_step, 1
        for stretch in self.stretches:
            batch_bytes = stretch.num_rows * self.window * self.dtype.itemsize
            most = min(self.request_bytes // batch_bytes, MAX_STEPS_PER_REQUEST)
            stops = [stop for stop in (stretch.stop_step, self.end_step) if stop is not None]
            stop = min(stops) if stops else None
            while stop is None or step < stop:
                num_steps = min(count, most)
                if stop is not None:
                    num_steps = min(num_steps, stop - step)
                yield step, num_steps, stretch.num_rows
                step += num_steps
                count = min(2 * count, MAX_STEPS_PER_REQUEST)


@dataclass(frozen=True, slots=True)
class _Filled:
    slot: Slot
    start_step: int
    num_steps: int
    num_rows: int


class _Belt:
    """What the fetcher thread and the training loop share."""

    def __init__(self, slots: Sequence[Slot], filler: Filler) -> None:
        self.filler = filler
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._free = list(slots)
        self._leased: deque[tuple[Slot, list[Transfer]]] = deque()
        self._ready: deque[_Filled] = deque()
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None

    def take_free(self, *, wait: bool) -> Slot | None:
        """A slot that nothing reads any more; the one used last, as the cache may still hold it."""
        with self._changed:
            while not self._stopped:
                for _ in range(len(self._leased)):
                    slot, transfers = self._leased.popleft()
                    if all(transfer.done() for transfer in transfers):
                        self._free.append(slot)
                    else:
                        self._leased.append((slot, transfers))
                if self._free:
                    return self._free.pop()
                if not wait:
                    return None
                self._changed.wait(TRANSFER_POLL_SECONDS if self._leased else None)
            raise Stopped

    def lease(self, slot: Slot, transfers: list[Transfer]) -> None:
        """Give a slot back whose batches are being copied."""
        with self._changed:
            self._leased.append((slot, transfers))
            self._changed.notify_all()

    def put_ready(self, filled: _Filled) -> None:
        """Hand a filled slot to the training loop."""
        with self._changed:
            self._ready.append(filled)
            self._changed.notify_all()

    def take_ready(self, *, wait: bool) -> _Filled | None:
        """The next filled slot; None at the end of the run, or without `wait` if there is none yet.

        The thread's error is raised here, once, after all that was filled before it.
        """
        with self._changed:
            while not self._ready:
                if self._error is not None and wait:
                    # Kept here, its traceback would keep the caller's frames alive.
                    error, self._error, self._stopped = self._error, None, True
                    try:
                        raise error
                    finally:
                        del error
                if self._stopped and wait:
                    raise errors.LoaderClosed("the loader was closed while a batch was awaited")
                if self._ended or not wait:
                    return None
                self._changed.wait()
            return self._ready.popleft()

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more will become ready."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread, wherever it waits; idempotent, from any thread."""
        if os.getpid() != self.pid:
            return  # a forked child: thread and sockets are the parent's
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.filler.stop()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(JOIN_SECONDS)


def _fetch(belt: _Belt, span: Span) -> None:
    """The fetcher thread: keeps `in_flight` requests on the wire and fills slots in order."""
    on_wire: deque[tuple[Any, _Filled]] = deque()

    def receive_oldest() -> None:
        ticket, filled = on_wire.popleft()
        belt.filler.finish(ticket, filled.slot.view)
        belt.put_ready(filled)

    try:
        for start_step, num_steps, num_rows in span.requests():
            # Never sleep on a full ring with answers on the wire: the server would see a stalled reader.
            while (slot := belt.take_free(wait=not on_wire)) is None:
                receive_oldest()
            ticket = belt.filler.begin(start_step, num_steps, num_rows)
            on_wire.append((ticket, _Filled(slot, start_step, num_steps, num_rows)))
            if len(on_wire) >= span.in_flight:
                receive_oldest()
        while on_wire:
            receive_oldest()
        belt.end()
    except Stopped:
        belt.end()
    except BaseException as error:  # noqa: BLE001 - it is raised again in the training loop
        belt.end(error)
    finally:
        belt.filler.close()


class Pipeline:
    """Batches in order, on the device; used by one thread.

    `close` is idempotent; dropping the pipeline, or ending the interpreter, closes it too.
    """

    def __init__(self, filler: Filler, slots: Sequence[Slot], device: Device, span: Span) -> None:
        self.wait_seconds = 0.0
        self._device = device
        self._span = span
        self._uploaded: deque[tuple[int, Transfer]] = deque()
        self._current: tuple[_Filled, list[Transfer]] | None = None
        self._borrowed: tuple[Slot, list[Transfer]] | None = None
        self._belt = _Belt(slots, filler)
        self._belt.thread = threading.Thread(
            target=_fetch, args=(self._belt, span), name="corpus-fetcher", daemon=True
        )
        self._closer = weakref.finalize(self, self._belt.stop)
        self._belt.thread.start()

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[int, torch.Tensor]:
        """(step, tokens): `(rows, seq_len + 1)` on the device, ordered behind the current stream."""
        if self._borrowed is not None:
            self._belt.lease(*self._borrowed)
            self._borrowed = None
        if not self._uploaded and not self._upload_next(wait=True):
            raise StopIteration
        while len(self._uploaded) <= self._device.lookahead and self._upload_next(wait=False):
            pass
        step, transfer = self._uploaded.popleft()
        return step, transfer.claim()

    def close(self) -> None:
        """Stop the thread, also while it waits for the network; wait a bounded time for its end."""
        self._closer()

    def _upload_next(self, *, wait: bool) -> bool:
        if self._current is None:
            waiting_since = time.perf_counter()
            filled = self._belt.take_ready(wait=wait)
            self.wait_seconds += time.perf_counter() - waiting_since
            if filled is None:
                return False
            self._current = (filled, [])
        filled, transfers = self._current
        shape = (filled.num_rows, self._span.window)
        stored = filled.slot.batch(len(transfers), shape, self._span.dtype)
        transfer = self._device.upload(stored)
        self._uploaded.append((filled.start_step + len(transfers), transfer))
        transfers.append(transfer)
        if len(transfers) == filled.num_steps:
            self._current = None
            if self._device.borrows:
                self._borrowed = (filled.slot, transfers)
            else:
                self._belt.lease(filled.slot, transfers)
        return True
