"""Slots go round exactly, whenever copies finish; the thread ends whatever happens."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import traceback
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_client import buffers, errors
from corpus_client.attribution import Meter
from corpus_client.device import Device, HostDevice
from corpus_client.fetcher import Span
from corpus_client.pipeline import Pipeline, _Emptying
from corpus_client.replicas import Stopped
from corpus_client.schedule import Stretch
from corpus_client.trace import Tracer
from tests.client.delayed import NEVER, DelayedDevice, DelayedTransfer

ROOT = Path(__file__).parents[2]
BATCH_BYTES = 24
SPAN = Span(
    stretches=(Stretch(start_step=0, stop_step=None, num_rows=2),),
    window=3,
    dtype=torch.int32,
    start_step=5,
    end_step=None,
    slot_bytes=4 * BATCH_BYTES,
    in_flight=2,
)


def on_host(dtype: torch.dtype | None) -> HostDevice:
    return HostDevice(torch.device("cpu"), dtype)


class CountingFiller:
    """Fills every token of step n with n; checks that it is closed, and used by one thread."""

    def __init__(self, fail_at: int | None = None, block_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.block_at = block_at
        self.rows: dict[int, int] = {}
        self.closed = threading.Event()
        self.stopped = threading.Event()

    def begin(self, start_step: int, num_steps: int, num_rows: int) -> range:
        self.rows[start_step] = num_rows
        return range(start_step, start_step + num_steps)

    def finish(self, ticket: range, view: memoryview) -> None:
        if self.block_at in ticket:
            self.stopped.wait()
            raise Stopped
        if self.fail_at in ticket:
            raise errors.AnswerTooLarge("the filler failed here", status=422)
        size = self.rows.pop(ticket.start) * 3
        tokens = torch.frombuffer(view, dtype=torch.int32)[: size * len(ticket)].view(len(ticket), size)
        tokens[:] = torch.tensor(ticket)[:, None]

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed.set()


MakePipeline = Callable[..., Pipeline]


@pytest.fixture
def make_pipeline() -> Iterator[MakePipeline]:
    made: list[weakref.ref[Pipeline]] = []

    def make(
        filler: Any = None,
        device: Device | None = None,
        span: Span = SPAN,
        num_slots: int = 3,
        meter: Meter | None = None,
    ) -> Pipeline:
        size = buffers.RingSize(num_slots=num_slots, steps_per_slot=4, batch_bytes=BATCH_BYTES)
        slots = buffers.allocate_ring(size).slots
        pipeline = Pipeline(filler or CountingFiller(), slots, device or on_host(torch.int64), span, meter)
        made.append(weakref.ref(pipeline))
        return pipeline

    yield make
    for reference in made:
        if (pipeline := reference()) is not None:
            pipeline.close()
    assert fetchers() == []


def fetchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "corpus-fetcher"]


def take(pipeline: Pipeline, count: int) -> list[tuple[int, torch.Tensor]]:
    return [next(pipeline) for _ in range(count)]


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_steps_come_in_order_with_their_own_tokens(
    make_pipeline: MakePipeline, dtype: torch.dtype | None, num_slots: int
) -> None:
    pipeline = make_pipeline(device=on_host(dtype), num_slots=num_slots)
    for expected in range(5, 205):
        step, tokens = next(pipeline)
        assert step == expected
        assert tokens.tolist() == [[step] * 3] * 2


def wrong_steps(device: DelayedDevice, num_slots: int, num_steps: int = 40) -> list[int]:
    """Steps whose tokens are not their own, read when every copy has run at last."""
    size = buffers.RingSize(num_slots=num_slots, steps_per_slot=4, batch_bytes=BATCH_BYTES)
    pipeline = Pipeline(CountingFiller(), buffers.allocate_ring(size).slots, device, SPAN)
    try:
        batches = take(pipeline, num_steps)
    finally:
        assert pipeline.close()
    assert [step for step, _ in batches] == list(range(5, 5 + num_steps))
    return [step for step, tokens in batches if set(tokens.flatten().tolist()) != {step}]


@given(
    delays=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=12),
    lookahead=st.integers(0, 6),
    group_bytes=st.sampled_from([0, 2 * BATCH_BYTES, 3 * BATCH_BYTES, 1 << 20]),
    num_slots=st.integers(2, 6),
)
@settings(max_examples=100)
def test_late_and_reordered_copies_never_see_a_reused_slot(
    delays: list[int], lookahead: int, group_bytes: int, num_slots: int
) -> None:
    device = DelayedDevice(delays, lookahead=lookahead, group_bytes=group_bytes)
    assert wrong_steps(device, num_slots) == []
    # Not the fetcher: an event query of another thread breaks the capture of a CUDA graph.
    assert device.threads == {threading.get_ident()}


def test_a_belt_that_frees_slots_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check over a pipeline that does not ask whether a slot's copies are done."""
    monkeypatch.setattr(_Emptying, "is_free", lambda _: True)
    assert wrong_steps(DelayedDevice([NEVER]), num_slots=2) != []


