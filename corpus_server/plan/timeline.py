"""Plan steps, training steps, and where each source stands at the beginning of each stage.

    plan steps       0 ... 99 | 100 ... 149 | [150, 160) skipped | 160 ...
    stage            0        | 1                                       1
    training steps   0 ... 99 | 100 ... 149 |                    | 150 ...

A source's position counts the windows it has given since plan step 0, skipped ones included. The position
carries over from stage to stage; a source that is new starts at 0.

A stage with a shorter `seq_len` reads each window as several rows, its parts. With a plan's `seq_len` 8 and a
stage's 4, so two parts, and a global batch of 6 rows, a step holds three windows:

    row of the batch       0        1        2        3        4        5
    window of the step     0        0        1        1        2        2
    part                   0        1        0        1        0        1
    tokens of the window   0 to 4   4 to 8   0 to 4   4 to 8   0 to 4   4 to 8

A step holds whole windows, so a stage may end at any step and no token is lost or repeated.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.blend import Blend
from corpus_server.plan.document import Plan
from corpus_server.plan.mixture import Mixture, grouped
from corpus_server.plan.permutation import stream_key
from corpus_server.plan.stage import Stage


class PlacedStage(NamedTuple):
    """A stage and where its sources stand when it begins."""

    number: int  # 0 for the first
    stage: Stage
    mixture: Mixture | Blend
    sources: NDArray[np.intp]  # for each source of the mixture, its index in the plan's sources
    positions: NDArray[np.uint64]  # of all sources of the plan, at the stage's first row
    rows: NDArray[np.uint64]  # that all sources of the plan gave before the stage
    seq_len: int  # inputs per row
    num_parts: int  # rows of a window

    @property
    def step_windows(self) -> int:
        """Windows of a step."""
        return self.stage.global_batch_size // self.num_parts

    def member(self, source: int) -> int | None:
        """Return the index in the mixture of a source of the plan, or None if the stage does not use it."""
        found = np.flatnonzero(self.sources == source)
        return int(found[0]) if found.size else None

    def given_at(self, plan_steps: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return what all sources have given before a plan step of this stage, or the step behind its last.

        `(2, sources)`: positions, rows. Of several steps it is the sum, modulo 2^64, as `Mixture.count`
        returns it.
        """
        given = np.stack((self.positions, self.rows)) * np.uint64(plan_steps.size)
        windows = (plan_steps - np.uint64(self.stage.from_step)) * np.uint64(self.step_windows)
        counts = self.mixture.count(windows)
        given[:, self.sources] += np.stack((counts, counts * np.uint64(self.num_parts)))
        return given


class Timeline:
    """The stages of a plan, bound or not, one after another.

    Args:
        blend: chooses the sources of the whole run, instead of the mixtures.
    """

    def __init__(self, plan: Plan, blend: Blend | None = None) -> None:
        self.skips = plan.skip_steps
        self._from_steps = [stage.from_step for stage in plan.stages]
        numbers = {name: number for number, name in enumerate(plan.sources)}
        positions = rows = np.zeros(len(numbers), dtype=np.uint64)
        self.stages: list[PlacedStage] = []
        for number, stage in enumerate(plan.stages):
            if number:
                positions, rows = self.stages[-1].given_at(np.array([stage.from_step], dtype=np.uint64))
            mixture: Mixture | Blend = (
                Mixture(stage.units, stream_key("mixture", plan.seed, str(number)))
                if blend is None
                else blend.since(int(rows.sum()))
            )
            sources = np.array([numbers[name] for name in mixture.names], dtype=np.intp)
            seq_len = stage.seq_len or plan.seq_len
            num_parts = plan.seq_len // seq_len
            placed = PlacedStage(number, stage, mixture, sources, positions, rows, seq_len, num_parts)
            self.stages.append(placed)

    def plan_steps(self, steps: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the plan steps of training steps."""
        return self.skips.nth_outside(steps) if self.skips.total else steps

    def plan_step(self, step: int) -> int:
        """Return the plan step of a training step."""
        return int(self.plan_steps(np.array([step], dtype=np.uint64))[0]) if self.skips.total else step

    def first_training_step(self, number: int) -> int | None:
        """Return the first training step of a stage, or None if it is skipped as a whole."""
        step = self.skips.outside_before(self._from_steps[number])
        stop = self._from_steps[number + 1] if number + 1 < len(self.stages) else None
        return step if stop is None or self.plan_step(step) < stop else None

    def by_stage(self, plan_steps: NDArray[np.uint64]) -> list[tuple[PlacedStage, NDArray[np.uint64]]]:
        """Return ascending plan steps, those of each stage together."""
        if not plan_steps.size:
            return []
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

    def given_before(self, plan_step: int) -> NDArray[np.uint64]:
        """Return the positions of all sources at a plan step, and their rows before it: `(2, sources)`."""
        return self.stage_at(plan_step).given_at(np.array([plan_step], dtype=np.uint64))

    def begins(self, source: int) -> NDArray[np.uint64]:
        """Return a source's position at the beginning of each stage: `(stages,) uint64`, ascending."""
        return np.array([placed.positions[source] for placed in self.stages], dtype=np.uint64)

    def stage_numbers(self, source: int, positions: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the stage in which a source reaches each position; it need not use the source."""
        # Of stages that begin at the same position only the last can have given it.
        return self.begins(source).searchsorted(positions, side="right") - 1

    def blocks_of(self, source: int, positions: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Number the blocks that `rows_of` computes: for each of ascending positions that of its block."""
        numbers = self.stage_numbers(source, positions)
        blocks = np.zeros(positions.shape, dtype=np.uint64)
        for number, here in grouped(numbers):
            placed = self.stages[number]
            if (member := placed.member(source)) is not None:
                blocks[here] = placed.mixture.block_of(member, positions[here] - placed.positions[source])
        changes = (np.diff(numbers, prepend=numbers[:1]) != 0) | (np.diff(blocks, prepend=blocks[:1]) != 0)
        counted: NDArray[np.intp] = changes.cumsum()
        return counted

    def rows_of(
        self, source: int, positions: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.bool_]]:
        """Return which rows hold positions of a source: the inverse of what a stage places.

        `(k,)` each: plan step, first row of the window in the global batch, and whether any row holds the
        position (a source that the last stages do not use has a last position).
        """
        plan_steps = np.zeros(positions.shape, dtype=np.uint64)
        rows = np.zeros(positions.shape, dtype=np.uint64)
        given = np.zeros(positions.shape, dtype=bool)
        for number, here in grouped(self.stage_numbers(source, positions)):
            placed = self.stages[number]
            if (member := placed.member(source)) is not None:
                at = placed.mixture.find(member, positions[here] - placed.positions[source])
                steps, windows = np.divmod(at, np.uint64(placed.step_windows))
                rows[here] = windows * np.uint64(placed.num_parts)
                plan_steps[here] = steps + np.uint64(placed.stage.from_step)
                given[here] = True
        return plan_steps, rows, given
