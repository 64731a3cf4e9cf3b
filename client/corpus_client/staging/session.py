"""A loader's use of its device: by the training loop's thread alone, with a mailbox for every other thread.

    training loop's thread          any other thread
    start, measure, end, release    stop       the fetcher ends; the loop's next call releases the rest
                                    figures    as the loop's thread left them

A second thread that called the device would break a CUDA graph which the loop captures, and could unlock
slots under a copy that the loop has just queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from corpus_client.staging import pinning
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.slots import BUDGET, Slot, SlotSizes, cut_slots
from corpus_client.staging.stager import Stager


class DeviceSession:
    """Slots, the pipeline that fills and empties them, and the stager that copies from them.

    stager: of the loader; nothing else may call it.
    pipeline: the present one; None between two.
    stopped: whether some thread called `stop`.
    """

    def __init__(self, stager: Stager) -> None:
        self.stager = stager
        self.pipeline: Pipeline | None = None
        self.stopped = False
        self._memory: torch.Tensor | None = None
        self._pinned_bytes = 0

    def stop(self) -> None:
        """End the fetcher, and a wait of the training loop with `LoaderClosed`; from any thread, for good."""
        self.stopped = True
        if (pipeline := self.pipeline) is not None:
            pipeline.stop()

    def figures(self) -> dict[str, Any]:
        """Return the fields of `LoaderStats` that are about slots and copies; from any thread."""
        pipeline, memory, stager = self.pipeline, self._memory, self.stager
        return {
            "ready_slots": 0 if pipeline is None else pipeline.num_ready,
            "slot_bytes": 0 if memory is None else memory.nbytes,
            "pinned_bytes": 0 if memory is None else self._pinned_bytes,
            "device_bytes": stager.num_bytes,
            "transfer_seconds": stager.copy_seconds,
            "stall_seconds": stager.stall_seconds,
        }

    def measure(self) -> None:
        """Bring the figures up to date that only the device knows."""
        self.stager.measure()

    def start(self, sizes: SlotSizes, make: Callable[[Sequence[Slot]], Pipeline]) -> Pipeline:
        """Begin a pipeline over slots of these sizes; those of the last one are used again if they fit."""
        if self._memory is None or self._memory.nbytes != sizes.num_bytes:
            self._unlock()  # they go before new ones come
            self._memory = memory = self.stager.host_memory(sizes.num_bytes)
            self._pinned_bytes = pinning.pinned_bytes(memory) if self.stager.is_pinned(memory) else 0
            BUDGET.take(self, max(memory.nbytes, self._pinned_bytes))
        self.pipeline = pipeline = make(cut_slots(self._memory, sizes))
        if self.stopped:  # meanwhile, by a thread that saw no pipeline
            pipeline.stop()
        return pipeline

    def end(self) -> None:
        """End the pipeline, and wait until no slot is read; the slots are kept for the next one."""
        if self.pipeline is None:
            return
        is_over = self.pipeline.close()
        self.pipeline = None
        if not is_over:  # its thread still writes to a slot
            self._unlock()

    def release(self) -> None:
        """End the pipeline, and give back slots and staging buffers; idempotent."""
        self.end()
        self._unlock()
        self.stager.close()
        BUDGET.take(self, 0)

    def _unlock(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            pinning.unlock(memory)
