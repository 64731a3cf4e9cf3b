"""Slots go round exactly. On a device whose copies are late: `cuda/test_ring.py`."""

from __future__ import annotations

import gc
import tracemalloc
from functools import partial

import torch

from corpus_client.observe.recorder import Recorder
from corpus_client.staging.stager import Stager
from tests.client.staging.counting import CPU, MakePipeline


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
