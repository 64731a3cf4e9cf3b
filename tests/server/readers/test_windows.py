"""What is prefetched window by window: which steps of a rank, how far, and when it begins anew."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.windows import Windows
from corpus_server.work import Budget
from tests.corpora import some_tokens, spec, write_megatron, write_raw

ROWS, SEQ_LEN = 4, 16
WINDOW_BYTES = 2 * (SEQ_LEN + 1) + mmap.PAGESIZE
STEP_BYTES = ROWS * WINDOW_BYTES
HORIZON = 10


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    path = write_raw(tmp_path_factory.mktemp("readers") / "web.bin", some_tokens(20_000))
    with Catalog.open([CorpusSpec(name="web", path=path)]) as opened:
        yield opened


def bind(catalog: Catalog, *batch_sizes: int) -> BoundPlan:
    """Return a plan whose batch size changes every 20 steps."""
    stages = tuple(
        Stage(from_step=20 * number, global_batch_size=size, mixture={"web": 1.0})
        for number, size in enumerate(batch_sizes)
    )
    return catalog.bind(Plan(seq_len=SEQ_LEN, stages=stages), Budget())


@pytest.fixture
def bound(catalog: Catalog) -> BoundPlan:
    return bind(catalog, ROWS)


class Rank:
    """Asks, and takes turns as the thread does, without a disk."""

    def __init__(
        self, bound: BoundPlan, *, share_bytes: int = HORIZON * STEP_BYTES, rank: int = 0, world: int = 1
    ) -> None:
        self.bound, self.share_bytes = bound, share_bytes
        self.part = {"rank": rank, "world_size": world}
        self.windows: Windows | None = None

    def ask(self, step: int, count: int = 1) -> bool:
        """Ask for steps; return whether the thread is told."""
        steps = range(step, step + count)
        self.windows = self.windows or Windows(self.bound, self.part["rank"], self.part["world_size"], steps)
        self.windows.steps = steps
        return step not in self.windows.quiet or self.windows.num_faults != self.bound.gatherer.num_faults

    def turn(self, *, is_resident: bool = False) -> range | None:
        """Take one turn; return the steps that were asked of the disk."""
        assert self.windows is not None
        if (turn := self.windows.next_turn(self.share_bytes)) is None:
            return None
        if turn.samples and is_resident:
            self.windows.note_warm()
            return None
        windows, steps = turn.windows.tolist(), range(turn.stop, turn.stop)
        while windows:
            steps = range(steps.start - 1, turn.stop)
            located = self.bound.sampler.locate(steps.start, **self.part)[0].tolist()
            assert windows[-len(located) :] == located
            del windows[-len(located) :]
        return steps

    def asked(self, step: int, count: int = 1, *, is_resident: bool = False) -> list[int]:
        """Ask, and take turns until there is nothing more; return the steps that were asked of the disk."""
        steps: list[int] = []
        if self.ask(step, count):
            while turn := self.turn(is_resident=is_resident):
                steps += turn
        return steps


@pytest.mark.parametrize("to", [500, 112, 89, 0], ids=["far", "just beyond", "back", "to the start"])
def test_after_a_jump_it_begins_anew(bound: BoundPlan, to: int) -> None:
    rank = Rank(bound)
    rank.asked(100)
    assert rank.asked(to) == list(range(to, to + 1 + HORIZON))


@pytest.mark.parametrize("to", [90, 99, 100, 104])
def test_late_requests_of_other_connections_ask_for_nothing(bound: BoundPlan, to: int) -> None:
    rank = Rank(bound)
    rank.asked(100)
    assert rank.asked(to) == []


def test_a_rank_that_has_no_place_in_the_next_stage_ends_there(catalog: Catalog) -> None:
    """Four ranks cannot share six rows; they may share twelve later."""
    rank = Rank(bind(catalog, 4, 6, 12), world=4)
    assert rank.asked(15, 5) == list(range(15, 20))
    assert not rank.ask(16)
    assert rank.asked(40)[:3] == [40, 41, 42]


def test_a_balanced_rank_prefetches_what_it_is_dealt(tmp_path: Path) -> None:
    """From step 7 on, until its share is full; the other rank's rows are others."""
    lengths = np.random.default_rng(0).integers(2, 30, 500).tolist()
    write_megatron(tmp_path / "web", [[*range(1, length), 0] for length in lengths])
    stage = {"global_batch_size": 2 * ROWS, "mixture": {"web": 1}}
    rows = {"documents": {"balance_ranks": True}}
    with Catalog.open([spec(tmp_path / "web.bin", "web", eot=0)]) as opened:
        bound = opened.bind(Plan.from_json({"seq_len": SEQ_LEN, "rows": rows, "stages": [stage]}), Budget())
        for rank in range(2):
            turn = Windows(bound, rank, 2, range(7, 8)).next_turn(HORIZON * STEP_BYTES)
            assert turn is not None
            places = range(rank * ROWS, (rank + 1) * ROWS)
            pieces, _ = bound.sampler.pieces(7, places, count=turn.stop - 7, world_size=2)
            assert turn.windows.tolist() == pieces[:, :2].tolist()
            assert turn.lengths.tolist() == pieces[:, 2].tolist()
            assert pieces.tolist() != bound.sampler.pieces(7, places, count=turn.stop - 7)[0].tolist()


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    requests=st.lists(
        st.tuples(st.integers(0, 80), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=40
    ),
    share=st.integers(1, 90),
)
def test_no_more_than_a_share_is_asked_for_beyond_the_latest_request(
    catalog: Catalog, sizes: list[int], requests: list[tuple[int, int, int]], share: int
) -> None:
    """Whatever a rank asks for, in any order, however batches change, and never old steps."""
    rank = Rank(bind(catalog, *sizes), share_bytes=share * WINDOW_BYTES)
    sampler = rank.bound.sampler
    for step, count, turns in requests:
        sizes_asked = {sampler.check_part(each) for each in range(step, step + count)}
        if len(sizes_asked) > 1:
            continue
        rank.ask(step, count)
        for _ in range(turns):
            if steps := rank.turn():
                assert step <= steps.start
                beyond = [sampler.check_part(each) for each in steps if each >= step + count]
                assert sum(beyond) <= share
