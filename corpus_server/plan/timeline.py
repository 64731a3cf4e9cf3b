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
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.blend import Blend
from corpus_server.plan.document import MAX_STAGES, Plan
from corpus_server.plan.mixture import Mixture, grouped
from corpus_server.plan.numbers import BatchRows, PlanSteps, Positions, Steps, UInt64Array
from corpus_server.plan.permutation import stream_key

_KEPT: Final = 64
"""Stages of a plan with more than `MAX_STAGES` that are kept once they were needed, 3 kB each; a request
needs one or two."""


class PlacedStage(NamedTuple):
    """A stage and where its sources stand when it begins."""

    number: int  # 0 for the first
    from_step: int
    global_batch_size: int
    mixture: Mixture | Blend
    sources: NDArray[np.intp]  # for each source of the mixture, its index in the plan's sources
    positions: Positions  # of all sources of the plan, at the stage's first row
    rows: UInt64Array  # that all sources of the plan gave before the stage
    seq_len: int  # inputs per row
    num_parts: int  # rows of a window

    @property
    def step_windows(self) -> int:
        """Windows of a step."""
        return self.global_batch_size // self.num_parts

    def member(self, source: int) -> int | None:
        """Return the index in the mixture of a source of the plan, or None if the stage does not use it."""
        found = np.flatnonzero(self.sources == source)
        return int(found[0]) if found.size else None

    def given_at(self, plan_steps: PlanSteps) -> UInt64Array:
        """Return what all sources have given before a plan step of this stage, or the step behind its last.

        `(2, sources)`: positions, rows. Of several steps it is the sum, modulo 2^64, as `Mixture.count`
        returns it.
        """
        given = np.stack((self.positions, self.rows)) * np.uint64(plan_steps.size)
        windows = (plan_steps - np.uint64(self.from_step)) * np.uint64(self.step_windows)
        counts = self.mixture.count(windows)
        given[:, self.sources] += np.stack((counts, counts * np.uint64(self.num_parts)))
        return given


class PlacedStages(Sequence[PlacedStage]):
    """The stages of a plan; each is placed when it is asked for."""

    def __init__(self, plan: Plan, blend: Blend | None) -> None:
        self._log, self._num_stages, self._blend = plan.log, len(plan.stages), blend
        self._seq_len, self._seed = plan.seq_len, plan.seed
        self._numbers = {name: number for number, name in enumerate(plan.sources)}
        self._kept: dict[int, PlacedStage] = {}
        for number in range(self._log.num_placed, self._num_stages):
            if number:
                before, begin = self[number - 1], self._log.from_steps[number]
                self._log.place(number, *before.given_at(np.array([begin], dtype=np.uint64)))
            else:
                self._log.place(0, np.zeros(len(self._numbers), dtype=np.uint64))

    def __len__(self) -> int:
        return self._num_stages

    @overload
    def __getitem__(self, number: int) -> PlacedStage: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[PlacedStage]: ...
    def __getitem__(self, number: int | slice) -> PlacedStage | Sequence[PlacedStage]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._num_stages))]
        if (found := self._kept.get(number)) is None:
            if len(self._kept) >= (MAX_STAGES if self._num_stages <= MAX_STAGES else _KEPT):
                self._kept.clear()
            found = self._kept[number] = self._placed(range(self._num_stages)[number])
        return found

    def __iter__(self) -> Iterator[PlacedStage]:
        return (self[number] for number in range(self._num_stages))

    def _placed(self, number: int) -> PlacedStage:
        log, num_sources = self._log, len(self._numbers)
        # Copies: a view would keep arrays that the log has replaced.
        positions, rows = (each[number, :num_sources].copy() for each in (log.positions, log.rows))
        mixture: Mixture | Blend = (
            Mixture(log.shares(number), stream_key("mixture", self._seed, str(number)))
            if self._blend is None
            else self._blend.since(int(rows.sum()))
        )
        sources = np.array([self._numbers[name] for name in mixture.names], dtype=np.intp)
        seq_len = int(log.seq_lens[number])
        shape = int(log.from_steps[number]), int(log.sizes[number])
        return PlacedStage(
            number, *shape, mixture, sources, positions, rows, seq_len, self._seq_len // seq_len
        )


