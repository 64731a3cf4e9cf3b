"""Skipped steps: training never sees them, later steps move up, and every row is some plan's row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plans import PLAIN_ORDERS, Case, small_plans

SKIPS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: [pair[0], sum(pair)]), max_size=6
)


def skipping(skip_steps: list[list[int]], **fields: Any) -> Case:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    return Case({"seq_len": 4, "stages": [stage], "skip_steps": skip_steps, **fields}, {"web": [401]})


@settings(deadline=None)
@given(SKIPS)
def test_training_steps_are_the_plan_steps_that_are_left(skip_steps: list[list[int]]) -> None:
    """In any order, touching and overlapping."""
    sampler = skipping(skip_steps).sampler()
    left = [step for step in range(100) if not any(start <= step < stop for start, stop in skip_steps)]
    assert [sampler.timeline.plan_step(step) for step in range(len(left))] == left
    assert [sampler.plan.skip_steps.outside_before(plan_step) for plan_step in left] == [*range(len(left))]


@settings(deadline=None)
@given(small_plans(orders=(*PLAIN_ORDERS, "bounded")))
def test_a_training_step_holds_the_rows_of_its_plan_step(case: Case) -> None:
    """Skipping moves whole steps and changes no row."""
    skipping, plain = case.sampler(), case.with_fields(skip_steps=[]).sampler()
    for step in range(case.document["stages"][-1]["from_step"] + 8):
        plan_step = skipping.timeline.plan_step(step)
        assert (skipping.locate(step) == plain.locate(plan_step)).all()
        assert skipping.plan.skip_steps.outside_before(plan_step) == step


def test_far_skips() -> None:
    sampler = skipping([[81_200, 81_400], [10**8, 10**8 + 10**6]]).sampler()
    assert sampler.timeline.plan_step(81_199) == 81_199
    assert sampler.timeline.plan_step(81_200) == 81_400
    assert sampler.timeline.plan_step(10**8 - 201) == 10**8 - 1
    assert sampler.timeline.plan_step(10**8 - 200) == 10**8 + 10**6


@settings(deadline=None)
@given(SKIPS)
def test_the_spelling_of_skips_is_of_no_account(skip_steps: list[list[int]]) -> None:
    skipped = sorted({step for start, stop in skip_steps for step in range(start, stop)})
    merged = []
    for step in skipped:
        if merged and merged[-1][1] == step:
            merged[-1][1] = step + 1
        else:
            merged.append([step, step + 1])
    plan = skipping(skip_steps).sampler().plan.bind({"web": "x"})
    assert plan.to_json()["skip_steps"] == merged
    assert plan.id == skipping(merged).sampler().plan.bind({"web": "x"}).id


@pytest.mark.parametrize(
    ("skip_steps", "first"),
    [([], 10), ([[4, 9]], 5), ([[10, 20]], None), ([[10, 19]], 10), ([[3, 25]], None)],
)
def test_a_stage_that_is_skipped_as_a_whole_has_no_first_step(
    skip_steps: list[list[int]], first: int | None
) -> None:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    stages = [stage, {**stage, "from_step": 10}, {**stage, "from_step": 20}]
    assert skipping(skip_steps, stages=stages).sampler().timeline.first_training_step(1) == first


def test_a_skipped_stage_of_another_batch_size_does_not_part_its_neighbours() -> None:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    stages = [stage, {**stage, "from_step": 10, "global_batch_size": 9}, {**stage, "from_step": 20}]
    sampler = skipping([[10, 20]], stages=stages).sampler()
    assert (sampler.locate(8, count=4) == np.stack([sampler.locate(step)[0] for step in range(8, 12)])).all()
