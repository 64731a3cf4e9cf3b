"""How far work has gone ahead of a rank's requests, and how much of it lies beyond them.

    steps       |-- request --|------ prepared ------|
             step           stop                    next

Batches may grow a thousandfold from one step to the next. Therefore work ahead is bounded by what the steps
to come cost, in bytes or in windows, and not by their number.
"""

from __future__ import annotations

from corpus_server.errors import InvalidParameter
from corpus_server.plan import Sampler


class Prepared:
    """Consecutive steps of a rank that were prefetched or planned.

    Args:
        step: the first one to prepare.

    Attributes:
        next: the first step that is not prepared.
    """

    def __init__(self, step: int) -> None:
        self.next = step
        self._runs: list[tuple[int, int]] = []  # first step, and what each costs from there on

    def add(self, count: int, step_cost: int) -> None:
        """Note that `count` more steps are prepared."""
        if not self._runs or self._runs[-1][1] != step_cost:
            self._runs.append((self.next, step_cost))
        self.next += count

    def cost_from(self, step: int) -> int:
        """Return what the prepared steps from `step` on cost; older ones count as the oldest known ones."""
        total, stop, cost = 0, self.next, 0
        for first, cost in reversed(self._runs):
            if first <= step:
                break
            total += cost * (stop - first)
            stop = first
        return total + cost * max(0, stop - step)


def next_steps(
    sampler: Sampler, first: int, *, rank: int, world_size: int, max_windows: int
) -> tuple[int, int]:
    """Return the rows of a rank's step `first`, and how many steps from there on have as many.

    Together they are about `max_windows` windows, and one step at least. (0, 0) if the rank has no such
    step: the range of steps ends, or its world size does not divide the batch.
    """
    try:
        rows = sampler.check_part(first, rank=rank, world_size=world_size)
    except InvalidParameter:
        return 0, 0
    count = max(1, max_windows // rows)
    while count > 1:
        try:
            sampler.check_part(first, count=count, rank=rank, world_size=world_size)
            break
        except InvalidParameter:  # a stage of another shape begins within, or the range of steps ends
            count //= 2
    return rows, count