class Timeline:
    """The stages of a plan, bound or not, one after another.

    Args:
        blend: chooses the sources of the whole run, instead of the mixtures.

    Attributes:
        stages: with the positions of the sources; one that is not used is not made.
        skips: plan steps that training never sees.
        num_steps: training steps of a plan that has an end; a last step that is not full is none.
    """

    def __init__(self, plan: Plan, blend: Blend | None = None) -> None:
        self.skips = plan.skip_steps
        self.stages = PlacedStages(plan, blend)
        self._log, self._num_stages = plan.log, len(plan.stages)
        self.num_steps = None if blend is None else self._whole_steps(blend)

    def _whole_steps(self, blend: Blend) -> int:
        """Return how many whole training steps the rows of a run make."""
        stages = ((placed, int(placed.rows.sum())) for placed in reversed(self.stages))
        placed, before = next(each for each in stages if each[1] < blend.num_rows)
        end = placed.from_step + (blend.num_rows - before) // placed.global_batch_size
        return self.skips.outside_before(end)

    @property
    def from_steps(self) -> NDArray[np.int64]:
        """Plan step at which each stage begins, `(stages,) int64`."""
        return self._log.from_steps[: self._num_stages]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows of a step of each stage, `(stages,) int64`."""
        return self._log.sizes[: self._num_stages]

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """Inputs of a row of each stage, `(stages,) int64`."""
        return self._log.seq_lens[: self._num_stages]

    def uses(self, source: int) -> NDArray[np.bool_]:
        """Return whether each stage uses a source, `(stages,)`."""
        return self._log.units[: self._num_stages, source] > 0

    def plan_steps(self, steps: Steps) -> PlanSteps:
        """Return the plan steps of training steps."""
        return self.skips.nth_outside(steps) if self.skips.total else steps

    def plan_step(self, step: int) -> int:
        """Return the plan step of a training step."""
        return int(self.plan_steps(np.array([step], dtype=np.uint64))[0]) if self.skips.total else step

    def first_training_step(self, number: int) -> int | None:
        """Return the first training step of a stage, or None if it is skipped as a whole."""
        step = self.skips.outside_before(int(self.from_steps[number]))
        stop = int(self.from_steps[number + 1]) if number + 1 < self._num_stages else None
        return step if stop is None or self.plan_step(step) < stop else None

    def by_stage(self, plan_steps: PlanSteps) -> list[tuple[PlacedStage, PlanSteps]]:
        """Return ascending plan steps, those of each stage together."""
        if not plan_steps.size:
            return []
        first, last = (self.number_at(int(end)) for end in (plan_steps[0], plan_steps[-1]))
        if first == last:
            return [(self.stages[first], plan_steps)]
        numbers = self.from_steps.searchsorted(plan_steps.astype(np.int64), side="right") - 1
        return [(self.stages[number], plan_steps[here]) for number, here in grouped(numbers)]

    def stage_at(self, plan_step: int) -> PlacedStage:
        """Return the stage of a plan step."""
        return self.stages[self.number_at(plan_step)]

    def given_before(self, plan_step: int) -> UInt64Array:
        """Return the positions of all sources at a plan step, and their rows before it: `(2, sources)`."""
        return self.stage_at(plan_step).given_at(np.array([plan_step], dtype=np.uint64))

    def begins(self, source: int) -> Positions:
        """Return a source's position at the beginning of each stage: `(stages,) uint64`, ascending."""
        return self._log.positions[: self._num_stages, source]

    def stage_numbers(self, source: int, positions: Positions) -> NDArray[np.intp]:
        """Return the stage in which a source reaches each position; it need not use the source."""
        # Of stages that begin at the same position only the last can have given it.
        return self.begins(source).searchsorted(positions, side="right") - 1

    def blocks_of(self, source: int, positions: Positions) -> NDArray[np.intp]:
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

    def rows_of(self, source: int, positions: Positions) -> tuple[PlanSteps, BatchRows, NDArray[np.bool_]]:
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
                plan_steps[here] = steps + np.uint64(placed.from_step)
                given[here] = True
        return plan_steps, rows, given

    def number_at(self, plan_step: int) -> int:
        """Return the number of the stage of a plan step."""
        return bisect_right(self._log.from_steps, plan_step, hi=self._num_stages) - 1
