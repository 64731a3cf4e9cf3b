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
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import groups as groups_ahead
from corpus_server.readers.groups import GroupReader, GroupReaders, Piece, group_bytes
from corpus_server.readers.prefetch import Prefetcher
from tests.corpora import open_shard, some_tokens, write_npy, write_raw
from tests.pages import drop, resident_of
from tests.server.readers.test_prefetch import wait_until

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


def shuffled(catalog: Catalog) -> BoundPlan:
    """Return a plan without groups."""
    return catalog.bind(Plan(seq_len=SEQ_LEN, stages=(Stage(global_batch_size=ROWS, mixture={"web": 1.0}),)))


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


def test_after_a_jump_to_the_start_no_group_before_it_is_read(bound: BoundPlan, disk: Disk) -> None:
    asker = Asker(bound)
    for number in range(3):
        asker.request(number * GROUP_STEPS)
    disk.take()
    asker.request(0)
    assert disk.take() == (group(bound, 0), group(bound, 2) + group(bound, 3))


@pytest.mark.parametrize("names", ["", "a", "b", "ab"])
def test_dropping_all_leaves_the_corpora_of_other_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """Of those that are read now: another plan may have begun since the latest look."""
    paths = [write_raw(tmp_path / f"{name}.bin", some_tokens(25_000)) for name in "ab"]
    with Catalog.open([CorpusSpec(name=path.stem, path=path) for path in paths]) as opened:
        stage = Stage(global_batch_size=ROWS, mixture={"a": 0.5, "b": 0.5})
        bound = opened.bind(Plan(seq_len=SEQ_LEN, seed=0, order=ORDER, stages=(stage,)))
        disk = Disk(monkeypatch, bound)
        asker = Asker(bound)
        asker.request(0)
        read, _ = disk.take()
        asker.reader.drop_all([bound.corpora[name] for name in names])
        assert sorted(disk.dropped) == sorted(piece for piece in read if "ab"[piece[0]] not in names)


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
    refused = bind(catalog, 2)
    assert readers.refusal(refused) == (
        f"plan {refused.plan.id}: reading ahead its groups ({ORDER} windows) takes {needed:,} bytes of page "
        f"cache, three groups of each source; read_ahead_bytes is {2 * needed:,}, of which other plans take "
        f"{2 * needed:,}; its windows are read one by one instead, at the rate of random reads; set "
        f"read_ahead_bytes to at least {3 * needed:,}, or choose smaller groups"
    )
    assert readers.num_bytes == 2 * needed


def test_the_groups_of_each_source_take_page_cache(tmp_path: Path) -> None:
    """With its own type of tokens, and of its own windows if they are fewer; a plan needs all of it."""
    paths = [write_raw(tmp_path / "a.bin", some_tokens(25_000))]
    for name, num_tokens in (("b", 25_000), ("c", 2001)):
        path = tmp_path / f"{name}.npy"
        paths.append(write_npy(path, some_tokens(num_tokens, dtype="uint32"), dtype="uint32"))
    with Catalog.open([CorpusSpec(name=path.stem, path=path) for path in paths]) as opened:
        stage = Stage(global_batch_size=ROWS, mixture={"a": 0.5, "b": 0.25, "c": 0.25})
        order = BoundedShuffle(block_windows=10, group_blocks=2)
        plan = Plan(seq_len=SEQ_LEN, seed=0, order=order, stride=50, stages=(stage,))
        tokens = 3 * 20 * 50 + SEQ_LEN
        assert group_bytes(opened.bind(plan)) == 2 * tokens + 4 * tokens + 4 * 2001


@pytest.mark.parametrize(
    ("num_windows", "looked"), [(1, [0, 1, 2]), (7, [*range(15)]), (8, [*range(0, 17, 2)])]
)
def test_some_tokens_tell_whether_a_piece_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_windows: int, looked: list[int]
) -> None:
    """Each of up to fifteen, else eight or a few more, evenly spread."""
    found: list[int] = []
    monkeypatch.setattr(Shard, "is_resident", lambda shard, token: found.append(token) or True)
    with Catalog.open(
        [CorpusSpec(name="web", path=write_raw(tmp_path / "a.bin", some_tokens(1001)))]
    ) as opened:
        order = BoundedShuffle(block_windows=num_windows, group_blocks=1)
        plan = Plan(seq_len=2, order=order, stages=(Stage(global_batch_size=1, mixture={"web": 1.0}),))
        bound = opened.bind(plan)
        (first,) = bound.sampler.group_extents(0, 0)
        Asker(bound).request(0)
    assert found[: len(looked)] == [first[1] + token for token in looked]


def test_a_block_is_read_piece_by_piece(bound: BoundPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_ahead, "_PIECE_TOKENS", 900)
    disk = Disk(monkeypatch, bound)
    asker = Asker(bound)
    asker.reader.note(0, 0.0)
    asker.reader.look(asker.reader.take_steps(0.0), [])
    sizes = []
    while num_bytes := asker.reader.read_piece():
        sizes.append(num_bytes)
    pieces = []
    for shard, start, stop in group(bound, 0) + group(bound, 1):
        firsts = range(start, stop, 900)
        pieces += [(shard, first, min(first + 900, stop)) for first in firsts]
    assert disk.read == pieces
    assert sizes == [2 * (stop - start) for _, start, stop in pieces]
    assert len(pieces) > 8


