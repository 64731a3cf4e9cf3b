"""Slots go round exactly, whenever copies finish; the thread ends whatever happens."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus_client import buffers, errors
from corpus_client.device import CpuDevice, Device
from corpus_client.pipeline import Pipeline, Span
from corpus_client.replicas import Stopped
from corpus_client.schedule import Stretch

ROOT = Path(__file__).parents[2]
BATCH_BYTES = 24
SPAN = Span(
    stretches=(Stretch(start_step=0, stop_step=None, num_rows=2),),
    window=3,
    dtype=torch.int32,
    start_step=5,
    end_step=None,
    request_bytes=4 * BATCH_BYTES,
    in_flight=2,
)


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
        size = self.rows[ticket.start] * 3
        tokens = torch.frombuffer(view, dtype=torch.int32)[: size * len(ticket)].view(len(ticket), size)
        tokens[:] = torch.tensor(ticket)[:, None]

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.closed.set()


class LateTransfer:
    """Reads the slot only when its copy `finishes`: some polls after it was queued."""

    def __init__(self, stored: torch.Tensor, num_polls: int, *, truthful: bool) -> None:
        self._stored = stored
        self._polls_left = num_polls
        self._truthful = truthful
        self._lock = threading.Lock()
        self._tokens = torch.full_like(stored, -1)
        self._finished = False

    def claim(self) -> torch.Tensor:
        return self._tokens  # as on a GPU: filled when the copy has run

    def done(self) -> bool:
        with self._lock:
            self._polls_left -= 1
            if self._polls_left <= 0:
                self._copy()
            return self._finished or not self._truthful

    def finish(self) -> None:
        with self._lock:
            self._copy()

    def _copy(self) -> None:
        if not self._finished:
            self._tokens.copy_(self._stored)
            self._finished = True


class LateDevice:
    """A device whose copies finish late and out of order; an untruthful one says they are done at once."""

    pinned = False
    borrows = False

    def __init__(self, *, truthful: bool = True, lookahead: int = 2, seed: int = 0) -> None:
        self.lookahead = lookahead
        self.transfers: list[LateTransfer] = []
        self._truthful = truthful
        self._draw = random.Random(seed)

    def upload(self, stored: torch.Tensor) -> LateTransfer:
        num_polls = self._draw.randrange(1, 12) if self._truthful else sys.maxsize
        self.transfers.append(LateTransfer(stored, num_polls, truthful=self._truthful))
        return self.transfers[-1]

    def finish_all(self) -> None:
        for transfer in self.transfers:
            transfer.finish()


MakePipeline = Callable[..., Pipeline]


@pytest.fixture
def make_pipeline() -> Iterator[MakePipeline]:
    made: list[weakref.ref[Pipeline]] = []

    def make(
        filler: Any = None, device: Device | None = None, span: Span = SPAN, num_slots: int = 3
    ) -> Pipeline:
        size = buffers.RingSize(num_slots=num_slots, steps_per_request=4, batch_bytes=BATCH_BYTES)
        slots = buffers.allocate_slots(size, pinned=False)
        pipeline = Pipeline(filler or CountingFiller(), slots, device or CpuDevice(torch.int64), span)
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
    pipeline = make_pipeline(device=CpuDevice(dtype), num_slots=num_slots)
    for expected in range(5, 205):
        step, tokens = next(pipeline)
        assert step == expected
        assert tokens.tolist() == [[step] * 3] * 2


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("lookahead", [0, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_late_and_reordered_copies_never_see_a_reused_slot(
    make_pipeline: MakePipeline, seed: int, lookahead: int, num_slots: int
) -> None:
    device = LateDevice(seed=seed, lookahead=lookahead)
    batches = take(make_pipeline(device=device, num_slots=num_slots), 40)
    device.finish_all()
    assert [(step, set(tokens.flatten().tolist())) for step, tokens in batches] == [
        (step, {step}) for step in range(5, 45)
    ]


def test_the_late_device_catches_a_slot_that_is_reused_too_early(make_pipeline: MakePipeline) -> None:
    """The same check with a device that says `done` before it has copied: it must notice."""
    device = LateDevice(truthful=False)
    batches = take(make_pipeline(device=device, num_slots=2), 40)
    device.finish_all()
    assert any(set(tokens.flatten().tolist()) != {step} for step, tokens in batches)


def test_batch_as_stored_lives_until_the_next_one(make_pipeline: MakePipeline) -> None:
    """Two slots, a filler much faster than the loop: the held view must not change under it."""
    pipeline = make_pipeline(device=CpuDevice(None), num_slots=2)
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
    assert list(span.requests()) == [(*request, 2) for request in requests]
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
    assert list(span.requests()) == requests
    batches = list(make_pipeline(span=span))
    assert [step for step, _ in batches] == list(range(start_step, end_step))
    for step, tokens in batches:
        (rows,) = [s.num_rows for s in STRETCHES if s.start_step <= step < (s.stop_step or 99)]
        assert tokens.shape == (rows, 3)
        assert set(tokens.flatten().tolist()) == {step}


def test_error_comes_after_what_was_filled_before_it_with_its_traceback(
    make_pipeline: MakePipeline,
) -> None:
    filler = CountingFiller(fail_at=12)
    pipeline = make_pipeline(filler)
    assert [step for step, _ in take(pipeline, 7)] == list(range(5, 12))
    with pytest.raises(errors.AnswerTooLarge) as caught:
        next(pipeline)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert {"__next__", "_fetch", "finish"} <= set(frames)
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
from tests.client.test_pipeline import CountingFiller, Pipeline, SPAN, CpuDevice, buffers
size = buffers.RingSize(num_slots=3, steps_per_request=4, batch_bytes=24)
slots = buffers.allocate_slots(size, pinned=False)
pipeline = Pipeline(CountingFiller(block_at=20), slots, CpuDevice(None), SPAN)
print(next(pipeline)[0])
"""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert done.stdout == "5\n"
    assert done.stderr == ""
    assert time.monotonic() - started < 30
