"""A pipeline over a filler that counts: every token of step n is n."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch

from corpus_client import Batch, errors
from corpus_client.network.pool import Stopped
from corpus_client.plan.schedule import StepRange
from corpus_client.staging.fetcher import FetchRange
from corpus_client.staging.pinning import pageable
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.slots import Slot, SlotSizes, cut_slots

BATCH_BYTES = 24


CPU = torch.device("cpu")


STEPS = FetchRange(
    step_ranges=(StepRange(start_step=0, stop_step=None, shape=(2, 3)),),
    dtype=torch.int32,
    start_step=5,
    end_step=None,
    slot_bytes=4 * BATCH_BYTES,
    in_flight=2,
)


def batches_of(pipeline: Pipeline, dtype: torch.dtype | None = torch.int64) -> Iterator[Batch]:
    """To the end."""
    make = partial(pipeline._stager.make, dtype)
    with contextlib.suppress(StopIteration):
        while True:
            step, views = pipeline.take(make)
            yield Batch(views, step)


class CountingSource:
    """Fills every token of step n with n; checks that it is closed, and used by one thread."""

    def __init__(self, fail_at: int | None = None, block_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.block_at = block_at
        self.shapes: dict[int, tuple[int, int]] = {}
        self.closed = threading.Event()
        self.stopped = threading.Event()

    def begin(self, start_step: int, num_steps: int, shape: tuple[int, int]) -> range:
        self.shapes[start_step] = shape
        return range(start_step, start_step + num_steps)

    def finish(self, ticket: range, view: memoryview) -> None:
        if self.block_at in ticket:
            self.stopped.wait()
            raise Stopped
        if self.fail_at in ticket:
            raise errors.ServerError("the filler failed here", status=422)
        size = math.prod(self.shapes.pop(ticket.start))
        tokens = torch.frombuffer(view, dtype=torch.int32)[: size * len(ticket)].view(len(ticket), size)
        tokens[:] = torch.tensor(ticket)[:, None]

    def follow(self, plan: object) -> bool:
        return False

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed.set()


def new_slots(size: SlotSizes) -> tuple[Slot, ...]:
    """Slots in pageable memory."""
    return cut_slots(pageable(size.num_bytes), size)


MakePipeline = Callable[..., Pipeline]


def fetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "corpus-fetcher"]


def take(
    pipeline: Pipeline, count: int = 1, dtype: torch.dtype | None = torch.int64
) -> list[tuple[int, torch.Tensor]]:
    """(step, `(rows, seq_len + 1)`)."""
    return [(batch.step, batch.tokens) for batch in itertools.islice(batches_of(pipeline, dtype), count)]
