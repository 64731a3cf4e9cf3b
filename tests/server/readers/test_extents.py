"""Which extents are planned for the ranks that ask, and when they may leave the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.pieces import Pieces
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import extents as module
from corpus_server.readers.extents import PlannedExtents, RankExtents
from corpus_server.stores import Extent, is_staged
from corpus_server.work import Budget
from tests.corpora import some_tokens
from tests.stores import WebServer

LIMIT = 1000
EXTENT_BYTES = 4096  # so a file of 3,000 tokens has two


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    pytest.importorskip("obstore")
    names = ("a", "b", "c")
    with WebServer({f"/{name}.bin": some_tokens(3000).tobytes() for name in names}) as server:
        specs = [CorpusSpec.parse(f"{name}={server.url}/{name}.bin") for name in names]
        local = tmp_path_factory.mktemp("local") / "d.bin"
        local.write_bytes(some_tokens(3000).tobytes())
        specs.append(CorpusSpec(name="d", path=local))
        with Catalog.open(
            specs, cache_dir=Path(tmp_path_factory.mktemp("cache")), extent_bytes=EXTENT_BYTES
        ) as opened:
            yield opened


def bind(catalog: Catalog, *batch_sizes: int) -> BoundPlan:
    """Return a plan whose batch size changes every 1,000 steps."""
    mixture = {"a": 0.05, "b": 0.05, "c": 0.05, "d": 0.85}
    stages = tuple(
        Stage(from_step=1000 * number, global_batch_size=size, mixture=mixture)
        for number, size in enumerate(batch_sizes)
    )
    return catalog.bind(Plan(seq_len=10, seed=3, order="random", stages=stages), Budget())


def extents_of(bound: BoundPlan, number: int, start: int, stop: int) -> list[Extent]:
    """Return what tokens of a shard lie in, by looking at each byte."""
    file = bound.shards[number][1].file
    if not is_staged(file):
        return []
    numbers = sorted({byte // EXTENT_BYTES for byte in range(2 * start, 2 * stop)})
    return [file.extents[number] for number in numbers]


def rank_of(bound: BoundPlan, step: int, rank: int = 0, world_size: int = 1) -> RankExtents:
    return RankExtents(bound, rank, world_size, range(step, step + 1))


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (5, 6), (0, 1)])
@pytest.mark.parametrize(("first", "part_windows"), [(0, 60), (1000, 60), (1000, 4)])
def test_the_extents_of_steps_are_those_of_their_rows(
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
    first_row: dict[Extent, int] = {}
    expected: dict[Extent, int] = {}
    for step in range(first, first + part.num_steps):
        located = bound.sampler.locate(step, rank=rank, world_size=world_size)[0]
        for row, (number, start) in enumerate(located.tolist()):
            for extent in extents_of(bound, number, start, start + 11):
                first_row.setdefault(extent, rows * step + row)
                expected[extent] = step + 1
    assert part.uses == expected
    assert part.begins == {extent: row // rows for extent, row in first_row.items()}
    assert list(part.uses) == sorted(first_row, key=lambda extent: first_row[extent])


@pytest.mark.parametrize("sizes", [(1, 2**20), (2**20, 1), (1,), (4,)])
def test_what_is_planned_and_located_at_once_is_bounded_in_windows(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """Batches may grow or shrink a millionfold from one step to the next."""
    monkeypatch.setattr(module, "_MAX_WINDOWS", 2**17)
    monkeypatch.setattr(module, "_STANDS_FOR", 1)
    bound, located = bind(catalog, *sizes), list[int]()
    pieces = bound.sampler.pieces

    def locate(step: int, rows: range, *, count: int = 1, world_size: int = 1) -> Pieces:
        located.append(len(rows) * count)
        return pieces(step, rows, count=count, world_size=world_size)

    monkeypatch.setattr(bound.sampler, "pieces", locate)
    planned, rank = PlannedExtents(LIMIT * LIMIT), rank_of(bound, 999)
    planned.add(rank)
    while planned.next_rank(0.0) is not None:
        planned.extend(rank, rank.locate())
    assert max(located) <= 16_384
    assert 2**17 <= sum(located) <= 2**17 + max(sizes)


def test_steps_that_read_all_extents_stand_for_steps_after_them(catalog: Catalog) -> None:
    """Not for ever: another stage may read others. Until then no extent leaves the plan."""
    bound = bind(catalog, 4)
    planned, rank = PlannedExtents(LIMIT * LIMIT), rank_of(bound, 0)
    planned.add(rank)
    located = rank.locate()
    assert located.reads_all
    planned.extend(rank, located)
    assert 16 * located.num_steps < rank.next <= 64 * located.num_steps
    for step in range(0, rank.next + 1, rank.next // 8):
        rank.steps = range(step, step + 1)
        planned.next_rank(0.0)
        assert set(planned.extents()) == set(located.uses)
    rank.steps = range(rank.next + 4, rank.next + 5)
    planned.next_rank(0.0)
    assert not planned.extents()


def test_steps_that_miss_an_extent_stand_for_no_others(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_LOCATED", 8)
    planned, rank = PlannedExtents(LIMIT * LIMIT), rank_of(bind(catalog, 4), 0)
    planned.add(rank)
    located = rank.locate()
    assert not located.reads_all
    planned.extend(rank, located)
    assert rank.next == located.num_steps == 2


def test_a_rank_that_has_no_further_step_is_not_planned_for_ever(catalog: Catalog) -> None:
    """Four ranks cannot share six rows: steps without rows count as if they had one."""
    planned, rank = PlannedExtents(LIMIT), rank_of(bind(catalog, 6), 0, 0, 4)
    planned.add(rank)
    turns = 0
    while planned.next_rank(0.0) is not None:
        part = rank.locate()
        assert part.uses == {}
        planned.extend(rank, part)
        turns += 1
    assert 0 < turns <= 2**22 // 16_384
