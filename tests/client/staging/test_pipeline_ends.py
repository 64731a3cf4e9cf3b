"""However a pipeline ends, no thread is left, and the training loop learns why."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from dataclasses import replace
from pathlib import Path
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

ROOT = Path(__file__).parents[3]


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


class Failing(CountingSource):
    """Fails by an error of the operating system or of Python, a little later than it is waited for."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def finish(self, ticket: range, view: memoryview) -> None:
        self.stopped.wait(0.1)
        raise self.error


def test_an_error_that_is_not_the_clients_own_is_told_and_wakes_the_loop(make_pipeline: MakePipeline) -> None:
    error = ZeroDivisionError("no rows")
    pipeline = make_pipeline(filler := Failing(error))
    with pytest.raises(errors.FetchFailed) as caught:
        take(pipeline)
    assert str(caught.value) == (
        "fetching ended by an error that is not the client's own: ZeroDivisionError: no rows; asking for a "
        "batch starts over from the same step"
    )
    assert caught.value.__cause__ is error
    assert filler.closed.wait()
    with pytest.raises(errors.LoaderClosed) as closed:  # once
        take(pipeline)
    assert str(closed.value) == "the loader was closed while a batch was awaited"


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


def test_close_wakes_a_waiting_training_loop(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline(CountingSource(block_at=5))
    closing = threading.Timer(0.1, pipeline.close)
    closing.start()
    with pytest.raises(errors.LoaderClosed, match="closed while a batch was awaited"):
        take(pipeline)
    closing.join()


def test_dropped_pipeline_leaves_no_thread(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    take(pipeline)
    assert len(fetchers()) == 1
    del pipeline
    gc.collect()
    assert fetchers() == []


def test_failed_and_dropped_pipeline_is_collected(make_pipeline: MakePipeline) -> None:
    """The error's traceback must not keep the pipeline, and its slots, alive."""
    pipeline = make_pipeline(CountingSource(fail_at=5))
    with pytest.raises(errors.ServerError):
        take(pipeline)
    reference = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert reference() is None


def test_in_a_forked_child_neither_the_thread_nor_the_device_is_touched(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections are the parent's, and CUDA cannot be called there."""
    pipeline = make_pipeline(filler := CountingSource())
    take(pipeline)
    drain = Mock()
    monkeypatch.setattr(pipeline._stager, "drain", drain)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert not pipeline.close()
    drain.assert_not_called()
    assert not filler.stopped.is_set()
    pipeline.queues.stop()


def test_interpreter_ends_with_an_open_loader() -> None:
    """In a fresh interpreter: a fetcher that waits for ever does not hold up the exit."""
    code = """
import sys
sys.path.insert(0, ".")
from corpus_client.staging.stager import Stager
from corpus_client.staging.pipeline import Pipeline
from tests.client.staging.counting import CPU, STEPS, CountingSource, new_slots, take
from corpus_client.staging.slots import SlotSizes
from corpus_client.staging.stager import Views
size = SlotSizes(num_slots=3, steps_per_slot=4, batch_bytes=24)
slots = new_slots(size)
pipeline = Pipeline(CountingSource(block_at=20), slots, Stager(CPU), STEPS)
print(take(pipeline)[0][0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "5\n"
    assert done.stderr == ""
