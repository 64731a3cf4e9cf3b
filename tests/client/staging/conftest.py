"""Pipelines that count, closed at the end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from corpus_client.observe.recorder import Recorder
from corpus_client.staging.fetcher import FetchRange
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.slots import SlotSizes, cut_slots
from corpus_client.staging.stager import Stager
from tests.client.staging.counting import (
    BATCH_BYTES,
    CPU,
    STEPS,
    CountingSource,
    MakePipeline,
    fetchers,
)


@pytest.fixture
def make_pipeline() -> Iterator[MakePipeline]:
    made: list[weakref.ref[Pipeline]] = []

    def make(
        source: Any = None,
        stager: Stager | None = None,
        steps: FetchRange = STEPS,
        num_slots: int = 3,
        recorder: Recorder | None = None,
    ) -> Pipeline:
        size = SlotSizes(num_slots=num_slots, steps_per_slot=4, batch_bytes=BATCH_BYTES)
        stager = stager or Stager(CPU)
        slots = cut_slots(stager.host_memory(size.num_bytes), size)
        pipeline = Pipeline(source or CountingSource(), slots, stager, steps, recorder)
        made.append(weakref.ref(pipeline))
        return pipeline

    yield make
    for reference in made:
        if (pipeline := reference()) is not None:
            pipeline.close()
    for thread in fetchers():
        thread.join(20)  # one that collected its own pipeline was joined by nobody
    assert fetchers() == []
