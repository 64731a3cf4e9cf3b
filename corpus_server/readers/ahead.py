"""Work ahead of one reader: the steps that are prepared, and how much of them lies beyond its requests.

    steps       |-- request --|------ prepared ------|
          steps.start     steps.stop               next

Batches may grow a thousandfold from one step to the next. Therefore work ahead is bounded by what the steps
to come cost, in bytes or in windows, and not by their number.
"""

from __future__ import annotations

from corpus_server.errors import InvalidParameter
from corpus_server.read.bound_plan import BoundPlan


class Ahead:
    """The steps that a subscriber has prepared for a reader; only its thread changes them, but for `steps`.

    Attributes:
        steps: of the reader's latest request; the registry sets it.
        quiet: first steps of requests that the subscriber need not be told of, while the plan's gatherer has
            waited for the disk `num_faults` times.
        next: the first step that is not prepared.
        has_ended: the reader is idle.
        rests_until: after a failure, the monotonic time before which nothing is prepared.
    """

    def __init__(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> None:
        self.bound, self.part = bound, {"rank": rank, "world_size": world_size}
        self.steps = steps
        self.quiet, self.num_faults = range(0), -1
        self.has_ended, self.rests_until = False, 0.0
        self.begin(steps.start)

    def begin(self, step: int) -> None:
        """Begin anew: `step` is the first one to prepare."""
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

    def next_steps(self, max_windows: int) -> tuple[int, int]:
        """Return the rows of the reader's next step, and how many steps from there on have as many.

        Together they are about `max_windows` windows, and one step at least. (0, 0) if the rank has no such
        step: the range of steps ends, or its world size does not divide the batch.
        """
        sampler = self.bound.sampler
        try:
            rows = sampler.check_part(self.next, **self.part)
        except InvalidParameter:
            return 0, 0
        count = max(1, max_windows // sampler.num_located(rows, self.part["world_size"]))
        while count > 1:
            try:
                sampler.check_part(self.next, count=count, **self.part)
                break
            except InvalidParameter:  # a stage of another shape begins within, or the range of steps ends
                count //= 2
        return rows, count
