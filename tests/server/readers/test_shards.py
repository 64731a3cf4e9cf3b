"""Which shards are planned for the ranks that ask, and when they may leave the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import shards as planned_shards
from corpus_server.readers.shards import Follower, PlannedShards
from corpus_server.stores import StagedFile
from tests.corpora import some_tokens
from tests.stores import WebServer

pytest.importorskip("obstore")

LIMIT = 1000


class Shard:
    """A shard of an object store, which is told when it may leave the cache."""

    def __init__(self, size_bytes: int = 100) -> None:
        self.size_bytes = size_bytes
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


def until(steps: dict[Shard, int]) -> dict[StagedFile, int]:
    return cast("dict[StagedFile, int]", steps)


@pytest.fixture
def planned() -> PlannedShards:
    return PlannedShards(LIMIT)


def note(planned: PlannedShards, step: int, *, count: int = 1, rank: int = 0, now: float = 0.0) -> bool:
    bound = cast("BoundPlan", SimpleNamespace(plan=SimpleNamespace(id="p")))
    return planned.note(bound, step=step, count=count, rank=rank, world_size=2, now=now)


def follower_of(planned: PlannedShards, step: int = 0, **asked: Any) -> Follower:
    """Note a request and return its rank, which must be the one that looks ahead next."""
    note(planned, step, **asked)
    follower = planned.next_follower()
    assert follower is not None
    assert (follower.step, follower.rank) == (step, asked.get("rank", 0))
    return follower


def test_a_new_rank_is_planned_for_from_its_request_on(planned: PlannedShards) -> None:
    follower = follower_of(planned, 7, now=3.0)
    bound = follower.bound
    fields = {field.name: getattr(follower, field.name) for field in dataclasses.fields(Follower)}
    asked = {"bound": bound, "rank": 0, "world_size": 2, "step": 7, "next": 7}
    rest = {"until": {}, "waits": None, "part_windows": 16_384, "rows": 1, "is_gone": False}
    assert fields == {**asked, **rest, "margin": 4, "wake_at": 8, "seen_seconds": 3.0}
    unasked = Follower(bound, 0, 2, 7, 7)
    assert (unasked.margin, unasked.wake_at, unasked.seen_seconds) == (0, 0, 0.0)


def test_a_shard_is_planned_until_no_rank_reads_it(planned: PlannedShards) -> None:
    both, own = Shard(), Shard()
    first = follower_of(planned)
    planned.extend(first, 0, 50, until({both: 40, own: 50}))
    second = follower_of(planned, rank=1)
    planned.extend(second, 0, 50, until({both: 20}))
    assert planned.files() == [both, own]
    for each in (both, own, Shard()):
        planned.add_present(cast("StagedFile", each))
    assert planned.present == {both, own}
    note(planned, 20 + 4, rank=1)
    planned.next_follower()
    assert (planned.files(), both.num_released) == ([both, own], 0)
    note(planned, 40 + 4 - 1)
    planned.next_follower()
    assert both.num_released == 0
    note(planned, 40 + 4)
    planned.next_follower()
    assert (planned.files(), planned.present, both.num_released) == ([own], {own}, 1)


def test_a_few_requests_back_count_as_planned_unless_room_is_needed(planned: PlannedShards) -> None:
    shard = Shard()
    planned.extend(follower_of(planned), 0, 30, until({shard: 10}))
    note(planned, 10 + 4 * 3 - 1, count=3)
    planned.next_follower()
    assert planned.files() == [shard]
    note(planned, 9, count=3)
    planned.forget_margins()
    assert planned.files() == [shard]
    note(planned, 10, count=3)
    planned.forget_margins()
    assert (planned.files(), shard.num_released) == ([], 1)


def test_a_rank_that_goes_far_back_begins_anew(planned: PlannedShards) -> None:
    shard = Shard()
    follower = follower_of(planned, 100)
    planned.extend(follower, 100, 150, until({shard: 150}))
    note(planned, 96)
    assert not follower.is_gone
    note(planned, 91)
    assert follower.is_gone
    assert (planned.files(), shard.num_released) == ([], 1)
    planned.extend(follower, 150, 200, until({shard: 200}))  # it was being located meanwhile
    assert planned.files() == []
    assert follower_of(planned, 91).next == 91


def test_a_rank_that_is_faster_than_planning_is_not_planned_for_the_past(planned: PlannedShards) -> None:
    follower = follower_of(planned)
    assert note(planned, 7)
    assert follower.next == 7
    shard = Shard()
    planned.extend(follower, 0, 10, until({shard: 10}))  # begun before the request
    assert (planned.files(), follower.next) == ([], 7)


def test_looking_ahead_is_due_again_after_a_sixteenth(planned: PlannedShards) -> None:
    assert note(planned, 0)
    planned.extend(follower_of(planned), 0, 240, until({}))
    planned.next_follower()
    assert [step for step in range(1, 20) if note(planned, step)] == [16, 17, 18, 19]


def test_who_has_looked_least_far_ahead_is_next(planned: PlannedShards) -> None:
    planned.extend(follower_of(planned), 0, 10, until({}))
    second = follower_of(planned, rank=1)
    planned.extend(second, 0, 16, until({}))
    first = planned.next_follower()
    assert first is not None
    assert first.rank == 0
    planned.extend(first, 10, 30, until({}))
    assert planned.next_follower() is second
    for each in (first, second):
        each.rows = planned_shards._MAX_WINDOWS // 16
    assert planned.next_follower() is None  # both have planned as many windows as they may


def test_what_does_not_fit_is_located_in_smaller_parts_and_then_waits(planned: PlannedShards) -> None:
    here, large = Shard(700), Shard(301)
    follower = follower_of(planned)
    planned.extend(follower, 0, 10, until({here: 10}))
    whole = follower.part_windows
    planned.extend(follower, 10, 20, until({here: 12, large: 20}))
    assert (follower.part_windows, follower.next, planned.files()) == (whole // 4, 10, [here])
    assert planned.next_follower() is follower
    planned.extend(follower, 10, 12, until({here: 12, large: 11}))
    assert (follower.part_windows, follower.waits) == (whole // 16, None)
    follower.part_windows = whole // 4
    planned.extend(follower, 10, 11, until({large: 11}))
    assert (follower.part_windows, follower.waits) == (whole // 4, {large})
    note(planned, 10)
    assert follower.waits == {large}
    assert planned.next_follower() is None
    note(planned, 10 + 4)  # `here` may go
    assert planned.next_follower() is follower
    planned.extend(follower, 14, 15, until({large: 15}))
    assert (planned.files(), follower.part_windows) == ([large], whole // 2)
    planned.extend(follower, 15, 16, until({Shard(699): 16}))
    assert follower.waits is None
    assert follower.part_windows == whole
    planned.extend(follower, 16, 17, until({}))
    assert follower.part_windows == whole


def test_silent_ranks_are_forgotten(planned: PlannedShards) -> None:
    shard = Shard()
    planned.extend(follower_of(planned, now=5.0), 0, 10, until({shard: 10}))
    planned.forget_idle(5.0 + planned_shards._IDLE_SECONDS)
    assert planned.files() == [shard]
    planned.forget_idle(5.1 + planned_shards._IDLE_SECONDS)
    assert (planned.files(), planned.next_follower()) == ([], None)


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoundPlan]:
    names = ("a", "b", "c")
    with WebServer({f"/{name}.bin": some_tokens(3000).tobytes() for name in names}) as server:
        specs = [CorpusSpec.parse(f"{name}={server.url}/{name}.bin") for name in names]
        local = tmp_path_factory.mktemp("local") / "d.bin"
        local.write_bytes(some_tokens(3000).tobytes())
        specs.append(CorpusSpec(name="d", path=local))
        with Catalog.open(specs, cache_dir=Path(tmp_path_factory.mktemp("cache"))) as opened:
            mixture = {"a": 0.05, "b": 0.05, "c": 0.05, "d": 0.85}
            stage = Stage(global_batch_size=6, mixture=mixture)
            yield opened.bind(Plan(seq_len=10, seed=3, order="random", stages=(stage,)))


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (5, 6), (0, 1)])
@pytest.mark.parametrize("first", [0, 1000])
def test_the_shards_of_steps_are_those_of_their_rows(
    bound: BoundPlan, first: int, rank: int, world_size: int
) -> None:
    """Each with the step after the last that reads it, first used first; local files are not staged."""
    rows = 6 // world_size
    follower = Follower(bound, rank, world_size, first, first, part_windows=60)
    after, found = follower.locate(first)
    assert after == first + 60 // rows
    assert follower.rows == rows
    first_row: dict[StagedFile, int] = {}
    expected: dict[StagedFile, int] = {}
    for step in range(first, after):
        located = bound.sampler.locate(step, rank=rank, world_size=world_size)[0]
        for row, (number, _) in enumerate(located.tolist()):
            if (file := bound.staged[number]) is not None:
                first_row.setdefault(file, rows * step + row)
                expected[file] = step + 1
    assert found == expected
    assert list(found) == sorted(first_row, key=lambda file: first_row[file])
    assert np.unique(list(expected.values())).size > 1


def test_a_rank_that_has_no_further_step_is_not_planned_for_ever(bound: BoundPlan) -> None:
    """Four ranks cannot share six rows: steps without rows count as if they had one."""
    planned = PlannedShards(LIMIT)
    planned.note(bound, step=0, count=1, rank=0, world_size=4, now=0.0)
    turns = 0
    while (follower := planned.next_follower()) is not None:
        after, found = follower.locate(follower.next)
        assert (after, found) == (follower.next + planned_shards._PART_WINDOWS, {})
        planned.extend(follower, follower.next, after, found)
        turns += 1
        assert turns * planned_shards._PART_WINDOWS <= planned_shards._MAX_WINDOWS
    assert turns > 0
