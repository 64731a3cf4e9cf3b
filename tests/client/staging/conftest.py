"""Pipelines that count, closed at the end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from corpus_client.observe.attribution import Meter
from corpus_client.staging.device import Device
from corpus_client.staging.fetcher import FetchRange
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.slots import RingSize, allocate_ring
from tests.client.staging.counting import (
    BATCH_BYTES,
    CPU,
    STEPS,
    CountingFiller,
    MakePipeline,
    fetchers,
)


@pytest.fixture
def make_pipeline() -> Iterator[MakePipeline]:
    made: list[weakref.ref[Pipeline]] = []

    def make(
        filler: Any = None,
        device: Device | None = None,
        steps: FetchRange = STEPS,
        num_slots: int = 3,
        meter: Meter | None = None,
    ) -> Pipeline:
        size = RingSize(num_slots=num_slots, steps_per_slot=4, batch_bytes=BATCH_BYTES)
        slots = allocate_ring(size).slots
        pipeline = Pipeline(filler or CountingFiller(), slots, device or Device(CPU), steps, meter)
        made.append(weakref.ref(pipeline))
        return pipeline

    yield make
    for reference in made:
        if (pipeline := reference()) is not None:
            pipeline.close()
    assert fetchers() == []
