"""The thread that prefetches: it asks for the windows of the next steps, and no response depends on it."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import BoundedShuffle, Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import prefetch
from corpus_server.readers.groups import group_bytes
from corpus_server.readers.prefetch import Prefetcher
from tests.corpora import some_tokens, write_raw
from tests.megatron import THREE, document, specs
from tests.pages import drop

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


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_the_windows_of_the_next_steps_are_asked_for_and_no_others(bound: BoundPlan) -> None:
    """That the kernel then reads them is tested where it is asked, in test_readahead."""
    located: list[np.ndarray] = []
    num_bytes: list[int] = []
    read_ahead = bound.gatherer.read_ahead

    def record(locations: np.ndarray, length: int) -> None:
        assert length == SEQ_LEN + 1
        located.append(locations)
        read_ahead(locations, length)

    bound.gatherer.read_ahead = record  # type: ignore[method-assign]
    # The kernel may keep pages that it was asked to drop: a sample of them would pass for a warm corpus.
    bound.gatherer.are_resident = lambda locations: False  # type: ignore[method-assign]
    prefetcher = Prefetcher(BUDGET_BYTES, on_asked=num_bytes.append)
    prefetcher.note(bound, step=3, count=1, rows=ROWS, rank=0, world_size=1)
    wait_until(lambda: sum(num_bytes) >= (1 + HORIZON) * ROWS * (SEQ_LEN + 1) * 2)
    prefetcher.close()
    expected = bound.sampler.locate(3, count=1 + HORIZON).reshape(-1, 2)
    assert (np.concatenate(located) == expected).all()
    assert sum(num_bytes) == len(expected) * (SEQ_LEN + 1) * 2


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


@pytest.mark.parametrize(("rows", "num_looks"), [(32, 64), (33, 33), (512, 64), (1000, 63)])
def test_a_sample_of_the_windows_tells_whether_they_are_resident(
    corpus: Path, rows: int, num_looks: int
) -> None:
    """At most 64 of a turn, two steps or one, evenly spread: a look is a system call."""
    looked: list[np.ndarray] = []
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as catalog:
        plan = Plan(seq_len=SEQ_LEN, stages=(Stage(global_batch_size=rows, mixture={"web": 1.0}),))
        bound = catalog.bind(plan)

        def look(locations: np.ndarray) -> bool:
            looked.append(locations)
            return True

        bound.gatherer.are_resident = look  # type: ignore[method-assign]
        prefetcher = Prefetcher(4 * rows * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE))  # a step ahead
        prefetcher.note(bound, step=0, count=1, rows=rows, rank=0, world_size=1)
        wait_until(lambda: bool(looked))
        prefetcher.close()
    (windows,) = looked
    assert len(windows) == num_looks


def test_the_budget_is_shared_with_the_groups_of_bounded_shuffles(bound: BoundPlan, corpus: Path) -> None:
    """What groups take, others do not."""
    num_bytes: list[int] = []
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as catalog:
        stage = Stage(global_batch_size=ROWS, mixture={"web": 1.0})
        order = BoundedShuffle(block_windows=512, group_blocks=8)
        grouped = catalog.bind(Plan(seq_len=SEQ_LEN, order=order, stages=(stage,)))
        bound.gatherer.read_ahead = (  # type: ignore[method-assign]
            lambda locations, length: num_bytes.append(2 * locations.shape[0] * length)
        )
        bound.gatherer.are_resident = lambda locations: False  # type: ignore[method-assign]
        prefetcher = Prefetcher(BUDGET_BYTES + group_bytes(grouped))
        for each in (grouped, bound):
            prefetcher.note(each, step=0, count=1, rows=ROWS, rank=0, world_size=1)
        expected = (1 + HORIZON) * ROWS * (SEQ_LEN + 1) * 2
        wait_until(lambda: sum(num_bytes) >= expected)
        prefetcher.close()
    assert sum(num_bytes) == expected


def test_rows_of_pieces_are_not_prefetched(tmp_path: Path) -> None:
    asked: list[int] = []
    with Catalog.open(specs(THREE, tmp_path)) as catalog:
        bound = catalog.bind(Plan.from_json(document(THREE)))
        prefetcher = Prefetcher(2**40, on_asked=asked.append)
        prefetcher.note(bound, step=0, count=1, rows=4, rank=0, world_size=1)
        assert not list(prefetcher._readers.bounds())
        prefetcher.close()
    assert asked == []


def test_without_a_budget_there_is_no_thread(bound: BoundPlan) -> None:
    before = num_threads()
    prefetcher = Prefetcher(0)
    prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    assert num_threads() == before
    prefetcher.close()


def test_closing_does_not_wait_for_a_disk_that_hangs(
    bound: BoundPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread stays behind, does not keep the process alive, and ends when the disk answers."""
    monkeypatch.setattr(prefetch, "_JOIN_SECONDS", 0.05)
    hanging, answered = threading.Event(), threading.Event()

    def hang(locations: np.ndarray, length: int) -> None:
        hanging.set()
        answered.wait(60)

    bound.gatherer.read_ahead = hang  # type: ignore[method-assign]
    before = num_threads()
    prefetcher = Prefetcher(BUDGET_BYTES)
    prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    assert hanging.wait(20)
    prefetcher.close()
    assert not answered.is_set()
    assert "does the disk or the network file system hang?" in caplog.text
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "prefetch")
    answered.set()
    wait_until(lambda: num_threads() == before)


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
