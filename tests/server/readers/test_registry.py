"""Who reads: when work ahead of a reader begins and ends, how many readers there are, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import Registry
from corpus_server.readers import registry as module
from corpus_server.readers.ahead import Ahead
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_raw


class Subscriber:
    """Remembers what it is told: readers are numbered in the order in which they began."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []  # what, number of the reader, step
        self.work: list[Ahead] = []
        self.ignores = False

    def begin(self, *reader: Any) -> Ahead | None:
        if self.ignores:
            return None
        self.work.append(Ahead(*reader))
        self._tell("begin", self.work[-1])
        return self.work[-1]

    def note(self, work: Ahead) -> None:
        self._tell("note", work)

    def end(self, work: Ahead) -> None:
        assert work.has_ended
        self._tell("end", work)

    def _tell(self, what: str, work: Ahead) -> None:
        self.told.append((what, self.work.index(work) + 1, work.steps.start))

    def take(self) -> list[tuple[str, int, int]]:
        taken, self.told = self.told, []
        return taken


class World:
    """A registry, its clock, and plans over one corpus."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.registry, self.subscriber = Registry(), Subscriber()
        self.registry.add_subscriber(self.subscriber)
        self.now = 1000.0
        self.bound = self.bind()

    def bind(self, seed: int = 0) -> BoundPlan:
        stage = Stage(global_batch_size=8, mixture={"web": 1.0})
        return self.catalog.bind(Plan(seq_len=16, seed=seed, stages=(stage,)), Budget())

    def ask(
        self, step: int, *, rank: int = 0, bound: BoundPlan | None = None, **more: Any
    ) -> module.Reader | None:
        return self.registry.note(bound or self.bound, range(step, step + 2), rank=rank, world_size=8, **more)

    def ranks(self) -> list[int]:
        """Return the ranks that the page shows."""
        return [int(rank) for *_, rank in self.registry.counts()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    path = write_raw(tmp_path / "web.bin", some_tokens(2_000))
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        world = World(catalog)
        monkeypatch.setattr(module.time, "monotonic", lambda: world.now)
        monkeypatch.setattr(module.time, "time", lambda: world.now + 5e8)
        yield world


@pytest.mark.parametrize("how", ["another rank asks", "nobody asks"])
def test_it_ends_after_a_minute_of_silence_and_begins_anew(world: World, how: str) -> None:
    world.ask(7)
    world.now += 60.0
    world.registry.end_idle()
    assert world.subscriber.take() == [("begin", 1, 7), ("note", 1, 7)]
    world.now += 0.1
    if how == "nobody asks":
        world.registry.end_idle()
        assert world.registry.bounds() == set()  # the plan may leave memory
        told = []
    else:
        world.ask(0, rank=1)
        told = [("begin", 2, 0), ("note", 2, 0)]
    assert world.subscriber.take() == [("end", 1, 7), *told]
    world.ask(8)
    assert [what for what, _, _ in world.subscriber.take()] == ["begin", "note"]


def test_a_plan_that_was_bound_anew_is_followed_anew(world: World) -> None:
    """As after the catalogue was reloaded: what was known holds corpora that are closed."""
    world.ask(7)
    again = world.bind()
    world.ask(8, bound=again)
    assert world.subscriber.take()[2:] == [("end", 1, 7), ("begin", 2, 8), ("note", 2, 8)]
    assert world.registry.bounds() == {again}


def test_nothing_is_done_ahead_of_indices_or_where_a_subscriber_has_nothing_to_do(world: World) -> None:
    world.ask(7, reads_tokens=False)
    assert world.registry.bounds() == set()
    world.subscriber.ignores = True
    for step in (8, 9):
        world.ask(step)
    assert world.subscriber.take() == []


def test_nobody_is_told_of_a_quiet_request_until_a_gather_has_waited_for_the_disk(world: World) -> None:
    """Told of each request, a subscriber would cost more than a small response of data in memory."""
    world.ask(7)
    (work,) = world.subscriber.work
    work.quiet, work.num_faults = range(8, 12), world.bound.gatherer.num_faults
    for step in (7, 8, 11, 12):
        world.ask(step)
        assert work.steps.start == step
    world.bound.gatherer.num_faults += 1
    world.ask(9)
    assert world.subscriber.take() == [("begin", 1, 7), *[("note", 1, step) for step in (7, 7, 12, 9)]]


def test_a_full_registry_gives_the_places_of_idle_readers_to_new_ones(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end what is done for one that asks, or each of many would end another's."""
    monkeypatch.setattr(module, "MAX_READERS", 2)

    def ask(step: int, rank: int) -> bool:
        reader = world.ask(step, rank=rank)
        if reader is not None:
            reader.sent(1, making_seconds=0.0, sending_seconds=0.0)
        return reader is not None

    assert [ask(0, rank) for rank in (0, 1, 2, 0)] == [True, True, False, True]
    world.now += 59.0
    assert ask(1, 0)
    world.now += 2.0
    assert set(world.ranks()) == {0, 1}
    assert ask(1, 2)  # takes the place of rank 1, which is silent
    assert set(world.ranks()) == {0, 2}
    assert not ask(1, 1)


def test_what_the_page_shows_of_a_rank_is_the_step_asked_for_last_and_what_was_sent(world: World) -> None:
    """A rank has step 7 and asks for 9 before the response with 7 has ended; idle ranks are shown, too.

    What another run asks for of the same plan is counted by itself.
    """
    first = world.ask(6)
    named = world.ask(30, run="a", trained_step=12)
    assert named is not None
    named.sent(2, making_seconds=0.0, sending_seconds=0.0)
    world.ask(0, rank=1)  # gets nothing
    world.now += 1.5
    second = world.ask(8, reads_tokens=False)
    assert first is not None
    assert first is second
    for making, sending in ((0.5, 0.25), (1.0, 0.5)):
        first.sent(2, making_seconds=making, sending_seconds=sending)
    world.now += 3000.0
    world.registry.end_idle()
    plan = world.bound.plan.id
    expected = {
        ("", plan, "8", "0"): [5e8 + 1001.5, 9.0, -1, 0.0, 0, 5e8 + 1001.5, 4.0, 1.5, 0.75],
        ("a", plan, "8", "0"): [5e8 + 1000, 31.0, 12, 0.0, 0, 0.0, 2.0, 0.0, 0.0],
    }
    assert world.registry.counts() == expected
