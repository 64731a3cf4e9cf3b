"""The thread that prefetches: it asks for the windows of the next steps, and no response depends on it."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusChanged
from corpus_server.plan import BoundedShuffle, Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import Prefetcher, Registry, prefetch
from corpus_server.readers import registry as registry_module
from corpus_server.readers.groups import Groups
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_raw
from tests.megatron import THREE, document, specs
from tests.pages import drop
from tests.serving import wait_until

ROWS, SEQ_LEN = 16, 256
STEP_BYTES = ROWS * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE)
STEP_WINDOW_BYTES = ROWS * 2 * (SEQ_LEN + 1)
HORIZON = 6
BUDGET_BYTES = 4 * HORIZON * STEP_BYTES  # a reader gets a quarter
GROUPED = BoundedShuffle(block_windows=512, group_blocks=8)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """8 MB of tokens, cold."""
    path = write_raw(tmp_path / "web.bin", some_tokens(4_000_000))
    drop(path)
    return path


@pytest.fixture
def catalog(corpus: Path) -> Iterator[Catalog]:
    with Catalog.open([CorpusSpec(name="web", path=corpus)]) as opened:
        yield opened


def bind(catalog: Catalog, *, rows: int = ROWS, seed: int = 0, order: object = "shuffle") -> BoundPlan:
    """Return a plan whose windows pass for cold: the kernel may keep pages that it was asked to drop."""
    catalog._opened.clear()  # a gatherer of its own, which tells what this plan asked for
    stage = Stage(global_batch_size=rows, mixture={"web": 1.0})
    bound = catalog.bind(Plan(seq_len=SEQ_LEN, seed=seed, order=order, stages=(stage,)), Budget())  # type: ignore[arg-type]
    bound.gatherer.are_resident = lambda locations: False  # type: ignore[method-assign]
    return bound


@pytest.fixture
def bound(catalog: Catalog) -> BoundPlan:
    return bind(catalog)


class Disk:
    """A prefetcher, and the windows that it asked for."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.registry = Registry()
        self.num_bytes = 0
        self.prefetcher = Prefetcher(self.registry, budget_bytes, on_asked=self._count)
        self.asked: dict[BoundPlan, list[np.ndarray]] = {}

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def __enter__(self) -> Disk:
        return self

    def __exit__(self, *_: object) -> None:
        self.prefetcher.close()

    def ask(self, bound: BoundPlan, step: int = 0, *, count: int = 1, rank: int = 0, world: int = 1) -> None:
        if bound not in self.asked:
            self.asked[bound], read_ahead = [], bound.gatherer.read_ahead

            def record(locations: np.ndarray, length: int) -> None:
                self.asked[bound].append(locations)
                read_ahead(locations, length)

            bound.gatherer.read_ahead = record  # type: ignore[method-assign]
        self.registry.note(bound, range(step, step + count), rank=rank, world_size=world)

    def steps_of(self, bound: BoundPlan) -> float:
        """Return the windows that were asked for, in steps of one rank of one."""
        return sum(map(len, self.asked[bound])) / ROWS


def num_threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_of_rows_of_pieces_each_piece_is_asked_for(tmp_path: Path) -> None:
    with Catalog.open(specs(THREE, tmp_path)) as catalog, Disk(2**40) as disk:
        bound = catalog.bind(Plan.from_json(document(THREE, 8)), Budget())
        bound.gatherer.are_resident = lambda locations: False  # type: ignore[method-assign]
        pieces, _ = bound.sampler.pieces(2, range(8), count=bound.sampler.num_steps - 2)
        disk.ask(bound, 2)
        wait_until(lambda: disk.num_bytes >= pieces[:, 2].sum() * 4)
    assert (np.concatenate(disk.asked[bound]) == pieces[:, :2]).all()
    assert disk.num_bytes == pieces[:, 2].sum() * 4


