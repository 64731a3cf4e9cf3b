"""The shape of a rank's batches, by training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from corpus_client import errors
from corpus_client.network.control import StageDescription

MAX_STEP = 2**40
"""How many steps a plan can have."""

MAX_STEPS_PER_REQUEST = 256
"""Of a request for tokens."""

Piece = tuple[int, int, tuple[int, int]]
"""First step, number of steps, shape of a batch: rows and tokens of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Training steps `[start_step, stop_step)` in which a rank's batches have one shape.

    stop_step: None in the last range of a plan without an end.
    shape: rows of a batch, tokens of a row (its stage's seq_len + 1).
    """

    start_step: int
    stop_step: int | None
    shape: tuple[int, int]


def rank_shapes(
    stages: Sequence[StageDescription], world_size: int, num_steps: int | None = None
) -> tuple[StepRange, ...]:
    """Return the ranges of a plan, in order; neighbouring stages of one shape make one range.

    Stages of 12 rows from step 0, then 24 from 100 and 24 from 300, all of 8 inputs, over two ranks: shape
    (6, 9) in `[0, 100)`, (12, 9) from 100 on.

    Args:
        num_steps: of the plan; None: it has no end.

    Raises:
        InvalidArgument: a stage's batch does not divide; the message names it and what would.
    """
    begun: list[tuple[int, tuple[int, int]]] = []
    for place, stage in enumerate(stages):
        size, number = stage.global_batch_size, place if stage.number is None else stage.number
        if size % world_size:
            raise errors.InvalidArgument(
                f"stages[{number}].global_batch_size must be divisible by world_size, got {size} over "
                f"{world_size}; it divides over {_divisors(size)}"
            )
        if stage.first_step is None:
            continue  # training skips all of it
        shape = size // world_size, stage.seq_len + 1
        if not begun or begun[-1][1] != shape:
            begun.append((stage.first_step, shape))
    starts = [start for start, _ in begun]
    if starts[:1] != [0] or starts != sorted(set(starts)):
        raise errors.ResponseCorrupt(f"the first steps of a plan's stages must rise from 0, got {stages}")
    return tuple(
        StepRange(start_step=start, stop_step=stop, shape=shape)
        for (start, shape), stop in zip(begun, [*starts[1:], num_steps], strict=True)
    )


def shape_of(step_ranges: Sequence[StepRange], step: int) -> tuple[int, int]:
    """Return the shape of a step's batch; refuse a step that the plan does not have."""
    for each in step_ranges:
        if each.start_step <= step and (each.stop_step is None or step < each.stop_step):
            return each.shape
    raise errors.InvalidArgument(f"step must be in [0, {step_ranges[-1].stop_step}), got {step}")


def pieces(
    step_ranges: Sequence[StepRange],
    start_step: int,
    end_step: int | None,
    *,
    max_bytes: int,
    batch_bytes: Callable[[tuple[int, int]], int],
    step_stride: int = 1,
    most_steps: int = MAX_STEPS_PER_REQUEST,
) -> Iterator[Piece]:
    """Yield what is asked for at a time.

    None crosses two ranges. The first ones have 1, 2, 4... steps, so that the first batch comes after one
    small response.

    Args:
        end_step: where to stop; None: behind the last step that a plan can have.
        max_bytes: of a piece of several steps.
        batch_bytes: returns the bytes of a batch of a shape.
        step_stride: every how many steps one is asked for; above 1 each is a piece of its own.
        most_steps: of a piece, however small batches are.
    """
    step, count = start_step, 1
    for step_range in step_ranges:
        max_steps = min(max_bytes // batch_bytes(step_range.shape), most_steps)
        if step_stride > 1 or max_steps == 0:
            max_steps = 1
        stop = min(each for each in (step_range.stop_step, end_step, MAX_STEP) if each is not None)
        while step < stop:
            num_steps = min(count, max_steps, stop - step)
            yield step, num_steps, step_range.shape
            step += max(num_steps, step_stride)
            count = min(2 * count, most_steps)


def _divisors(size: int) -> str:
    divisors = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
    return ", ".join(map(str, divisors[:32]))