def test_the_kernel_is_asked_for_what_it_takes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 KiB, 65,536 tokens of two bytes; the last range may reach beyond."""
    asked: list[tuple[list[int], int]] = []
    monkeypatch.setattr(groups_ahead, "read_ahead", lambda at, size: asked.append((at.tolist(), size)))
    with open_shard(write_raw(tmp_path / "a.bin", some_tokens(300_000))) as shard:
        groups_ahead._start_reading(shard, 1000, 1000 + 2 * 65_536 + 1)
        addresses = [shard.address + 2 * (1000 + k * 65_536) for k in range(3)]
    assert asked == [(addresses, 128 << 10)]


def test_a_new_reader_has_read_nothing_and_has_nothing_to_do(bound: BoundPlan) -> None:
    reader = GroupReader(bound)
    assert (reader.num_bytes, reader.seen_seconds) == (group_bytes(bound), 0.0)
    assert not reader.has_work(1e9)
    assert reader.take_steps(1e9) == []
    assert reader.read_piece() == 0


def test_a_reader_that_gave_up_reads_on_after_the_next_request(bound: BoundPlan, disk: Disk) -> None:
    reader = GroupReader(bound)
    reader.note(0, 0.0)
    reader.look(reader.take_steps(0.0), [])
    assert reader.has_work(0.0)
    reader.give_up()
    assert not reader.has_work(100.0)
    reader.note(0, 100.0)
    assert reader.has_work(100.0)
    assert (reader.take_steps(100.0), reader.seen_seconds) == ([0], 100.0)


@pytest.mark.parametrize(("later", "is_due"), [(0.0, False), (0.009, False), (0.01, True), (1.0, True)])
def test_requests_are_looked_at_a_hundredth_of_a_second_apart(
    bound: BoundPlan, later: float, is_due: bool
) -> None:
    reader = GroupReader(bound)
    reader.note(0, 0.0)
    reader.take_steps(0.0)
    reader.note(1, later)
    reader.note(2, later)
    assert reader.has_work(later) == is_due
    assert reader.take_steps(later) == ([1, 2] if is_due else [])


def test_the_reader_whose_turn_it_is_is_the_one_with_work(catalog: Catalog) -> None:
    readers = GroupReaders(2**40)
    assert readers.next(0.0) is None
    first, second = bind(catalog, 0), bind(catalog, 1)
    for bound in (first, second):
        assert readers.note(bound, 0, 0.0)
    taken = [readers.next(0.0)]
    assert taken[0] is not None
    taken[0].take_steps(0.0)
    taken.append(readers.next(0.0))
    assert [each.bound for each in taken if each] == [first, second]
    taken[1].take_steps(0.0)
    assert readers.next(100.0) is None


def test_dropping_all_forgets_what_was_read(bound: BoundPlan, disk: Disk) -> None:
    """What is dropped once is not dropped of another reader's."""
    asker = Asker(bound)
    asker.request(0)
    read, _ = disk.take()
    asker.reader.drop_all([])
    assert disk.take() == ([], read)
    asker.reader.drop_all([])
    assert disk.take() == ([], [])


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


def test_a_group_that_cannot_be_read_is_given_up_and_the_thread_goes_on(
    catalog: Catalog, bound: BoundPlan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(groups_ahead, "_start_reading", fail)
    monkeypatch.setattr(Shard, "is_resident", lambda shard, token: False)
    asked: list[int] = []
    prefetcher = Prefetcher(2**40, on_asked=asked.append)
    prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    wait_until(lambda: "the disk is gone" in caplog.text)
    other = shuffled(catalog)
    other.gatherer.are_resident = lambda locations: False  # type: ignore[method-assign]
    prefetcher.note(other, step=0, count=1, rows=ROWS, rank=0, world_size=1)
    wait_until(lambda: bool(asked))
    prefetcher.close()
    assert caplog.text.count(f"reading ahead failed for plan {bound.plan.id}") == 1


def test_what_came_in_for_a_catalogue_before_it_was_reloaded_is_dropped(
    catalog: Catalog, bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, dropped = list[Shard](), list[Shard]()
    monkeypatch.setattr(groups_ahead, "_start_reading", lambda shard, *part: reading.append(shard))
    monkeypatch.setattr(Shard, "is_resident", lambda shard, token: False)
    monkeypatch.setattr(Shard, "drop", lambda shard, *part: dropped.append(shard))
    (corpus,) = bound.corpora.values()
    with Catalog.open([CorpusSpec(name="web", path=corpus.shards[0].path.parent)]) as reloaded:
        prefetcher = Prefetcher(2 * group_bytes(bound))
        prefetcher.note(bound, step=0, count=1, rows=ROWS, rank=0, world_size=1)
        wait_until(lambda: bool(reading))
        prefetcher.note(bind(reloaded), step=0, count=1, rows=ROWS, rank=0, world_size=1)
        wait_until(lambda: bool(dropped))
        prefetcher.close()
    assert set(map(id, dropped)) <= set(map(id, corpus.shards))


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
    assert not GroupReaders(2**40).note(shuffled(catalog), 0, 0.0)


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
