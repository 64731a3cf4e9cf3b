"""Which parts of a plan may be asked for: steps that exist, with batches of one shape, and a rank of them."""

from __future__ import annotations

import numpy as np

from corpus_server.errors import InvalidParameter
from corpus_server.plan.stage import MAX_STEP
from corpus_server.plan.timeline import PlacedStage, Timeline


def check_part(timeline: Timeline, step: int, *, count: int, rank: int, world_size: int) -> int:
    """Check that a rank slice of consecutive training steps exists, and return its rows per step.

    Raises:
        InvalidParameter: a value is outside its range, or the steps have batches of several shapes.
    """
    if timeline.num_steps is not None and step + count > timeline.num_steps:
        most = timeline.num_steps - count
        raise InvalidParameter(
            f"the plan's samples make {timeline.num_steps} steps, and step {step} with count {count} ends "
            f"beyond; give the loader num_steps={timeline.num_steps}, or the plan a larger num_samples",
            parameter="step",
            received=step,
            accepted=f"at most {most}" if most >= 0 else "none with this count",
        )
    if not 0 <= step <= MAX_STEP - count + 1:
        raise InvalidParameter.expected("step", f"in [0, {MAX_STEP - count + 1}]", step)
    placed = timeline.stage_at(timeline.plan_step(step))
    if count > 1 and len(timeline.stages) > 1:
        _check_one_shape(timeline, step, count, placed)
    batch_size = placed.global_batch_size
    rows, rest = divmod(batch_size, world_size)
    if rest:
        numbers = np.arange(1, batch_size + 1)
        divisors = numbers[batch_size % numbers == 0].tolist()
        raise InvalidParameter(
            f"world_size must divide global_batch_size {batch_size}, got {world_size}",
            parameter="world_size",
            received=world_size,
            accepted="one of " + ", ".join(map(str, divisors)),
        )
    if not 0 <= rank < world_size:
        raise InvalidParameter.expected("rank", f"in [0, {world_size})", rank)
    return rows


def _check_one_shape(timeline: Timeline, step: int, count: int, placed: PlacedStage) -> None:
    """Refuse steps with batches of several shapes, because a response is one array."""
    last = timeline.plan_step(step + count - 1)
    stop = int(timeline.from_steps.searchsorted(last, side="right"))
    its = slice(placed.number, stop)
    if (timeline.sizes[its] == placed.global_batch_size).all() and (
        timeline.seq_lens[its] == placed.seq_len
    ).all():
        return
    for later in timeline.stages[placed.number + 1 : stop]:
        if timeline.first_training_step(later.number) is None:
            continue
        until = timeline.skips.outside_before(later.from_step)
        for name, before, after in (
            ("global_batch_size", placed.global_batch_size, later.global_batch_size),
            ("seq_len", placed.seq_len, later.seq_len),
        ):
            if before != after:
                raise InvalidParameter(
                    f"steps {step} to {step + count - 1} differ in {name}: it changes from {before} "
                    f"at step {until}; ask for at most {until - step} steps from {step}",
                    parameter="count",
                    received=count,
                    accepted=f"at most {until - step}",
                )
