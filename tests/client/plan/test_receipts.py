"""Which steps of the past are compared before a run goes on by another plan."""

from __future__ import annotations

import pytest

from corpus_client.network.control import BoundPlan, StageDescription
from corpus_client.plan.receipts import _samples


@pytest.mark.parametrize(
    ("first_steps", "step", "samples"),
    [
        ([0], 0, []),
        ([0], 1, [0]),
        ([0], 9, [0, 4, 8]),
        ([0, 13], 20, [0, 10, 12, 13, 19]),
        ([0, 13], 13, [0, 6, 12]),  # the second stage has not begun
        ([0, 13], 14, [0, 7, 12, 13]),
        ([0, None, 13, 17], 40, [0, 16, 17, 20, 39]),
    ],
)
def test_the_edges_of_the_newest_stage_are_compared(
    first_steps: list[int | None], step: int, samples: list[int]
) -> None:
    stages = tuple(StageDescription(first_step=each, global_batch_size=8, seq_len=4) for each in first_steps)
    plan = BoundPlan(plan_id="ab", document={}, dtype="uint16", shards=(), stages=stages, eot_id=None)
    assert _samples(plan, step) == samples
