"""The fast arithmetic against the slow reference, row by row."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings

from tests.plans import FAR_BLOCK, PLAIN_ORDERS, Case, small_plans, wild_plan
from tests.reference import BLOCK, ReferencePlan

NUM_PLANS, ROWS_PER_PLAN = 40, 500


def interesting_steps(draw: random.Random, reference: ReferencePlan) -> list[int]:
    """Training steps about the borders of stages, blocks and skips, and anywhere between."""
    stages = reference.stages
    ends = [stage["from_step"] for stage in stages[1:]] + [2**40]
    plan_steps = [stop for _, stop in reference.skip_steps]
    for stage, parts, end in zip(stages, reference.parts, ends, strict=True):
        size = stage["global_batch_size"] // parts
        rows = [0, BLOCK - 1, *(draw.randrange(2 * BLOCK - 4096) for _ in range(8))]
        rows += [FAR_BLOCK * BLOCK + draw.randrange(BLOCK - 4096) for _ in range(8)]
        plan_steps += [end - 1] if end < 2**40 else []
        plan_steps += [
            stage["from_step"] + row // size for row in rows if row // size < end - stage["from_step"]
        ]
    steps = {reference.training_step(plan_step) for plan_step in plan_steps} - {None}
    return sorted(step for step in steps if step is not None)


@pytest.mark.parametrize("number", range(NUM_PLANS))
def test_agrees_with_the_reference_on_20_000_rows(number: int) -> None:
    """40 plans of any scale, 500 (step, row) of each."""
    draw = random.Random(number)
    case = wild_plan(draw)
    told = f"shards {json.dumps(case.shard_tokens)}, plan {json.dumps(case.document)}"
    reference, sampler = case.reference(), case.sampler()
    steps = interesting_steps(draw, reference)
    compared = 0
    while compared < ROWS_PER_PLAN:
        step = draw.choice(steps)
        size = reference.global_batch_size(step)
        assert sampler.check_part(step) == size, f"step {step}, {told}"
        assert sampler.seq_len(step) == reference.seq_len(step), f"step {step}, {told}"
        assert sampler.timeline.plan_step(step) == reference.plan_step(step), f"step {step}, {told}"
        located = sampler.locate(step)[0]
        assert located.shape == (size, 2)
        rows = [draw.randrange(size) for _ in range(min(20, size, ROWS_PER_PLAN - compared))]
        expected = [reference.located(step, row) for row in rows]
        assert located[rows].tolist() == expected, f"step {step}, rows {rows}, {told}"
        compared += len(rows)


@settings(deadline=None)
@given(small_plans(orders=(*PLAIN_ORDERS, "bounded")))
def test_agrees_on_every_row_of_small_plans(case: Case) -> None:
    """Whole runs from the first step to a few steps into the last stage; shrinks to what matters."""
    reference, sampler = case.reference(), case.sampler()
    for step in range(case.document["stages"][-1]["from_step"] + 8):
        size = reference.global_batch_size(step)
        expected = [reference.located(step, row) for row in range(size)]
        assert sampler.locate(step)[0].tolist() == expected, f"step {step}"
