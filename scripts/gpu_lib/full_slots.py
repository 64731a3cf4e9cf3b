"""The loader's device half over slots that are full already: what it costs without a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from corpus_client.plan.schedule import StepRange
from corpus_client.staging.fetcher import FetchRange
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.ring import open_stager
from corpus_client.staging.slots import choose_slot_sizes, cut_slots
from corpus_client.tools.copies import host_memory
from corpus_client.tools.timing import Clock

QUEUED_BATCHES = 32  # sent one behind the other, so that the cost of a call hides behind the copy before it
SLOTS_BYTES = (
    256 << 20
)  # of all slots, unless told otherwise: enough that a free one is there whenever the bus is
QUEUED_BYTES = 64 << 20  # fewer of the large batches: widened they take five times their size on the device

Pair = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, each `(rows, seq_len)`."""


@contextmanager
def full_slots(
    device: torch.device,
    stored: torch.Tensor,
    dtype: torch.dtype | None,
    *,
    slots_bytes: int = SLOTS_BYTES,
    group_bytes: int | None = None,
) -> Iterator[Callable[[], Pair]]:
    """Open the loader's pipeline over slots that hold a batch already.

    Yields a function that returns inputs and targets of the batch `stored`, of `dtype`; None: as stored.

    Args:
        slots_bytes: of all slots together.
        group_bytes: of one copy, `GROUP_BYTES` of the loader's ring; None: that.
    """
    target = open_stager(device)
    if group_bytes is not None:
        target.group_bytes = group_bytes
    make = partial(target.make, dtype)
    least = 2 * (stored.nbytes + 4096)
    size = choose_slot_sizes(batch_bytes=stored.nbytes, prefetch_bytes=max(slots_bytes, least), in_flight=2)
    slots = cut_slots(target.host_memory(size.num_bytes), size)
    for slot in slots:
        np.frombuffer(slot.view, np.uint8)[:] = np.resize(stored.view(torch.uint8).numpy(), size.slot_bytes)
    steps = FetchRange(
        step_ranges=(StepRange(start_step=0, stop_step=None, shape=(stored.shape[0], stored.shape[1])),),
        dtype=stored.dtype,
        slot_bytes=size.used_bytes,
        in_flight=1,
    )
    with closing(target), closing(Pipeline(_NothingToFetch(), slots, target, steps)) as pipeline:

        def take() -> Pair:
            inputs, targets, *_ = pipeline.take(make)[1]
            return inputs, targets

        yield take


class _NothingToFetch:
    """Leaves slots as they are."""

    def begin(self, *_: object) -> None:
        pass

    def follow(self, *_: object) -> bool:
        return False

    finish = stop = close = begin


def measure(
    clock: Clock,
    sizes: Sequence[int],
    repeats: int,
    *,
    slots_bytes: int = SLOTS_BYTES,
    group_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Measure batches of these bytes, as stored and widened.

    Their speed is that of several one after the other. `held`, how long a call for one holds the CPU, is that
    of a loop which does not outrun the bus: the device is idle at each call, so none waits for a free slot.
    """
    found = []
    for size in sizes:
        stored = host_memory("pageable", size, torch.device("cpu")).view(torch.uint16).view(1, -1)
        count = max(4, min(QUEUED_BATCHES, QUEUED_BYTES // size))
        for name, dtype in (("as stored", None), ("widened to int64 there", torch.int64)):
            with full_slots(
                clock.device, stored, dtype, slots_bytes=slots_bytes, group_bytes=group_bytes
            ) as take:
                figures = clock.measure(name, size, take, repeats, in_a_row=count)
                _, held = clock.time(take, repeats=repeats)
            found.append({**figures, "held": asdict(held)})
    return found
