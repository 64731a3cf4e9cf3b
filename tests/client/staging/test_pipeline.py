"""Slots go round exactly. On a device whose copies are late: `cuda/test_ring.py`."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from functools import partial

import pytest
import torch

from corpus_client.observe.recorder import Recorder
from corpus_client.staging.stager import Stager
from tests.client.staging.counting import CPU, MakePipeline, batches_of


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_steps_come_in_order_with_their_own_tokens(
    make_pipeline: MakePipeline, dtype: torch.dtype | None, num_slots: int
) -> None:
    pipeline = make_pipeline(num_slots=num_slots)
    for expected, batch in zip(range(5, 205), batches_of(pipeline, dtype), strict=False):
        assert batch.step == expected
        assert batch.tokens.tolist() == [[expected] * 3] * 2


def test_nothing_grows_over_thousands_of_steps(make_pipeline: MakePipeline) -> None:
    """Memory of the device is measured in `cuda/test_ring.py`."""
    stager = Stager(CPU)
    pipeline = make_pipeline(stager=stager, recorder=Recorder(20))
    tracemalloc.start()
    try:
        traced = 0
        for number in range(6000):
            pipeline.take(partial(stager.make, torch.int64))
            if number == 1000:
                gc.collect()
                traced, _ = tracemalloc.get_traced_memory()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - traced < 100_000
    finally:
        tracemalloc.stop()


def test_batch_as_stored_lives_until_the_next_one(make_pipeline: MakePipeline) -> None:
    """Two slots, a filler much faster than the loop: the held view must not change under it."""
    pipeline = make_pipeline(num_slots=2)
    for batch in itertools.islice(batches_of(pipeline, None), 30):
        time.sleep(0.002)
        assert set(batch.tokens.flatten().tolist()) == {batch.step}
