"""Which shards are planned for the ranks that ask, and when they may leave the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import shards as module
from corpus_server.readers.shards import PlannedShards, RankShards
from corpus_server.stores import StagedFile
from tests.corpora import some_tokens
from tests.server.readers.fakes import FakePlan, Shard, as_bound, files
from tests.stores import WebServer

LIMIT = 1000


class Asker:
    """Asks as ranks of a plan, and plans as the thread does. Step k reads the shard k of 100 bytes."""

    def __init__(self, *shards: Shard) -> None:
        self.plan = FakePlan(*(shards or [Shard(size_bytes=100) for _ in range(30)]))
        self.planned = PlannedShards(LIMIT)
        self.ranks: dict[int, RankShards] = {}

    def note(self, step: int, *, rank: int = 0, count: int = 1) -> bool:
        steps = range(step, step + count)
        if rank not in self.ranks:
            self.ranks[rank] = RankShards(as_bound(self.plan), rank, 2, steps)
            self.planned.add(self.ranks[rank])
        self.ranks[rank].steps = steps
        return step not in self.ranks[rank].quiet

    def ask(self, step: int, **more: int) -> list[int]:
        """Note a request and plan until nothing more fits; return the numbers of the planned shards."""
        self.note(step, **more)
        while (rank := self.planned.next_rank(0.0)) is not None:
            self.planned.extend(rank, rank.locate())
        return self.numbers()

    def numbers(self) -> list[int]:
        found = self.planned.files()
        return [number for number, file in enumerate(files(*self.plan.shards)) if file in found]


def test_as_many_shards_are_planned_as_the_cache_holds_and_four_requests_back_are_kept() -> None:
    asker = Asker()
    assert asker.ask(7) == list(range(7, 17))
    assert asker.ask(11) == list(range(7, 17))
    assert asker.ask(12) == list(range(8, 18))
    assert [shard.num_released for shard in asker.plan.shards[6:10]] == [0, 1, 0, 0]
    asker.planned.drop_margins()  # room is needed
    assert asker.numbers() == list(range(12, 18))
    assert asker.ask(12) == list(range(12, 22))
    assert asker.ask(20, count=2) == list(range(12, 22))


def test_a_shard_is_planned_until_no_rank_reads_it() -> None:
    asker = Asker()
    asker.ask(0)
    assert asker.ask(2, rank=1) == list(range(10))
    assert asker.ask(9, rank=1) == list(range(10))
    assert asker.ask(8) == list(range(4, 14))
    asker.ranks[0].has_ended = True
    assert asker.ask(9, rank=1) == list(range(5, 15))


def test_absent_are_the_planned_shards_that_nobody_has_found_read_soonest_first() -> None:
    asker = Asker()
    asker.ask(3)
    staged = files(*asker.plan.shards)
    assert list(asker.planned.absent) == staged[3:13]
    del asker.planned.absent[staged[4]]
    asker.ask(8)
    assert list(asker.planned.absent) == staged[5:14]
    asker.planned.note_absent([staged[4], staged[3]])  # the second one is not planned any more
    assert list(asker.planned.absent) == [*staged[5:14], staged[4]]


def test_a_rank_that_goes_back_begins_anew() -> None:
    asker = Asker()
    asker.ask(20)
    asker.note(16)  # late
    assert asker.numbers() == list(range(20, 30))
    assert asker.ask(3) == list(range(3, 13))
    assert {shard.num_released for shard in asker.plan.shards[20:]} == {1}


def test_a_rank_that_is_faster_than_planning_is_not_planned_for_the_past() -> None:
    asker = Asker()
    asker.note(0)
    assert asker.ask(7) == list(range(7, 17))


def test_shards_too_large_for_what_is_left_wait_for_room() -> None:
    asker = Asker(*[Shard(size_bytes=size) for size in (700, 301, 1, 699, 1000)])
    assert asker.ask(0) == [0]
    assert asker.ask(1) == [0]
    assert asker.planned.next_rank(0.0) is None
    asker.planned.drop_margins()
    assert asker.ask(1) == [1, 2]
    asker.planned.drop_margins()
    assert asker.ask(2) == [1, 2]  # kept: it may still be received
    asker.planned.drop_margins()
    assert asker.ask(2) == [2, 3]


def test_looking_ahead_is_due_again_after_a_sixteenth() -> None:
    asker = Asker()
    assert asker.note(0)
    asker.planned.extend(asker.ranks[0], asker.ranks[0].locate()._replace(num_steps=240, uses={}))
    asker.planned.next_rank(0.0)
    assert [step for step in range(1, 20) if asker.note(step)] == [16, 17, 18, 19]


def test_who_has_looked_least_far_ahead_is_next_unless_it_rests() -> None:
    asker = Asker()
    asker.note(0)
    asker.planned.extend(asker.ranks[0], asker.ranks[0].locate()._replace(num_steps=10, uses={}))
    asker.note(5, rank=1)
    assert asker.planned.next_rank(0.0) is asker.ranks[1]
    asker.planned.extend(asker.ranks[1], asker.ranks[1].locate()._replace(num_steps=11, uses={}))
    assert asker.planned.next_rank(0.0) is asker.ranks[0]
    asker.ranks[0].rests_until = 1.0
    assert asker.planned.next_rank(0.0) is asker.ranks[1]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    pytest.importorskip("obstore")
    names = ("a", "b", "c")
    with WebServer({f"/{name}.bin": some_tokens(3000).tobytes() for name in names}) as server:
        specs = [CorpusSpec.parse(f"{name}={server.url}/{name}.bin") for name in names]
        local = tmp_path_factory.mktemp("local") / "d.bin"
        local.write_bytes(some_tokens(3000).tobytes())
        specs.append(CorpusSpec(name="d", path=local))
        with Catalog.open(specs, cache_dir=Path(tmp_path_factory.mktemp("cache"))) as opened:
            yield opened


def bind(catalog: Catalog, *batch_sizes: int) -> BoundPlan:
    """Return a plan whose batch size changes every 1,000 steps."""
    mixture = {"a": 0.05, "b": 0.05, "c": 0.05, "d": 0.85}
    stages = tuple(
        Stage(from_step=1000 * number, global_batch_size=size, mixture=mixture)
        for number, size in enumerate(batch_sizes)
    )
    return catalog.bind(Plan(seq_len=10, seed=3, order="random", stages=stages))


def rank_of(bound: BoundPlan, step: int, rank: int = 0, world_size: int = 1) -> RankShards:
    return RankShards(bound, rank, world_size, range(step, step + 1))


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (5, 6), (0, 1)])
@pytest.mark.parametrize(("first", "part_windows"), [(0, 60), (1000, 60), (1000, 4)])
def test_the_shards_of_steps_are_those_of_their_rows(
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    part_windows: int,
    rank: int,
    world_size: int,
) -> None:
    """Each with the step after the last that reads it, first used first; local files are not staged."""
    monkeypatch.setattr(module, "_MAX_LOCATED", part_windows)  # 4: a step is located in several ranges
    bound, rows = bind(catalog, 6), 6 // world_size
    part = rank_of(bound, first, rank, world_size).locate()
    assert (part.num_steps, part.step_windows) == (max(1, part_windows // rows), rows)
    first_row: dict[StagedFile, int] = {}
    expected: dict[StagedFile, int] = {}
    for step in range(first, first + part.num_steps):
        located = bound.sampler.locate(step, rank=rank, world_size=world_size)[0]
        for row, (number, _) in enumerate(located.tolist()):
            for file in bound.staged[number]:
                first_row.setdefault(file, rows * step + row)
                expected[file] = step + 1
    assert part.uses == expected
    assert list(part.uses) == sorted(first_row, key=lambda file: first_row[file])


@pytest.mark.parametrize("sizes", [(1, 2**20), (2**20, 1), (1,), (4,)])
def test_what_is_planned_and_located_at_once_is_bounded_in_windows(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Batches may grow or shrink a millionfold from one step to the next."""
    monkeypatch.setattr(module, "_MAX_WINDOWS", 2**17)
    bound, located = bind(catalog, *sizes), list[int]()
    locate_rows = bound.sampler.locate_rows

    def locate(step: int, rows: range, *, count: int = 1) -> np.ndarray:
        located.append(len(rows) * count)
        return locate_rows(step, rows, count=count)

    monkeypatch.setattr(bound.sampler, "locate_rows", locate)
    planned, rank = PlannedShards(LIMIT * LIMIT), rank_of(bound, 999)
    planned.add(rank)
    while planned.next_rank(0.0) is not None:
        planned.extend(rank, rank.locate())
    assert max(located) <= 16_384
    assert 2**17 <= sum(located) <= 2**17 + max(sizes)


def test_a_rank_that_has_no_further_step_is_not_planned_for_ever(catalog: Catalog) -> None:
    """Four ranks cannot share six rows: steps without rows count as if they had one."""
    planned, rank = PlannedShards(LIMIT), rank_of(bind(catalog, 6), 0, 0, 4)
    planned.add(rank)
    turns = 0
    while planned.next_rank(0.0) is not None:
        part = rank.locate()
        assert part.uses == {}
        planned.extend(rank, part)
        turns += 1
    assert 0 < turns <= 2**22 // 16_384
