"""The loader's device half over slots that are full already: what it costs without a network.

Run as a program it measures what `corpus-client transfer` does, then batches, and prints both as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from corpus_client.plan.schedule import StepRange
from corpus_client.staging.fetcher import FetchRange
from corpus_client.staging.options import PREFETCH_BYTES
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.ring import find_device, open_stager
from corpus_client.staging.slots import choose_slot_sizes, cut_slots
from corpus_client.tools import transfer
from corpus_client.tools.timing import Clock
from corpus_client.tools.transfer import host_memory

QUEUED_BATCHES = 32  # sent one behind the other, so that the cost of a call hides behind the copy before it
QUEUED_BYTES = 64 << 20  # fewer of the large batches: widened they take five times their size on the device

Pair = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, each `(rows, seq_len)`."""


@contextmanager
def full_slots(
    device: torch.device, stored: torch.Tensor, dtype: torch.dtype | None
) -> Iterator[Callable[[], Pair]]:
    """Open the loader's pipeline over slots that hold a batch already.

    Yields a function that returns inputs and targets of the batch `stored`, of `dtype`; None: as stored.
    """
    target = open_stager(device)
    make = partial(target.make, dtype)
    least = 2 * (stored.nbytes + 4096)
    size = choose_slot_sizes(
        batch_bytes=stored.nbytes, prefetch_bytes=max(PREFETCH_BYTES, least), in_flight=2
    )
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


def measure(clock: Clock, sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Measure batches of these bytes, several one behind the other, as stored and widened."""
    found = []
    for size in sizes:
        stored = host_memory("pageable", size, torch.device("cpu")).view(torch.uint16).view(1, -1)
        count = max(4, min(QUEUED_BATCHES, QUEUED_BYTES // size))
        for name, dtype in (("as stored", None), ("widened to int64 there", torch.int64)):
            with full_slots(clock.device, stored, dtype) as take:
                found.append(clock.measure(name, size, take, repeats, in_a_row=count))
    return found


if __name__ == "__main__":
    name, repeats, copies, batches = sys.argv[1:]
    device, times = find_device(name), int(repeats)
    found = transfer.measure(device, list(map(int, copies.split(","))), times).data
    sent = measure(Clock(device), list(map(int, batches.split(","))), times)
    print(json.dumps({**found, "batches": sent}))
