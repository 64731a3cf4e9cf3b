"""The thread that fills slots, and the belt on which it and the training loop hand them to one another.

The thread knows a `Belt` and never the `Pipeline`, so a pipeline that is dropped can be collected; its
finaliser then stops the thread. Every field of the belt is guarded by its condition.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from corpus_client import errors
from corpus_client.attribution import Stopwatch
from corpus_client.buffers import MAX_STEPS_PER_REQUEST, Slot
from corpus_client.replicas import Stopped
from corpus_client.schedule import Stretch
from corpus_client.trace import Tracer

JOIN_SECONDS = 15.0
"""Above the longest wait that stopping cannot interrupt, a question on the control plane."""


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
        step_stride: every how many steps one is fetched; above 1 each is a request of its own.
        slot_bytes: of tokens that a slot takes, at least one batch of the most rows.
        in_flight: slots that are begun at a time, each of which may be a request on the wire.
    """

    stretches: tuple[Stretch, ...]
    window: int
    dtype: torch.dtype
    start_step: int
    end_step: int | None
    slot_bytes: int
    in_flight: int
    step_stride: int = 1

    def pieces(self, most_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(first step, number of steps, rows) of pieces of tokens, in order; none is of two stretches.

        The first ones have 1, 2, 4... steps, so that the first batch comes after one small answer.
        """
        step, count = self.start_step, 1
        for stretch in self.stretches:
            batch_bytes = stretch.num_rows * self.window * self.dtype.itemsize
            most = min(most_bytes // batch_bytes, MAX_STEPS_PER_REQUEST)
            if self.step_stride > 1:
                most = 1
            stops = [stop for stop in (stretch.stop_step, self.end_step) if stop is not None]
            stop = min(stops) if stops else None
            while stop is None or step < stop:
                num_steps = min(count, most)
                if stop is not None:
                    num_steps = min(num_steps, stop - step)
                yield step, num_steps, stretch.num_rows
                step += max(num_steps, self.step_stride)
                count = min(2 * count, MAX_STEPS_PER_REQUEST)


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot with consecutive steps at its start."""

    slot: Slot
    start_step: int
    num_steps: int
    num_rows: int


class Belt:
    """What the fetcher thread and the training loop share."""

    def __init__(self, slots: Sequence[Slot], filler: Filler, stopwatch: Stopwatch) -> None:
        self.filler = filler
        self.stopwatch = stopwatch
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._free = list(slots)
        self._ready: deque[Filled] = deque()
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None

    @property
    def num_ready(self) -> int:
        """Filled slots that wait."""
        return len(self._ready)

    def take_free(self, *, wait: bool) -> Slot | None:
        """A slot that nothing reads any more; the one used last, as the cache may still hold it."""
        with self._changed:
            while not self._stopped:
                if self._free:
                    return self._free.pop()
                if not wait:
                    return None
                self.stopwatch.enter("idle")
                self._changed.wait()
        raise Stopped

    def put_free(self, slot: Slot) -> None:
        """Give a slot back that nothing reads any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def put_ready(self, filled: Filled) -> None:
        """Hand a filled slot to the training loop."""
        with self._changed:
            self._ready.append(filled)
            self._changed.notify_all()

    def take_ready(self) -> Filled | None:
        """The next filled slot, if there is one."""
        with self._changed:
            return self._ready.popleft() if self._ready else None

    def await_ready(self, timeout: float | None) -> bool:
        """Wait for a filled slot, or the end; whether it came within `timeout` seconds (None: for ever)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready) or self._ended or self._stopped, timeout)

    def check_end(self) -> None:
        """Nothing will become ready any more: return if the run is over.

        The thread's error is raised here, once.
        """
        with self._changed:
            if self._error is not None:
                # Kept here, its traceback would keep the caller's frames alive.
                error, self._error, self._stopped = self._error, None, True
                try:
                    raise error
                finally:
                    del error
            if self._stopped:
                raise errors.LoaderClosed("the loader was closed while a batch was awaited")

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


def fetch(belt: Belt, span: Span, tracer: Tracer) -> None:
    """The fetcher thread: keeps `in_flight` requests on the wire and fills slots in order."""
    on_wire: deque[tuple[Any, Filled]] = deque()

    def receive_oldest() -> None:
        ticket, filled = on_wire.popleft()
        with tracer.fetch(filled.start_step, filled.num_steps):
            belt.filler.finish(ticket, filled.slot.view)
        belt.put_ready(filled)

    try:
        for start_step, num_steps, num_rows in span.pieces(span.slot_bytes):
            # Never sleep on a full ring with answers on the wire: the server would see a stalled reader.
            while (slot := belt.take_free(wait=not on_wire)) is None:
                receive_oldest()
            ticket = belt.filler.begin(start_step, num_steps, num_rows)
            on_wire.append((ticket, Filled(slot, start_step, num_steps, num_rows)))
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
        belt.stopwatch.enter("idle")
        belt.filler.close()