def test_a_device_that_says_done_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayedTransfer, "done", lambda _: True)
    assert wrong_steps(DelayedDevice([NEVER]), num_slots=2) != []


def test_small_batches_of_a_slot_travel_together(make_pipeline: MakePipeline) -> None:
    """The first batch comes alone, as its request did; then slots of 2 and 4 batches, in groups of 3."""
    device = DelayedDevice(group_bytes=3 * BATCH_BYTES, lookahead=0)
    pipeline = make_pipeline(device=device)
    uploads = []
    for _ in range(11):
        next(pipeline)
        uploads.append(device.num_uploads)
    assert uploads == [1, 2, 2, 3, 3, 3, 4, 5, 5, 5, 6]


@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_nothing_grows_over_thousands_of_steps(make_pipeline: MakePipeline, group_bytes: int) -> None:
    device = DelayedDevice([0, 7, 2], group_bytes=group_bytes)
    pipeline = make_pipeline(device=device, meter=Meter(Tracer(20)))
    gc.collect()
    tracemalloc.start()
    try:
        most_live = traced = 0
        for number in range(6000):
            next(pipeline)
            most_live = max(most_live, len(device.live))
            if number == 1000:
                gc.collect()
                traced, _ = tracemalloc.get_traced_memory()
        assert most_live <= 12
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - traced < 100_000
    finally:
        tracemalloc.stop()


def test_two_slots_keep_the_fetcher_busy(make_pipeline: MakePipeline) -> None:
    """Both slots put on their way ahead would leave nothing to fill during a step."""
    span = replace(SPAN, slot_bytes=BATCH_BYTES)
    device = DelayedDevice([NEVER], lookahead=2)
    pipeline = make_pipeline(device=device, span=span, num_slots=2)
    next(pipeline)
    assert device.num_uploads == 1
    device.drain()


def test_batch_as_stored_lives_until_the_next_one(make_pipeline: MakePipeline) -> None:
    """Two slots, a filler much faster than the loop: the held view must not change under it."""
    pipeline = make_pipeline(device=on_host(None), num_slots=2)
    for _ in range(30):
        step, tokens = next(pipeline)
        time.sleep(0.002)
        assert set(tokens.flatten().tolist()) == {step}


@pytest.mark.parametrize(
    ("end_step", "requests"),
    [
        (5, []),
        (6, [(5, 1)]),
        (13, [(5, 1), (6, 2), (8, 4), (12, 1)]),
        (20, [(5, 1), (6, 2), (8, 4), (12, 4), (16, 4)]),
    ],
)
def test_first_requests_are_small_and_the_last_ends_at_the_end(
    end_step: int, requests: list[tuple[int, int]], make_pipeline: MakePipeline
) -> None:
    span = replace(SPAN, end_step=end_step)
    assert list(span.pieces(span.slot_bytes)) == [(*request, 2) for request in requests]
    assert [step for step, _ in make_pipeline(span=span)] == list(range(5, end_step))


STRETCHES = tuple(
    Stretch(start_step=start, stop_step=stop, num_rows=rows)
    for start, stop, rows in [(0, 8, 2), (8, 19, 1), (19, 20, 2), (20, None, 1)]
)