@pytest.mark.parametrize(("rows", "num_looks"), [(32, 64), (33, 33), (512, 64), (1000, 63)])
def test_what_is_resident_by_a_sample_is_not_asked_for(catalog: Catalog, rows: int, num_looks: int) -> None:
    """At most 64 windows of a turn, evenly spread, are looked at: a look is a system call."""
    bound, looked = bind(catalog, rows=rows), list[np.ndarray]()
    bound.gatherer.are_resident = lambda windows: not looked.append(windows)  # type: ignore[method-assign,func-returns-value]
    with Disk(4 * rows * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE)) as disk:  # a step ahead
        disk.ask(bound)
        wait_until(lambda: looked)
        time.sleep(0.05)
        for step in range(1, 50):
            disk.ask(bound, step)
    assert disk.asked == {bound: []}
    assert [len(windows) for windows in looked] == [num_looks]


@pytest.mark.parametrize(("num_ranks", "steps"), [(1, 6), (4, 6), (8, 3)])
def test_readers_share_the_budget_and_a_quarter_is_the_most(
    catalog: Catalog, num_ranks: int, steps: int
) -> None:
    """Of bounded shuffles too large to be read by groups, as of others; each plan has one reader here."""
    plans = [bind(catalog, seed=seed, order=(GROUPED, "shuffle")[seed % 2]) for seed in range(num_ranks)]
    with Disk() as disk:
        for bound in plans:
            disk.ask(bound, 10_000)
        time.sleep(0.1)
        for bound in plans:
            disk.asked[bound].clear()
            disk.ask(bound, 20_000)
        wait_until(lambda: all(disk.steps_of(bound) >= 1 + steps for bound in plans))
    assert {disk.steps_of(bound) for bound in plans} == {1 + steps}


def test_what_groups_take_of_the_budget_others_do_not_get(
    catalog: Catalog, bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the plan of the groups is idle."""
    grouped, now = bind(catalog, order=GROUPED), [0.0]
    with Disk(BUDGET_BYTES + Groups(grouped).num_bytes) as disk:
        disk.ask(grouped)
        wait_until(lambda: disk.num_bytes)
        disk.ask(bound)
        wait_until(lambda: disk.steps_of(bound) >= 1 + HORIZON)
        time.sleep(0.05)
        assert disk.steps_of(bound) == 1 + HORIZON
        real = time.monotonic
        monkeypatch.setattr(registry_module.time, "monotonic", lambda: real() + now[0])
        now[0] = 61.0
        disk.ask(bound, 5000)
        now[0] = 0.0
        wait_until(lambda: disk.steps_of(bound) > 2 * (1 + HORIZON))


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
    with Disk() as disk:
        disk.ask(bound)
        assert hanging.wait(20)
    assert not answered.is_set()
    assert "does the disk or the network file system hang?" in caplog.text
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "prefetch")
    answered.set()
    wait_until(lambda: num_threads() == before)


@pytest.mark.parametrize(
    ("layer", "where"),
    [
        ("sampler", "pieces"),
        ("sampler", "group_extents"),
        ("gatherer", "are_resident"),
        ("gatherer", "read_ahead"),
    ],
)
@pytest.mark.parametrize("failure", [MemoryError, RuntimeError, SystemExit, CorpusChanged])
def test_a_failure_is_logged_once_and_the_thread_goes_on(
    catalog: Catalog,
    layer: str,
    where: str,
    failure: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often the rank asks; other plans are prefetched as before, and this one again after a rest."""
    broken = bind(catalog, seed=7, order=GROUPED if where == "group_extents" else "shuffle")
    bound, times = bind(catalog), list[float]()

    def fail(*_: object, **__: object) -> None:
        times.append(time.monotonic())
        raise failure("nothing is left")

    def ask(step: int) -> None:
        disk.registry.note(broken, range(step, step + 1), rank=0, world_size=1)

    with Disk(2**40) as disk:
        monkeypatch.setattr(getattr(broken, layer), where, fail)
        for step in range(200):
            ask(step)
            time.sleep(0.001)
        wait_until(lambda: "nothing is left" in caplog.text)
        disk.ask(bound, 20_000)
        wait_until(lambda: disk.asked[bound])
        assert len(times) == 1
        real = time.monotonic
        monkeypatch.setattr(prefetch.time, "monotonic", lambda: real() + 11)
        ask(5000)
        wait_until(lambda: len(times) == 2)
    lines = [
        each
        for each in caplog.records
        if each.message.startswith(f"prefetching failed for plan {broken.plan.id}")
    ]
    assert len(lines) == 2
    assert all((each.exc_info is None) == (failure is CorpusChanged) for each in lines), (
        "it says it is unexpected"
    )
