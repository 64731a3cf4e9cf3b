"""How many steps a request asks for, where batches change their size and where the run ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corpus_client.plan.schedule import StepRange
from tests.client.staging.counting import (
    STEPS,
    MakePipeline,
    batches_of,
)

STEP_RANGES = tuple(
    StepRange(start_step=start, stop_step=stop, shape=shape)
    for start, stop, shape in [(0, 8, (2, 3)), (8, 19, (1, 3)), (19, 20, (1, 6)), (20, None, (1, 3))]
)


@pytest.mark.parametrize(
    ("start_step", "end_step", "requests"),
    [
        (0, 8, [(0, 1, (2, 3)), (1, 2, (2, 3)), (3, 4, (2, 3)), (7, 1, (2, 3))]),
        (
            6,
            31,
            [
                *[(6, 1, (2, 3)), (7, 1, (2, 3)), (8, 4, (1, 3)), (12, 7, (1, 3))],
                *[(19, 1, (1, 6)), (20, 8, (1, 3)), (28, 3, (1, 3))],
            ],
        ),
        (19, 22, [(19, 1, (1, 6)), (20, 2, (1, 3))]),
        (25, 25, []),
    ],
)
def test_no_request_crosses_a_change_of_shape(
    start_step: int,
    end_step: int,
    requests: list[tuple[int, int, tuple[int, int]]],
    make_pipeline: MakePipeline,
) -> None:
    """Slots hold four batches of two rows, so eight of one; step 19 has one row, twice as long."""
    steps = replace(STEPS, step_ranges=STEP_RANGES, start_step=start_step, end_step=end_step)
    assert list(steps.pieces(steps.slot_bytes)) == requests
    batches = list(batches_of(make_pipeline(steps=steps)))
    assert [batch.step for batch in batches] == list(range(start_step, end_step))
    for batch in batches:
        tokens = batch.tokens
        (shape,) = [s.shape for s in STEP_RANGES if s.start_step <= batch.step < (s.stop_step or 99)]
        assert tokens.shape == shape
        assert set(tokens.flatten().tolist()) == {batch.step}


def test_a_stride_asks_for_single_steps_over_changes_of_batch_size(make_pipeline: MakePipeline) -> None:
    """Step 19, a range by itself, is jumped over."""
    steps = replace(STEPS, step_ranges=STEP_RANGES, start_step=3, end_step=30, step_stride=5)
    pieces = [(3, 1, (2, 3)), *((step, 1, (1, 3)) for step in (8, 13, 18, 23, 28))]
    assert list(steps.pieces(steps.slot_bytes)) == pieces
    assert [batch.step for batch in batches_of(make_pipeline(steps=steps))] == [3, 8, 13, 18, 23, 28]
