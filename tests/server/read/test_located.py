"""Rows that are located several steps at a time are the rows located one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.index import index
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan
from corpus_server.plan.stage import MAX_STEP
from corpus_server.read import reading
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_raw

STAGES = [
    {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1}},
    {"from_step": 100, "global_batch_size": 16, "mixture": {"web": 1}},
]


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[BoundPlan]:
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    reading._blocks.clear()
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        plan = Plan.from_json({"seq_len": 8, "seed": 3, "stages": STAGES, "skip_steps": [[40, 45]]})
        yield catalog.bind(plan, Budget())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("rows", [range(8), range(4, 8), range(5)])
def test_they_are_the_same_in_any_order(bound: BoundPlan, rows: range, count: int) -> None:
    """Over skips, and over a change of the batch size that divides a block."""
    draw = random.Random(count)
    steps = [*range(200), *(draw.randrange(300) for _ in range(100)), *range(MAX_STEP - 9, MAX_STEP - 3)]
    for step in steps:
        try:
            bound.sampler.check_part(step, count=count)
        except Exception:  # noqa: BLE001 - nobody may ask for these
            continue
        expected = bound.sampler.pieces(step, rows, count=count).places[:, :2]
        selection, first = reading.select(bound, step, rows, count)
        tokens = selection.read(slice(first, first + len(expected)))
        assert np.array_equal(tokens, bound.gatherer.gather(expected, 9, bound.dtype)), step


def check_selected(bound: BoundPlan, step: int, count: int, length: int) -> None:
    """Check that the selection for steps holds their rows."""
    expected = bound.sampler.pieces(step, range(8), count=count).places[:, :2]
    selection, first = reading.select(bound, step, range(8), count)
    tokens = selection.read(slice(first, first + len(expected)))
    assert np.array_equal(tokens, bound.gatherer.gather(expected, length, bound.dtype)), step


def test_steps_that_reach_over_the_end_of_a_block_are_located_alone(
    bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_ROWS", 32)  # four steps
    for step in (0, 2, 3, 5):
        check_selected(bound, step, 2, 9)


def test_no_block_holds_steps_of_two_lengths(tmp_path: Path) -> None:
    stages = [STAGES[0], {**STAGES[0], "from_step": 5, "seq_len": 4}]
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        bound = catalog.bind(Plan.from_json({"seq_len": 8, "stages": stages}), Budget())
        for step in range(8):
            check_selected(bound, step, 1, 9 if step < 5 else 5)


def test_two_plans_have_blocks_of_their_own(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        plans = [Plan.from_json({"seq_len": 8, "seed": seed, "stages": STAGES[:1]}) for seed in range(2)]
        both = [catalog.bind(plan, Budget()) for plan in plans]
        for step in range(3):
            for bound in both:
                check_selected(bound, step, 1, 9)


def test_rows_of_several_pieces_are_the_same_in_any_order(tmp_path: Path) -> None:
    """Whole blocks of steps are located ahead: of the block before, of the same one, or of none."""
    tokens = some_tokens(5000)
    tokens[11::13] = tokens[-1] = 0
    path = write_raw(tmp_path / "web.bin", tokens)
    reading._blocks.clear()
    spec = CorpusSpec.parse(f"web={path},eot=0")
    index(spec)
    with Catalog.open([spec]) as catalog:
        document = {"seq_len": 32, "rows": "documents", "seed": 3, "stages": STAGES}
        bound = catalog.bind(Plan.from_json(document), Budget())
        for step in [*range(40), 700, 701, 90, 91, 20, *range(2040, 2060)]:
            alone = bound.gatherer.select(bound.pieces(step, range(8)), bound.dtype).read(slice(None))
            selection, first = reading.select(bound, step, range(8), 1)
            assert np.array_equal(selection.read(slice(first, first + 8)), alone), step
