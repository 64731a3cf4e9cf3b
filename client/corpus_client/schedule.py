"""From which step on a rank's batches have how many rows; the steps are the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corpus_client import errors
from corpus_client.control import StageDescription


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Training steps `[start_step, stop_step)` (None: for ever) in which a rank has `num_rows` rows."""

    start_step: int
    stop_step: int | None
    num_rows: int


def rank_rows(stages: Sequence[StageDescription], world_size: int) -> tuple[Stretch, ...]:
    """The stretches of a plan, one after another; stages of one batch size make one stretch.

    A stage of 12 rows from step 0, then 24 from 100 and 24 from 300, over two ranks: 6 rows in
    `[0, 100)`, 12 from 100 on.

    Raises:
        InvalidArgument: a stage's batch does not divide; the message names it and what would.
    """
    begun: list[tuple[int, int]] = []
    for number, stage in enumerate(stages):
        size = stage.global_batch_size
        if size % world_size:
            raise errors.InvalidArgument(
                f"stages[{number}].global_batch_size must be divisible by world_size, got {size} over "
                f"{world_size}; it divides over {_divisors(size)}"
            )
        if stage.first_step is None:
            continue  # training skips all of it
        if begun and begun[-1][0] == stage.first_step:
            begun.pop()
        if not begun or begun[-1][1] != size // world_size:
            begun.append((stage.first_step, size // world_size))
    if not begun or begun[0][0] != 0 or begun != sorted(begun, key=lambda each: each[0]):
        raise errors.AnswerCorrupt(f"the first steps of a plan's stages must rise from 0, got {stages}")
    stops = [start for start, _ in begun[1:]]
    return tuple(
        Stretch(start_step=start, stop_step=stop, num_rows=rows)
        for (start, rows), stop in zip(begun, [*stops, None], strict=True)
    )


def _divisors(size: int) -> str:
    divisors = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
    return ", ".join(map(str, divisors[:32]))
