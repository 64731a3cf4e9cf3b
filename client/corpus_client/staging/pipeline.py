"""Bring batches to the training loop: one thread fills slots, the loop uploads and reads them.

    free --> fetcher thread fills --> ready --> uploaded in groups of batches --> in use --> free
                                                                      (when no group is read from it)

The device is the training loop's: only its thread uploads, reads, asks whether a copy is done, and closes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from corpus_client.observe.recorder import Recorder
from corpus_client.staging.fetcher import FetchRange, FilledSlot, SlotQueues, Source, fetch
from corpus_client.staging.slots import Slot
from corpus_client.staging.stager import Group, Stager, Stored, T

TRANSFER_POLL_SECONDS = 0.001
"""Only while nothing is ready and slots are being copied; a copy takes a fraction of this."""


class Pipeline:
    """Yield batches in order, on the device; used by one thread.

    `close` is idempotent; dropping the pipeline, or ending the interpreter, ends its thread too.
    """

    def __init__(
        self,
        source: Source,
        slots: Sequence[Slot],
        stager: Stager,
        steps: FetchRange,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder = recorder or Recorder()
        self._stager = stager
        self._steps = steps
        stager.prepare(steps.batch_bytes)
        # One slot must stay with the fetcher: if all are uploaded ahead, it is idle during the step.
        self._max_uploaded = max(1, min(stager.num_buffers, len(slots) - 1))
        self._uploaded: deque[Group] = deque()  # groups with batches that are not read yet
        self._uploading: FilledSlot | None = None
        self.waiting = False  # whether the training loop stands still here
        self._in_use: deque[FilledSlot] = deque()  # slots whose batches are uploaded, or being uploaded
        self.queues = SlotQueues(slots, source, recorder)
        self.queues.thread = threading.Thread(
            target=fetch, args=(self.queues, steps), name="corpus-fetcher", daemon=True
        )
        self._closer = weakref.finalize(self, self.queues.stop)
        self.queues.thread.start()

    @property
    def num_ready(self) -> int:
        """How many filled slots hold batches that were not read yet; from any thread."""
        held = [*self._in_use, self._uploading]
        unread = [each for each in held if each and each.has_unread]
        return self.queues.num_ready + len(unread)

    def take(self, use: Callable[[Stored], T]) -> tuple[int, T]:
        """Return (step, what `use` makes of its batch); raise `StopIteration` after the last step."""
        self._recorder.ask()
        step = None
        try:
            if len(self._uploaded) < self._max_uploaded:  # once per group
                self._reclaim()
                if not self._uploaded and not self._upload_next(wait=True):
                    raise StopIteration
                while len(self._uploaded) < self._max_uploaded and self._upload_next(wait=False):
                    pass
            group = self._uploaded[0]
            made = group.read_next(use)
            step, group.next_step = group.next_step, group.next_step + 1
            if not group.unread:
                self._uploaded.popleft()
            return step, made
        finally:
            self._recorder.get(step)

    def stop(self) -> None:
        """Stop the fetcher, also while it waits for the network, and a wait of `take`; from any thread.

        Waits a bounded time for the fetcher's end.
        """
        self._closer()

    def close(self) -> bool:
        """Stop the fetcher, and wait until the device has read what it was to copy.

        Returns whether nothing writes or reads the slots any more.
        """
        self.stop()
        if os.getpid() != self.queues.pid:
            return False
        self._stager.drain()
        for group in self._uploaded:
            group.unread.clear()  # a trace may keep the group, and need not keep its memory
        return not (self.queues.thread and self.queues.thread.is_alive())

    def _reclaim(self) -> None:
        """Give the fetcher every slot that nothing is read from, in whichever order they become free."""
        for _ in range(len(self._in_use)):
            filled = self._in_use.popleft()
            if all(group.done() for group in filled.groups):
                self.queues.put_free(filled.slot)
            else:
                self._in_use.append(filled)

    def _upload_next(self, *, wait: bool) -> bool:
        """Put the next group on its way; False: none is ready, or with `wait`, the run is over."""
        if self._uploading is None:
            self._uploading = self.queues.take_ready() or (self._await_filled() if wait else None)
        if self._uploading is None:
            return False
        self._upload(self._uploading)
        if self._uploading.num_uploaded == self._uploading.num_steps:
            self._in_use.append(self._uploading)
            self._uploading = None
        return True

    def _await_filled(self) -> FilledSlot | None:
        self.waiting = True
        try:
            with self._recorder.waiting():
                # The fetcher may itself wait for a slot, and only this thread sees that a copy is done.
                while not self.queues.await_ready(TRANSFER_POLL_SECONDS if self._in_use else None):
                    self._reclaim()
        finally:
            self.waiting = False
        filled = self.queues.take_ready()
        if filled is None:
            self.queues.check_end()
        return filled

    def _upload(self, filled: FilledSlot) -> None:
        first = filled.num_uploaded
        shape, steps = filled.shape, self._steps
        count = min(filled.num_steps - first, max(1, self._stager.group_bytes // steps.bytes_of(shape)))
        stored = filled.slot.batches(first, count, shape, steps.dtype)
        beside = filled.slot.beside(steps.beside, first, count, filled.num_steps, shape, steps.dtype)
        with self._recorder.uploading():
            group = self._stager.upload(stored, beside)
        group.next_step = filled.start_step + first
        self._recorder.uploaded(group.next_step, count, group)
        self._uploaded.append(group)
        filled.groups.append(group)
        filled.num_uploaded += count
