"""What is read ahead: which steps of which rank, how far, and when it begins anew or is left alone."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.plan.stage import MAX_STEP
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import windows as readers
from corpus_server.readers.windows import Reader, Readers, Turn
from tests.corpora import some_tokens, write_raw

ROWS, SEQ_LEN = 4, 16
STEP_BYTES = ROWS * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE)
HORIZON = 10


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    path = write_raw(tmp_path_factory.mktemp("readers") / "web.bin", some_tokens(20_000))
    with Catalog.open([CorpusSpec(name="web", path=path)]) as opened:
        yield opened


def bind(catalog: Catalog, *batch_sizes: int, seed: int = 0) -> BoundPlan:
    """Return a plan whose batch size changes every 20 steps."""
    stages = tuple(
        Stage(from_step=20 * number, global_batch_size=size, mixture={"web": 1.0})
        for number, size in enumerate(batch_sizes)
    )
    return catalog.bind(Plan(seq_len=SEQ_LEN, seed=seed, stages=stages))


@pytest.fixture
def bound(catalog: Catalog) -> BoundPlan:
    return bind(catalog, ROWS)


class Asker:
    """Sends requests to readers and serves their turns as the thread does, without a disk."""

    def __init__(self, *, horizon: int = HORIZON, budget_bytes: int | None = None) -> None:
        self.readers = Readers(4 * horizon * STEP_BYTES if budget_bytes is None else budget_bytes)
        self.now = 0.0

    def request(self, bound: BoundPlan, step: int, count: int = 1, *, rank: int = 0, world: int = 1) -> None:
        rows = bound.sampler.check_part(step, count=count, rank=rank, world_size=world)
        self.readers.note(bound, step=step, count=count, rows=rows, rank=rank, world_size=world, now=self.now)

    def turn(self, *, resident: bool = False) -> tuple[Reader, range] | None:
        """Serve one turn; return whose it was and the steps that were asked for."""
        reader = self.readers.next()
        if reader is None:
            return None
        block = reader.next_turn()
        _, after = block.locate()
        wanted = reader.finish(block, after, warm=block.samples and resident)
        return reader, range(block.first, after if wanted else block.first)

    def turns(self, *, resident: bool = False) -> list[int]:
        """Serve turns until nobody wants any; return the steps asked for."""
        steps: list[int] = []
        while (turn := self.turn(resident=resident)) is not None:
            steps += turn[1]
        return steps


def test_a_new_reader_gets_its_own_windows_and_the_next_ones(bound: BoundPlan) -> None:
    asker = Asker()
    asker.request(bound, 100, 3)
    assert asker.turns() == list(range(100, 103 + HORIZON))
    assert asker.turns() == []


def test_the_next_requests_extend_it_without_asking_twice(bound: BoundPlan) -> None:
    """In stretches of at least half a horizon, so that most requests do nothing."""
    asker = Asker()
    steps, stretches = [], 0
    for step in range(0, 60, 2):
        asker.request(bound, step, 2)
        asked = asker.turns()
        stretches += bool(asked)
        steps += asked
        assert step + 2 + HORIZON // 2 <= len(steps) <= step + 2 + HORIZON
    assert steps == list(range(len(steps)))
    assert stretches <= 60 / (HORIZON // 2)


def test_a_reader_that_went_faster_than_the_disk_is_caught_up_with(bound: BoundPlan) -> None:
    """What it has got already is not asked for."""
    asker = Asker()
    for step in range(0, 36, 4):
        asker.request(bound, step, 4)
    assert asker.turns() == list(range(32, 36 + HORIZON))


@pytest.mark.parametrize("to", [500, 31, 0], ids=["forwards", "a-little-forwards", "backwards"])
def test_after_a_jump_it_begins_anew(bound: BoundPlan, to: int) -> None:
    asker = Asker()
    for step in (0, 9, 18):
        asker.request(bound, step)
        asker.turns()
    asker.request(bound, 100)
    asker.turns()
    asker.request(bound, to)
    assert asker.turns() == list(range(to, to + 1 + HORIZON))


def test_a_request_that_comes_again_or_late_asks_for_nothing(bound: BoundPlan) -> None:
    asker = Asker()
    for step in (0, 8):
        asker.request(bound, step, 8)
        asker.turns()
    for step in (8, 0):
        asker.request(bound, step, 8)
        assert asker.turns() == []


def test_a_jump_ends_what_was_being_asked_for(bound: BoundPlan) -> None:
    """A turn that was taken before the request is of no use after it."""
    asker = Asker()
    asker.request(bound, 0)
    reader = asker.readers.next()
    assert reader is not None
    block = reader.next_turn()
    _, after = block.locate()
    asker.request(bound, 700)
    assert not reader.finish(block, after, warm=True)
    assert not reader.warm
    assert asker.turns() == list(range(700, 701 + HORIZON))


@pytest.mark.parametrize(
    ("to", "warm"),
    [(0, True), (1, True), (11, True), (12, False)],
    ids=["same", "within", "at its end", "behind"],
)
def test_what_a_turn_found_resident_holds_for_requests_within_it(
    bound: BoundPlan, to: int, warm: bool
) -> None:
    asker = Asker()
    asker.request(bound, 0)
    reader = asker.readers.next()
    assert reader is not None
    block = reader.next_turn()
    assert (block.first, block.stop, block.samples) == (0, 1 + HORIZON, True)
    asker.request(bound, to)
    assert not reader.finish(block, block.stop, warm=True)
    assert reader.warm == warm


@pytest.mark.parametrize(
    ("to", "asked"), [(90, []), (89, [*range(89, 90 + HORIZON)]), (111, [*range(111, 112 + HORIZON)])]
)
def test_a_jump_back_is_of_more_than_two_horizons(bound: BoundPlan, to: int, asked: list[int]) -> None:
    """Late requests of other connections come out of order."""
    asker = Asker()
    asker.request(bound, 100)
    assert asker.turns() == list(range(100, 101 + HORIZON))
    asker.request(bound, to)
    assert asker.turns() == asked


@pytest.mark.parametrize(("to", "asked"), [(4, []), (5, [*range(11, 16)]), (6, [*range(11, 17)])])
def test_it_is_extended_once_half_a_horizon_is_left(bound: BoundPlan, to: int, asked: list[int]) -> None:
    asker = Asker()
    for step in (0, to):
        asker.request(bound, step)
        last = asker.turns()
    assert last == asked


def test_a_reader_that_gave_up_wants_nothing_until_its_next_request(bound: BoundPlan) -> None:
    asker = Asker()
    asker.request(bound, 0)
    reader = asker.readers.next()
    assert reader is not None
    reader.give_up()
    assert asker.readers.next() is None
    asker.request(bound, 1)
    assert asker.turns() == list(range(1, 2 + HORIZON))


def test_a_new_reader_has_asked_for_nothing(bound: BoundPlan) -> None:
    fields = [field.name for field in dataclasses.fields(Reader)]
    reader = Reader(bound, 1, 2)
    assert [getattr(reader, name) for name in fields] == [
        *(bound, 1, 2, 0, 0, 0),
        *(False, 0, False, False, 0.0),
    ]


def test_a_reader_knows_the_step_of_its_latest_request(bound: BoundPlan) -> None:
    """Warm or not: windows of older steps need no prefetching any more."""
    asker = Asker()
    asker.request(bound, 7)
    reader = asker.readers.next()
    assert reader is not None
    for step, resident in ((7, True), (9, True), (3, True), (8, False)):
        bound.gatherer.num_faults += not resident
        asker.request(bound, step)
        asker.turns(resident=resident)
        assert reader.step == step


def test_a_reader_waits_for_one_turn_however_often_it_asks(catalog: Catalog) -> None:
    bound, other = bind(catalog, ROWS), bind(catalog, ROWS, seed=1)
    asker = Asker()
    for step in (0, 20, 40):
        asker.request(bound, step)
    asker.request(other, 0)
    turns = [asker.readers.next() for _ in range(4)]
    assert [turn.bound for turn in turns if turn] == [bound, other, bound, other]


def test_a_reader_is_idle_after_a_minute(catalog: Catalog) -> None:
    asker = Asker()
    first, second = bind(catalog, ROWS), bind(catalog, ROWS, seed=1)
    for bound, now, left in (
        (first, 0.0, [first]),
        (second, 60.0, [first, second]),
        (second, 60.5, [second]),
    ):
        asker.now = now
        asker.request(bound, 0)
        assert asker.readers.bounds() == left


def test_the_number_of_readers_is_bounded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MAX_READERS", 2)
    asker = Asker()
    plans = [bind(catalog, ROWS, seed=seed) for seed in range(3)]
    for number in (0, 1, 0, 2):
        asker.request(plans[number], 0)
    assert asker.readers.bounds() == [plans[0], plans[2]]


def test_a_step_of_more_rows_than_a_turn_has_a_turn_of_its_own(catalog: Catalog) -> None:
    assert blocks(bind(catalog, 1025), 0, 3, world=1) == [(1025, 1)] * 3
    assert blocks(bind(catalog, 512), 0, 3, world=1) == [(512, 2), (512, 1)]


def test_what_is_reserved_is_not_shared(bound: BoundPlan) -> None:
    asker = Asker(horizon=2 * HORIZON)
    assert asker.readers.reserved_bytes == 0
    asker.readers.reserved_bytes = 4 * HORIZON * STEP_BYTES
    asker.request(bound, 0)
    assert asker.turns() == list(range(1 + HORIZON))


def test_readers_take_turns(catalog: Catalog) -> None:
    """Two ranks of one plan and one of another, each with blocks of 8 steps and a horizon of 24."""
    first, second = bind(catalog, 256), bind(catalog, 256, seed=1)
    asker = Asker(budget_bytes=4 * 24 * (128 // ROWS) * STEP_BYTES)
    for bound, rank in ((first, 0), (first, 1), (second, 0)):
        asker.request(bound, 0, rank=rank, world=2)
    turns = [asker.turn() for _ in range(12)]
    readers = [turn[0] for turn in turns if turn is not None]
    assert len(set(map(id, readers[:3]))) == 3
    assert readers == 4 * readers[:3]
    assert [turn[1] for turn in turns[::3] if turn] == [range(8), range(8, 16), range(16, 24), range(24, 25)]
    assert asker.turn() is None


def test_readers_share_the_budget(catalog: Catalog) -> None:
    """A quarter each, and less once there are more than four."""
    bound = bind(catalog, 8 * ROWS)
    asker = Asker(budget_bytes=8 * HORIZON * STEP_BYTES)
    asked = []
    for rank in range(8):
        asker.request(bound, 0, rank=rank, world=8)
        asked.append(len(asker.turns()) - 1)
    shares = [4, 4, 4, 4, 5, 6, 7, 8]
    assert asked == [8 * HORIZON // share for share in shares]


def test_an_idle_reader_has_no_share_and_no_turn(catalog: Catalog) -> None:
    bound = bind(catalog, 8 * ROWS)
    asker = Asker(budget_bytes=8 * HORIZON * STEP_BYTES)
    for rank in range(8):
        asker.request(bound, 0, rank=rank, world=8)  # seven of them have no turn until they are gone
    asker.now = 61.0
    asker.request(bound, 500, rank=0, world=8)
    assert asker.turns() == list(range(500, 501 + 2 * HORIZON))


def test_a_share_below_one_step_is_nothing(bound: BoundPlan) -> None:
    asker = Asker(budget_bytes=4 * STEP_BYTES - 1)
    for step in range(5):
        asker.request(bound, step)
    assert asker.readers.next() is None


def test_a_warm_reader_is_left_alone_until_a_gather_waits(bound: BoundPlan) -> None:
    asker = Asker()
    asker.request(bound, 0)
    assert asker.turns(resident=True) == []
    for step in range(1, 40):
        asker.request(bound, step)
        assert asker.readers.next() is None
    bound.gatherer.num_faults += 1
    asker.request(bound, 40)
    assert asker.turns() == list(range(40, 41 + HORIZON))


def test_each_stretch_is_sampled_once(catalog: Catalog) -> None:
    """At its first block: found cold, the rest of it is asked for without another look."""
    bound = bind(catalog, 512)
    asker = Asker(budget_bytes=4 * 8 * 512 * (2 * (SEQ_LEN + 1) + mmap.PAGESIZE))
    asker.request(bound, 0)
    samples = []
    while (reader := asker.readers.next()) is not None:
        block = reader.next_turn()
        samples.append(block.samples)
        reader.finish(block, block.locate()[1], warm=False)
    assert samples == [True, False, False, False, False]


def blocks(bound: BoundPlan, first: int, stop: int, *, world: int) -> list[tuple[int, int]]:
    """Return (rows, steps) of the blocks of rank 0."""
    found = []
    while first < stop:
        reader = Reader(bound, 0, world)
        located, after = Turn(reader, first, stop, False).locate()
        assert len(located) in (after - first, 0)
        found.append((located.shape[1], after - first))
        first = after
    return found


def test_blocks_end_where_the_batch_size_changes(catalog: Catalog) -> None:
    bound = bind(catalog, 4, 8)
    assert blocks(bound, 0, 20, world=2) == [(2, 20)]
    found = blocks(bound, 15, 30, world=2)
    assert sum(steps for _, steps in found) == 15
    assert [rows for rows, steps in found for _ in range(steps)] == 5 * [2] + 10 * [4]


def test_a_rank_that_has_no_place_in_the_next_stage_ends_there(catalog: Catalog) -> None:
    bound = bind(catalog, 4, 6)
    found = blocks(bound, 15, 30, world=4)
    assert [rows for rows, steps in found for _ in range(steps)] == 5 * [1] + 10 * [0]
    asker = Asker()
    asker.request(bound, 15, 5, world=4)
    assert asker.turns() == list(range(15, 20 + 4 * HORIZON))  # of one row a step


def test_the_end_of_the_range_of_steps_is_no_error(bound: BoundPlan) -> None:
    asker = Asker()
    asker.request(bound, MAX_STEP - 2)
    assert set(asker.turns()) >= {MAX_STEP - 2, MAX_STEP - 1, MAX_STEP}


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 80), st.integers(1, 9), st.integers(0, 3)), max_size=40
    ),
    horizon=st.integers(1, 30),
)
def test_nothing_is_asked_for_beyond_the_horizon(
    catalog: Catalog, requests: list[tuple[int, int, int, int]], horizon: int
) -> None:
    """Whatever three ranks ask for, in any order, and how many turns come between; and never old steps."""
    bound = bind(catalog, 12)
    asker = Asker(horizon=3 * horizon)  # of rows, a third of the batch
    latest: dict[int, int] = {}
    furthest = dict.fromkeys(range(3), 0)
    for rank, step, count, turns in requests:
        asker.request(bound, step, count, rank=rank, world=3)
        latest[rank], furthest[rank] = step, max(furthest[rank], step + count)
        for _ in range(turns):
            if (turn := asker.turn()) is not None:
                reader, steps = turn
                assert latest[reader.rank] <= steps.start
                assert steps.stop <= furthest[reader.rank] + 3 * horizon
    asker.turns()