@pytest.mark.parametrize(
    ("start_step", "end_step", "requests"),
    [
        (0, 8, [(0, 1, 2), (1, 2, 2), (3, 4, 2), (7, 1, 2)]),
        (6, 31, [(6, 1, 2), (7, 1, 2), (8, 4, 1), (12, 7, 1), (19, 1, 2), (20, 8, 1), (28, 3, 1)]),
        (19, 22, [(19, 1, 2), (20, 2, 1)]),
        (25, 25, []),
    ],
)
def test_no_request_crosses_a_change_of_batch_size(
    start_step: int, end_step: int, requests: list[tuple[int, int, int]], make_pipeline: MakePipeline
) -> None:
    """Slots hold four batches of two rows, so eight of one."""
    span = replace(SPAN, stretches=STRETCHES, start_step=start_step, end_step=end_step)
    assert list(span.pieces(span.slot_bytes)) == requests
    batches = list(make_pipeline(span=span))
    assert [step for step, _ in batches] == list(range(start_step, end_step))
    for step, tokens in batches:
        (rows,) = [s.num_rows for s in STRETCHES if s.start_step <= step < (s.stop_step or 99)]
        assert tokens.shape == (rows, 3)
        assert set(tokens.flatten().tolist()) == {step}


def test_a_stride_asks_for_single_steps_over_changes_of_batch_size(make_pipeline: MakePipeline) -> None:
    """Step 19, a stretch by itself, is jumped over."""
    span = replace(SPAN, stretches=STRETCHES, start_step=3, end_step=30, step_stride=5)
    pieces = [(3, 1, 2), (8, 1, 1), (13, 1, 1), (18, 1, 1), (23, 1, 1), (28, 1, 1)]
    assert list(span.pieces(span.slot_bytes)) == pieces
    assert [step for step, _ in make_pipeline(span=span)] == [3, 8, 13, 18, 23, 28]


def test_error_comes_after_what_was_filled_before_it_with_its_traceback(
    make_pipeline: MakePipeline,
) -> None:
    filler = CountingFiller(fail_at=12)
    pipeline = make_pipeline(filler)
    assert [step for step, _ in take(pipeline, 7)] == list(range(5, 12))
    with pytest.raises(errors.AnswerTooLarge) as caught:
        next(pipeline)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert {"__next__", "fetch", "finish"} <= set(frames)
    assert filler.closed.wait(5)
    with pytest.raises(errors.LoaderClosed):
        next(pipeline)


@pytest.mark.parametrize("where", ["awaiting an answer", "all slots full", "finished", "failed"])
def test_close_ends_the_thread_wherever_it_is(make_pipeline: MakePipeline, where: str) -> None:
    filler = CountingFiller(
        block_at=5 if where == "awaiting an answer" else None, fail_at=5 if where == "failed" else None
    )
    end = 6 if where == "finished" else None
    span = replace(SPAN, end_step=end)
    pipeline = make_pipeline(filler, span=span)
    time.sleep(0.05)
    started = time.monotonic()
    pipeline.close()
    pipeline.close()
    assert time.monotonic() - started < 1
    assert fetchers() == []
    assert filler.closed.is_set()


def test_close_wakes_a_waiting_training_loop(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline(CountingFiller(block_at=5))
    closing = threading.Timer(0.1, pipeline.close)
    closing.start()
    with pytest.raises(errors.LoaderClosed, match="closed while a batch was awaited"):
        next(pipeline)
    closing.join()


def test_dropped_pipeline_leaves_no_thread(make_pipeline: MakePipeline) -> None:
    pipeline = make_pipeline()
    next(pipeline)
    assert len(fetchers()) == 1
    del pipeline
    gc.collect()
    assert fetchers() == []


def test_failed_and_dropped_pipeline_is_collected(make_pipeline: MakePipeline) -> None:
    """The error's traceback must not keep the pipeline, and its slots, alive."""
    pipeline = make_pipeline(CountingFiller(fail_at=5))
    with pytest.raises(errors.AnswerTooLarge):
        next(pipeline)
    reference = weakref.ref(pipeline)
    del pipeline
    gc.collect()
    assert reference() is None


def test_interpreter_ends_with_an_open_loader() -> None:
    """In a fresh interpreter: a fetcher that waits for ever does not hold up the exit."""
    code = """
import sys
sys.path.insert(0, ".")
from tests.client.test_pipeline import CountingFiller, Pipeline, SPAN, buffers, on_host
size = buffers.RingSize(num_slots=3, steps_per_slot=4, batch_bytes=24)
slots = buffers.allocate_ring(size).slots
pipeline = Pipeline(CountingFiller(block_at=20), slots, on_host(None), SPAN)
print(next(pipeline)[0])
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout == "5\n"
    assert done.stderr == ""
    assert time.monotonic() - started < 30
