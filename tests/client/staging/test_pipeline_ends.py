"""However a pipeline ends, no thread is left, and the training loop learns why."""

from __future__ import annotations

import gc
import threading
import time
import traceback
import weakref
from dataclasses import replace
from unittest.mock import Mock

import pytest

from corpus_client import errors
from corpus_client.network.pool import Stopped
from corpus_client.staging import fetcher
from tests.client.staging.counting import (
    STEPS,
    CountingSource,
    MakePipeline,
    fetchers,
    take,
)


def test_error_comes_after_what_was_filled_before_it_with_its_traceback(
    make_pipeline: MakePipeline,
) -> None:
    filler = CountingSource(fail_at=12)
    pipeline = make_pipeline(filler)
    assert [step for step, _ in take(pipeline, 7)] == list(range(5, 12))
    with pytest.raises(errors.ServerError) as caught:
        take(pipeline)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert {"take", "fetch", "finish"} <= set(frames)
    assert filler.closed.wait()
    with pytest.raises(errors.LoaderClosed):
        take(pipeline)


@pytest.mark.parametrize("where", ["awaiting a response", "all slots full", "finished", "failed"])
def test_close_ends_the_thread_wherever_it_is(make_pipeline: MakePipeline, where: str) -> None:
    filler = CountingSource(
        block_at=5 if where == "awaiting a response" else None, fail_at=5 if where == "failed" else None
    )
    end = 6 if where == "finished" else None
    steps = replace(STEPS, end_step=end)
    pipeline = make_pipeline(filler, steps=steps)
    time.sleep(0.05)
    pipeline.close()
    pipeline.close()
    assert fetchers() == []
    assert filler.closed.is_set()


def test_a_thread_that_does_not_end_keeps_its_slots(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write to one, so no other pipeline may have them."""
    monkeypatch.setattr(fetcher, "JOIN_SECONDS", 0.05)
    released = threading.Event()

    class Stuck(CountingSource):
        def finish(self, ticket: range, view: memoryview) -> None:
            released.wait(60)
            raise Stopped

    pipeline = make_pipeline(Stuck())
    assert not pipeline.close()
    released.set()
    (thread,) = fetchers()
    thread.join(60)
    assert pipeline.close()


def test_close_waits_for_the_device_after_the_thread(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards nothing reads a slot, and nothing will be copied from one."""
    pipeline = make_pipeline()
    take(pipeline)
    drain = Mock(side_effect=lambda: fetchers() and pytest.fail("too early"))
    monkeypatch.setattr(pipeline._stager, "drain", drain)
    assert pipeline.close()
    drain.assert_called_once_with()


def test_failed_and_dropped_pipeline_is_collected(make_pipeline: MakePipeline) -> None:
    """The error's traceback must not keep the pipeline, and its slots, alive."""
    pipeline = make_pipeline(CountingSource(fail_at=5))
    with pytest.raises(errors.ServerError):
        take(pipeline)
    reference = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert reference() is None
