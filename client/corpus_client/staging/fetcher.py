"""The thread that fills slots, and the queues in which it and the training loop hand slots to one another.

The thread knows the `SlotQueues` and never the `Pipeline`, so a pipeline that is dropped can be collected;
its finaliser then stops the thread. Every field of the queues is guarded by their condition.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from corpus_client import errors
from corpus_client.network.control import BoundPlan
from corpus_client.network.layout import Beside, batch_bytes
from corpus_client.network.pool import Stopped
from corpus_client.observe.recorder import Recorder
from corpus_client.plan.schedule import MAX_STEPS_PER_REQUEST, Piece, StepRange, pieces
from corpus_client.staging.slots import Slot
from corpus_client.staging.stager import Group

JOIN_SECONDS = 15.0
"""Seconds; longer than the longest wait that stopping cannot interrupt, a request on the control plane."""


class Source(Protocol):
    """Where tokens come from: fills slots with consecutive steps.

    `stop` and `follow` are called from any thread, everything else from the fetcher.
    """

    def begin(self, start_step: int, num_steps: int, shape: tuple[int, int]) -> Any:
        """Ask for these steps without waiting for them; the ticket goes to `finish`.

        shape: of each batch, rows and tokens of a row.
        """

    def finish(self, ticket: Any, view: memoryview) -> None:
        """Put the tokens of the steps at the start of `view`, and what is beside them behind that."""

    def follow(self, plan: BoundPlan) -> bool:
        """Ask by a plan that continues the one so far, from now on; False: a new source has to do that."""

    def stop(self) -> None:
        """Wake whoever waits in `begin` or `finish` with `Stopped`."""

    def close(self) -> None:
        """Release connections and files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchRange:
    """Which steps are fetched, and how."""

    step_ranges: tuple[StepRange, ...]  # the last one ends with the plan
    dtype: torch.dtype
    in_flight: int  # slots that are begun at a time, each of which may be a request on the wire
    step_stride: int = 1  # every how many steps one is fetched; above 1 each is a request of its own
    start_step: int = 0
    end_step: int | None = None
    slot_bytes: int = 0  # that a slot takes; one batch is taken whatever its size
    beside: tuple[Beside, ...] = ()  # the arrays that come with the tokens

    @property
    def batch_bytes(self) -> int:
        """Bytes of the largest batch, as stored."""
        return max(self.bytes_of(each.shape) for each in self.step_ranges)

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """Return the bytes of a batch, as stored, with what is beside its tokens."""
        return batch_bytes(self.beside, shape, self.dtype.itemsize)

    def pieces(self, max_bytes: int, most_steps: int = MAX_STEPS_PER_REQUEST) -> Iterator[Piece]:
        """Return what is fetched at a time, as `schedule.pieces` does."""
        return pieces(
            self.step_ranges,
            self.start_step,
            self.end_step,
            max_bytes=max_bytes,
            batch_bytes=self.bytes_of,
            step_stride=self.step_stride,
            most_steps=most_steps,
        )


@dataclass(slots=True)
class FilledSlot:
    """A slot with consecutive steps at its start, and the groups of `num_uploaded` of its batches."""

    slot: Slot
    start_step: int
    num_steps: int
    shape: tuple[int, int]  # of a batch
    groups: list[Group] = field(default_factory=list)
    num_uploaded: int = 0

    @property
    def has_unread(self) -> bool:
        """Whether the training loop has not read all of its batches."""
        return self.num_uploaded < self.num_steps or any(group.unread for group in self.groups)


