"""Reading ahead for bounded shuffles: which groups are read, when they are dropped, and what stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.shards import Shard
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import BoundedShuffle, Plan, Stage
from corpus_server.read import groups_ahead
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.groups_ahead import GroupReader, GroupReaders, Piece, group_bytes
from corpus_server.read.prefetch import Prefetcher
from tests.corpora import some_tokens, write_raw
from tests.pages import drop, resident_of
from tests.server.read.test_prefetch import wait_until

SEQ_LEN, ROWS = 64, 8
ORDER = BoundedShuffle(block_windows=32, group_blocks=4)
GROUP_STEPS = 32 * 4 // ROWS
KEPT = 64  # requests


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    folder = tmp_path / "web"
    folder.mkdir()
    for number, num_tokens in enumerate((20_000, 300, 25_000)):
        write_raw(folder / f"{number}.bin", some_tokens(num_tokens))
    with Catalog.open([CorpusSpec(name="web", path=folder)]) as opened:
        yield opened


def bind(catalog: Catalog, seed: int = 0, order: BoundedShuffle = ORDER) -> BoundPlan:
    stage = Stage(global_batch_size=ROWS, mixture={"web": 1.0})
    return catalog.bind(Plan(seq_len=SEQ_LEN, seed=seed, order=order, stages=(stage,)))


@pytest.fixture
def bound(catalog: Catalog) -> BoundPlan:
    return bind(catalog)


class Disk:
    """Records what shards are asked for instead of asking the kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bound: BoundPlan) -> None:
        self.numbers = {id(shard): number for number, (_, shard) in enumerate(bound.shards)}
        self.read: list[Piece] = []
        self.dropped: list[Piece] = []
        self.resident = False
        monkeypatch.setattr(
            groups_ahead, "_start_reading", lambda shard, *part: self.read.append(self.piece(shard, part))
        )
        monkeypatch.setattr(Shard, "drop", lambda shard, *part: self.dropped.append(self.piece(shard, part)))
        monkeypatch.setattr(Shard, "release", lambda shard, *part: None)
        monkeypatch.setattr(Shard, "is_resident", lambda shard, token: self.resident)

    def piece(self, shard: Shard, part: tuple[int, int]) -> Piece:
        return (self.numbers[id(shard)], *part)

    def take(self) -> tuple[list[Piece], list[Piece]]:
        """Return what was read and dropped since the last call."""
        taken, self.read, self.dropped = (self.read, self.dropped), [], []
        return taken


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, bound: BoundPlan) -> Disk:
    return Disk(monkeypatch, bound)


class Asker:
    """Sends requests to a reader and lets it do all its work."""

    def __init__(self, bound: BoundPlan) -> None:
        self.reader = GroupReader(bound)
        self.now = 0.0
        self.others: list[Corpus] = []

    def request(self, *steps: int) -> None:
        for step in steps:
            self.reader.note(step, self.now)
        assert self.reader.has_work(self.now)
        self.reader.look(self.reader.take_steps(self.now), self.others)
        while self.reader.read_piece():
            pass
        assert not self.reader.has_work(self.now)
        self.now += 1


def group(bound: BoundPlan, number: int) -> list[Piece]:
    return bound.sampler.group_extents(0, number)


def test_the_group_of_a_request_is_read_and_the_next_one_block_by_block(bound: BoundPlan, disk: Disk) -> None:
    Asker(bound).request(GROUP_STEPS * 2 + 3)
    assert disk.take() == (group(bound, 2) + group(bound, 3), [])


