"""The thread that reads ahead: pages of the next steps come in meanwhile, and no answer depends on it."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import BoundPlan, Catalog
from corpus_server.plan import Plan, Stage
from corpus_server.prefetch import Prefetcher
from corpus_server.settings import CorpusSpec
from tests.corpora import some_tokens, write_raw
from tests.pages import drop, resident_of

ROWS, SEQ_LEN = 16, 256
STEP_BYTES = ROWS * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE)
HORIZON = 6
BUDGET_BYTES = 4 * HORIZON * STEP_BYTES  # a reader gets a quarter


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """8 MB of tokens, cold."""
    path = write_raw(tmp_path / "web.bin", some_tokens(4_000_000))
    drop(path)
    return path


@pytest.fixture
def bound(corpus: Path) -> Iterator[BoundPlan]:
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as catalog:
        yield catalog.bind(
            Plan(seq_len=SEQ_LEN, stages=(Stage(global_batch_size=ROWS, mixture={"web": 1.0}),))
        )


def pages_of(bound: BoundPlan, steps: range, num_pages: int) -> np.ndarray:
    """Return for each page of the file whether a window of the steps touches it."""
    touched = np.zeros(num_pages, bool)
    located = bound.sampler.locate(steps.start, count=len(steps)).reshape(-1, 2)
    for start in located[:, 1].tolist():
        touched[2 * start // mmap.PAGESIZE : (2 * (start + SEQ_LEN + 1) - 1) // mmap.PAGESIZE + 1] = True
    return touched


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_threads() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


def test_the_pages_of_the_next_steps_come_in_and_no_others(bound: BoundPlan, corpus: Path) -> None:
    before = resident_of(corpus)  # what opening has read
    asked: list[int] = []
    expected = pages_of(bound, range(3, 4 + HORIZON), len(before)) | before
    prefetcher = Prefetcher(BUDGET_BYTES, on_asked=asked.append)
    prefetcher.note(bound, step=3, count=1, rows=ROWS, rank=0, world_size=1)
    wait_until(lambda: bool(resident_of(corpus)[expected].all()))
    prefetcher.close()
    assert resident_of(corpus).sum() == expected.sum()
    assert expected.sum() > before.sum() + ROWS * HORIZON
    assert sum(asked) == (1 + HORIZON) * ROWS * (SEQ_LEN + 1) * 2


def test_what_is_resident_is_not_asked_for(bound: BoundPlan, corpus: Path) -> None:
    corpus.read_bytes()
    asked: list[int] = []
    looks = threading.Semaphore(0)
    are_resident = bound.gatherer.are_resident

    def look(locations: np.ndarray) -> bool:
        try:
            return are_resident(locations)
        finally:
            looks.release()

    bound.gatherer.are_resident = look  # type: ignore[method-assign]
    prefetcher = Prefetcher(BUDGET_BYTES, on_asked=asked.append)
    prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    assert looks.acquire(timeout=20)
    for step in range(1, 100):
        prefetcher.note(bound, step=step, count=1, rows=ROWS, rank=0, world_size=1)
    prefetcher.close()
    assert asked == []
    assert not looks.acquire(blocking=False)


def test_without_a_budget_there_is_no_thread(bound: BoundPlan) -> None:
    before = num_threads()
    prefetcher = Prefetcher(0)
    prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    assert num_threads() == before
    prefetcher.close()


def test_closing_ends_the_thread_in_the_midst_of_its_work(bound: BoundPlan) -> None:
    before = num_threads()
    prefetcher = Prefetcher(2**40)
    assert num_threads() == before + 1
    prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    for _ in range(2):
        prefetcher.close()
    assert num_threads() == before


def test_a_failure_is_logged_and_the_thread_goes_on(
    bound: BoundPlan, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as catalog:
        broken = catalog.bind(
            Plan(seq_len=SEQ_LEN, seed=7, stages=(Stage(global_batch_size=ROWS, mixture={"web": 1.0}),))
        )

        def fail(locations: np.ndarray, length: int) -> None:
            raise MemoryError("no room for the ranges")

        broken.gatherer.read_ahead = fail  # type: ignore[method-assign]
        prefetcher = Prefetcher(BUDGET_BYTES, on_asked=asked.append)
        prefetcher.note(broken, step=0, count=1, rows=ROWS, rank=0, world_size=1)
        wait_until(lambda: "no room for the ranges" in caplog.text)
        prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
        wait_until(lambda: bool(asked))
        prefetcher.close()
    assert caplog.text.count(f"reading ahead failed for plan {broken.plan.id}") == 1


def test_the_tokens_are_the_same_while_it_reads_ahead(bound: BoundPlan, corpus: Path) -> None:
    """Gathered beside the thread, over jumps, from a file that is cold at first."""
    tokens = np.frombuffer(corpus.read_bytes(), np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, SEQ_LEN + 1)
    drop(corpus)
    prefetcher = Prefetcher(BUDGET_BYTES)
    for step in [*range(40), *range(500, 520), 3, *range(7, 30)]:
        prefetcher.note(bound, step=step, count=2, rows=ROWS, rank=0, world_size=1)
        located = bound.sampler.locate(step, count=2).reshape(-1, 2)
        out = bound.gatherer.gather(located, SEQ_LEN + 1, bound.dtype)
        assert (out == windows[located[:, 1]]).all()
    prefetcher.close()