class SlotQueues:
    """What the fetcher thread and the training loop share."""

    def __init__(self, slots: Sequence[Slot], source: Source, recorder: Recorder) -> None:
        self.source = source
        self.recorder = recorder
        self.pid = os.getpid()
        self.thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._free = list(slots)
        self._ready: deque[FilledSlot] = deque()
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None
        self._asked_until = 0  # the step behind the last one that was asked for

    @property
    def asked_until(self) -> int:
        """The first step, from which on none was asked for."""
        return self._asked_until

    def begin(self, start_step: int, num_steps: int, shape: tuple[int, int]) -> Any:
        """Ask for steps, see `Source.begin`."""
        with self._changed:
            self._asked_until = start_step + num_steps
        return self.source.begin(start_step, num_steps, shape)

    def follow(self, plan: BoundPlan, since: int) -> bool:
        """Ask by a plan that continues the one so far at a step; False: that step was asked for already."""
        with self._changed:
            return since >= self._asked_until and self.source.follow(plan)

    @property
    def num_ready(self) -> int:
        """How many filled slots wait."""
        return len(self._ready)

    def take_free(self, *, wait: bool) -> Slot | None:
        """Return a slot that nothing reads; the one freed last, as the CPU's cache may still hold it."""
        with self._changed:
            while not self._stopped:
                if self._free:
                    return self._free.pop()
                if not wait:
                    return None
                self.recorder.enter("idle")
                self._changed.wait()
        raise Stopped

    def put_free(self, slot: Slot) -> None:
        """Give a slot back that nothing reads any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def put_ready(self, filled: FilledSlot) -> None:
        """Hand a filled slot to the training loop."""
        with self._changed:
            self._ready.append(filled)
            self._changed.notify_all()

    def take_ready(self) -> FilledSlot | None:
        """Return the next filled slot, if there is one."""
        with self._changed:
            return self._ready.popleft() if self._ready else None

    def await_ready(self, timeout: float | None) -> bool:
        """Wait for a filled slot or the end; return whether it came in `timeout` seconds (None: no limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._ready) or self._ended or self._stopped, timeout)

    def check_end(self) -> None:
        """Return if the run is over, since nothing will become ready any more; else raise why, once."""
        with self._changed:
            if self._error is not None:
                # Kept here, its traceback would keep the caller's frames alive.
                error, self._error, self._stopped = self._error, None, True
                try:
                    if isinstance(error, errors.CorpusClientError):
                        raise error
                    raise errors.FetchFailed(
                        f"fetching ended by an error that is not the client's own: {type(error).__name__}: "
                        f"{error}; asking for a batch starts over from the same step"
                    ) from error
                finally:
                    del error
            if self._stopped:
                raise errors.LoaderClosed("the loader was closed while a batch was awaited")

    def end(self, error: BaseException | None = None) -> None:
        """Note that nothing more will become ready."""
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
        self.source.stop()
        # One that an interrupt kept from being started cannot be joined.
        thread = self.thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(JOIN_SECONDS)


def fetch(queues: SlotQueues, steps: FetchRange) -> None:
    """Run the fetcher thread: keep `in_flight` requests on the wire and fill slots in order."""
    on_wire: deque[tuple[Any, FilledSlot]] = deque()

    def receive_oldest() -> None:
        ticket, filled = on_wire.popleft()
        with queues.recorder.fetching(filled.start_step, filled.num_steps):
            queues.source.finish(ticket, filled.slot.view)
        queues.put_ready(filled)

    try:
        for start_step, num_steps, shape in steps.pieces(steps.slot_bytes):
            # Never sleep on a full ring with responses on the wire: the server would see a stalled reader.
            while (slot := queues.take_free(wait=not on_wire)) is None:
                receive_oldest()
            ticket = queues.begin(start_step, num_steps, shape)
            on_wire.append((ticket, FilledSlot(slot, start_step, num_steps, shape)))
            if len(on_wire) >= steps.in_flight:
                receive_oldest()
        while on_wire:
            receive_oldest()
        queues.end()
    except Stopped:
        queues.end()
    except BaseException as error:  # noqa: BLE001 - it is raised again in the training loop
        queues.end(error)
    finally:
        queues.recorder.enter("idle")
        queues.source.close()
