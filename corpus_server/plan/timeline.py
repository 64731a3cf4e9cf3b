"""Plan steps, training steps, and where each source stands at the beginning of each stage.

    plan steps       0 ... 99 | 100 ... 149 | [150, 160) skipped | 160 ...
    stage            0        | 1                                       1
    training steps   0 ... 99 | 100 ... 149 |                    | 150 ...

A source's position counts the rows it has given since plan step 0, skipped ones included. It carries
over from stage to stage; a source that is new starts at 0.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus_server.permutation import stream_key
from corpus_server.plan.document import Plan, Stage
from corpus_server.plan.mixture import Mixture


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStage:
    """A stage and where its sources stand when it begins.

    Args:
        number: 0 for the first.
        stage: what the plan says.
        mixture: rows to sources.
        sources: `(names,)` index in the plan's sources of each source of the mixture.
        positions: `(plan sources,)` positions at its first row, also of sources that it does not use.
    """

    number: int
    stage: Stage
    mixture: Mixture
    sources: NDArray[np.intp]
    positions: NDArray[np.uint64]


class Timeline:
    """The stages of a plan one after another.

    Args:
        plan: checked.
    """

    def __init__(self, plan: Plan) -> None:
        self.names = plan.sources
        self.skips = plan.skip_steps
        self._from_steps = [stage.from_step for stage in plan.stages]
        self.stages: list[PlacedStage] = []
        positions = [0] * len(self.names)
        for number, stage in enumerate(plan.stages):
            if number:
                positions = self._after(self.stages[-1], stage.from_step)
            mixture = Mixture(stage.units, stream_key("mixture", plan.seed, str(number)))
            self.stages.append(
                PlacedStage(
                    number=number,
                    stage=stage,
                    mixture=mixture,
                    sources=np.array([self.names.index(name) for name in mixture.names], dtype=np.intp),
                    positions=np.array(positions, dtype=np.uint64),
                )
            )

    def plan_steps(self, steps: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the plan steps of training steps."""
        return self.skips.nth_outside(steps) if self.skips else steps

    def plan_step(self, step: int) -> int:
        """Return the plan step of a training step."""
        return int(self.plan_steps(np.array([step], dtype=np.uint64))[0]) if self.skips else step

    def training_step(self, plan_step: int) -> int | None:
        """Return the training step of a plan step, or None if training never sees it."""
        at = np.array([plan_step], dtype=np.uint64)
        return None if self.skips.contains(at)[0] else int(self.skips.num_outside_below(at)[0])

    def first_training_step(self, number: int) -> int | None:
        """Return the first training step of a stage, or None if it is skipped as a whole."""
        start = self.stages[number].stage.from_step
        at = np.array([start], dtype=np.uint64)
        step = int(self.skips.num_outside_below(at)[0])
        stop = self.stages[number + 1].stage.from_step if number + 1 < len(self.stages) else None
        return step if stop is None or self.plan_step(step) < stop else None

    def by_stage(self, plan_steps: NDArray[np.uint64]) -> list[tuple[PlacedStage, NDArray[np.uint64]]]:
        """Return ascending plan steps, at least one, those of each stage together."""
        first, last = (self.stage_at(int(end)).number for end in (plan_steps[0], plan_steps[-1]))
        if first == last:
            return [(self.stages[first], plan_steps)]
        begins = np.array(self._from_steps[first + 1 : last + 1], dtype=np.uint64)
        parts = np.split(plan_steps, plan_steps.searchsorted(begins))
        staged = zip(self.stages[first : last + 1], parts, strict=True)
        return [(placed, part) for placed, part in staged if part.size]

    def stage_at(self, plan_step: int) -> PlacedStage:
        """Return the stage of a plan step."""
        return self.stages[bisect_right(self._from_steps, plan_step) - 1]

    def rows_before(self, plan_step: int) -> list[int]:
        """Return the rows that each source of the plan has given before a plan step, skipped ones too."""
        return self._after(self.stage_at(plan_step), plan_step)

    def rows_of(
        self, source: int, positions: NDArray[np.uint64]
    ) -> tuple[NDArray[np.intp], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.bool_]]:
        """Return which rows hold positions of a source: the inverse of what a stage places.

        Args:
            source: index in the plan's sources.
            positions: `(k,) uint64`.

        Returns:
            `(k,)` each: stage number, plan step, row of the global batch, and whether any row does (a
            source that the last stages do not use has a last position).
        """
        begins = np.array([placed.positions[source] for placed in self.stages], dtype=np.uint64)
        # Of stages that begin at the same position only the last can have given it.
        numbers = np.searchsorted(begins, positions, side="right") - 1
        plan_steps = np.zeros(positions.shape, dtype=np.uint64)
        rows = np.zeros(positions.shape, dtype=np.uint64)
        given = np.zeros(positions.shape, dtype=bool)
        for number in np.unique(numbers).tolist():
            placed = self.stages[number]
            member = np.flatnonzero(placed.sources == source)
            if not member.size:
                continue
            here = numbers == number
            at = placed.mixture.find(int(member[0]), positions[here] - begins[number])
            steps, rows[here] = np.divmod(at, np.uint64(placed.stage.global_batch_size))
            plan_steps[here] = steps + np.uint64(placed.stage.from_step)
            given[here] = True
        return numbers, plan_steps, rows, given

    def _after(self, placed: PlacedStage, plan_step: int) -> list[int]:
        num_rows = (plan_step - placed.stage.from_step) * placed.stage.global_batch_size
        positions = [int(position) for position in placed.positions]
        for source, count in zip(placed.sources.tolist(), placed.mixture.count(num_rows), strict=True):
            positions[source] += count
        return positions