def test_the_groups_of_all_sources_that_a_request_is_in_come_before_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps later one source is groups further than the other."""
    paths = [write_raw(tmp_path / f"{name}.bin", some_tokens(25_000)) for name in "ab"]
    with Catalog.open([CorpusSpec(name=path.stem, path=path) for path in paths]) as opened:
        stage = Stage(global_batch_size=ROWS, mixture={"a": 0.8, "b": 0.2})
        bound = opened.bind(Plan(seq_len=SEQ_LEN, seed=0, order=ORDER, stages=(stage,)))
        disk = Disk(monkeypatch, bound)
        Asker(bound).request(60)
        numbers = bound.sampler.group_numbers(60)
        assert numbers[0] > numbers[1] + 1
        now, later = (
            [
                piece
                for source in range(2)
                for piece in bound.sampler.group_extents(source, numbers[source] + k)
            ]
            for k in range(2)
        )
        assert sorted(disk.read[: len(now)]) == sorted(now)
        assert sorted(disk.read[len(now) :]) == sorted(later)


def test_a_group_is_dropped_once_requests_have_left_it_and_again_a_group_later(
    bound: BoundPlan, disk: Disk
) -> None:
    """Late requests of other ranks still find the group in memory."""
    asker = Asker(bound)
    asker.request(0)
    asker.request(GROUP_STEPS)
    assert disk.take() == (group(bound, 0) + group(bound, 1) + group(bound, 2), [])
    asker.request(*[GROUP_STEPS + 1] * (KEPT - 2))
    asker.request(GROUP_STEPS - 1)
    asker.request(*[GROUP_STEPS + 1] * (KEPT - 1))
    assert disk.take() == ([], [])
    asker.request(GROUP_STEPS + 1)
    assert disk.take() == ([], group(bound, 0))
    asker.request(2 * GROUP_STEPS)
    asker.request(*[2 * GROUP_STEPS] * KEPT)
    assert disk.take() == (group(bound, 3), group(bound, 0) + group(bound, 1))


def test_after_a_jump_other_groups_are_read_and_the_old_ones_dropped(bound: BoundPlan, disk: Disk) -> None:
    asker = Asker(bound)
    asker.request(0)
    disk.take()
    asker.request(GROUP_STEPS * 100)
    numbers = bound.sampler.group_numbers(GROUP_STEPS * 100)
    read, dropped = disk.take()
    assert read == group(bound, numbers[0]) + group(bound, numbers[0] + 1)
    assert sorted(dropped) == sorted(group(bound, 0) + group(bound, 1))


def test_a_group_that_was_left_is_dropped_while_the_next_one_is_read(bound: BoundPlan, disk: Disk) -> None:
    """One block for each piece: the disk is not idle while the whole group is dropped."""
    asker = Asker(bound)
    asker.request(0)
    disk.take()
    asker.reader.note(GROUP_STEPS * 100, asker.now)
    asker.reader.look(asker.reader.take_steps(asker.now), [])
    left = group(bound, 0) + group(bound, 1)
    for number in range(1, 4):
        assert asker.reader.read_piece() > 0
        assert len(disk.read) == number
        assert disk.dropped == left[:number]
    while asker.reader.read_piece():
        pass
    assert disk.dropped == left


def test_what_was_in_memory_before_is_neither_read_nor_dropped(bound: BoundPlan, disk: Disk) -> None:
    asker = Asker(bound)
    disk.resident = True
    asker.request(0)
    asker.request(GROUP_STEPS * 100)
    assert disk.take() == ([], [])


def test_nothing_is_dropped_of_a_corpus_that_another_plan_reads(bound: BoundPlan, disk: Disk) -> None:
    asker = Asker(bound)
    asker.others = [bound.corpora["web"]]
    asker.request(0)
    asker.request(GROUP_STEPS * 100)
    asker.reader.drop_all(asker.others)
    assert disk.take()[1] == []


def test_a_look_is_not_taken_for_each_request(bound: BoundPlan) -> None:
    reader = GroupReader(bound)
    reader.note(0, 0.0)
    assert reader.take_steps(0.0) == [0]
    reader.note(1, 0.001)
    assert not reader.has_work(0.001)
    assert reader.take_steps(0.001) == []
    assert reader.take_steps(1.0) == [1]


def test_groups_that_do_not_fit_the_budget_are_refused_with_the_arithmetic(
    catalog: Catalog, bound: BoundPlan
) -> None:
    """Three groups of 128 windows of 64 tokens, 2 bytes each; and one that is larger than the corpus."""
    needed = 2 * (3 * 128 * SEQ_LEN + SEQ_LEN)
    assert group_bytes(bound) == needed
    assert group_bytes(bind(catalog, order=BoundedShuffle(block_windows=2**20, group_blocks=9))) == 90_496
    readers = GroupReaders(2 * needed)
    assert all(readers.note(bind(catalog, seed), 0, 0.0) for seed in (0, 1))
    assert not readers.note(bind(catalog, 2), 0, 0.0)
    refusal = readers.refusal(bind(catalog, 2))
    for part in (f"takes {needed:,} bytes", f"other plans take {2 * needed:,}", f"at least {3 * needed:,}"):
        assert part in refusal


def test_a_cold_plan_whose_groups_are_refused_is_logged_once(
    bound: BoundPlan, caplog: pytest.LogCaptureFixture
) -> None:
    bound.gatherer.are_resident = lambda locations: False  # type: ignore[method-assign]
    asked: list[int] = []
    prefetcher = Prefetcher(group_bytes(bound) - 1, on_asked=asked.append)
    for step in (0, 1000):
        asked.clear()
        prefetcher.note(bound, step=step, count=1, rows=1, rank=0, world_size=ROWS)
        wait_until(lambda: bool(asked))
    prefetcher.close()
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1
    assert "its windows are read one by one instead" in warnings[0]


def test_an_idle_plan_gives_its_budget_back(catalog: Catalog) -> None:
    readers = GroupReaders(group_bytes(bind(catalog)))
    assert readers.note(bind(catalog, 0), 0, 0.0)
    assert not readers.note(bind(catalog, 1), 0, 60.0)
    assert readers.note(bind(catalog, 1), 0, 61.0)
    idle = readers.next_idle()
    assert idle is not None
    assert idle.bound.plan.seed == 0
    assert readers.next_idle() is None


def test_a_plan_that_is_still_read_outlives_an_idle_one(catalog: Catalog) -> None:
    readers = GroupReaders(2 * group_bytes(bind(catalog)))
    idle, read = bind(catalog, 0), bind(catalog, 1)
    assert readers.note(idle, 0, 0.0)
    assert readers.note(read, 0, 59.0)
    assert not readers.note(bind(catalog, 2), 0, 60.0)
    assert readers.note(bind(catalog, 2), 0, 61.0)
    assert [bound.plan.seed for bound in readers.bounds()] == [1, 2]
    given_back = readers.next_idle()
    assert given_back is not None
    assert given_back.bound is idle
    assert readers.next_idle() is None


def test_a_plan_that_is_bound_anew_is_read_anew(catalog: Catalog) -> None:
    """As after the catalogue was reloaded; what the old one brought in is dropped."""
    readers = GroupReaders(2 * group_bytes(bind(catalog)))
    old, new = bind(catalog), bind(catalog)
    assert readers.note(old, 0, 0.0)
    assert readers.note(new, 0, 0.0)
    assert [bound is new for bound in readers.bounds()] == [True]
    given_back = readers.next_idle()
    assert given_back is not None
    assert given_back.bound is old


def test_other_orders_have_no_groups(catalog: Catalog) -> None:
    plan = Plan(seq_len=SEQ_LEN, stages=(Stage(global_batch_size=ROWS, mixture={"web": 1.0}),))
    assert not GroupReaders(2**40).note(catalog.bind(plan), 0, 0.0)


def test_the_extents_of_groups_hold_every_window_of_their_steps(bound: BoundPlan) -> None:
    sampler = bound.sampler
    for step in range(300):
        number = sampler.group_numbers(step)[0]
        extents = group(bound, number) + group(bound, number + 1)
        for shard, start in sampler.locate(step)[0].tolist():
            assert any(shard == s and low <= start < start + SEQ_LEN + 1 <= high for s, low, high in extents)


def test_groups_come_from_the_disk_and_leave_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 blocks of 1 MiB, two to a group, through the thread and the kernel."""
    monkeypatch.setattr(groups_ahead, "_KEPT_REQUESTS", 2)
    path = write_raw(tmp_path / "web.bin", some_tokens(2**23 + 1))
    drop(path)
    stage = Stage(global_batch_size=32, mixture={"web": 1.0})
    plan = Plan(seq_len=1024, order=BoundedShuffle(block_windows=512, group_blocks=2), stages=(stage,))
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        bound = catalog.bind(plan)
        prefetcher = Prefetcher(2**30)

        def share(number: int) -> float:
            pages = resident_of(path)
            extents = [
                (start // 2048, stop // 2048) for _, start, stop in bound.sampler.group_extents(0, number)
            ]
            return float(np.mean(np.concatenate([pages[low:high] for low, high in extents])))

        def ask(step: int) -> None:
            prefetcher.note(bound, step=step, count=1, rows=32, rank=0, world_size=1)

        ask(0)
        wait_until(lambda: share(0) == share(1) == 1)
        assert share(3) < 0.1
        bound.gatherer.gather(bound.sampler.locate(0)[0], 1025, bound.dtype)  # maps its pages

        def left() -> bool:
            ask(64)
            return share(3) == 1 and share(0) < 0.1

        wait_until(left)
        prefetcher.close()


def test_a_closed_shard_is_neither_read_nor_dropped(bound: BoundPlan, catalog: Catalog) -> None:
    shard = bound.shards[0][1]
    catalog.close()
    groups_ahead._start_reading(shard, 0, 100)
    shard.release(0, 100)
    shard.drop(0, 100)
