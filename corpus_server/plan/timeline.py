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
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter
from corpus_server.pieces import UInt64Array
from corpus_server.plan.blend import Blend
from corpus_server.plan.document import MAX_STAGES, Plan
from corpus_server.plan.mixture import Mixture, grouped
from corpus_server.plan.numbers import BatchRows, PlanSteps, Positions
from corpus_server.plan.permutation import stream_key
from corpus_server.plan.stage import MAX_STEP
from corpus_server.plan.stage_log import Made
from corpus_server.plan.stratified import MIXTURES

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
    step_windows: int  # windows of a step

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


class Timeline:
    """The stages of a plan, bound or not, one after another.

    Args:
        blend: chooses the sources of the whole run, instead of the mixtures.
        num_rows: of the whole run, if it has an end.

    Attributes:
        skips: plan steps that training never sees.
        num_steps: training steps of a plan that has an end; a last step that is not full is none.
    """

    def __init__(self, plan: Plan, blend: Blend | None = None, num_rows: int | None = None) -> None:
        assert plan.version is not None  # set by Plan itself
        self.skips = plan.skip_steps
        self._log, self._num_stages, self._blend = plan.log, len(plan.stages), blend
        self._seq_len, self._seed, self._mixture = plan.seq_len, plan.seed, MIXTURES[plan.version]
        self._numbers = {name: number for number, name in enumerate(plan.sources)}
        self._kept: dict[int, PlacedStage] = {}
        for number in range(self._log.num_placed, self._num_stages):
            if number:
                before, begin = self._stage(number - 1), self._log.from_steps[number]
                self._log.place(number, *before.given_at(np.array([begin], dtype=np.uint64)))
            else:
                self._log.place(0, np.zeros(len(self._numbers), dtype=np.uint64))
        self.num_steps = None if num_rows is None else self._whole_steps(num_rows)

    def _stage(self, number: int) -> PlacedStage:
        """Return a stage, which is kept for a while."""
        if (found := self._kept.get(number)) is None:
            if len(self._kept) >= (MAX_STAGES if self._num_stages <= MAX_STAGES else _KEPT):
                self._kept.clear()
            found = self._kept[number] = self._placed(number)
        return found

    def _placed(self, number: int) -> PlacedStage:
        log, num_sources = self._log, len(self._numbers)
        # Copies: a view would keep arrays that the log has replaced.
        positions, rows = (each[number, :num_sources].copy() for each in (log.positions, log.rows))
        mixture: Mixture | Blend = (
            self._mixture(log.shares(number), stream_key("mixture", self._seed, str(number)))
            if self._blend is None
            else self._blend.since(int(rows.sum()))
        )
        sources = np.array([self._numbers[name] for name in mixture.names], dtype=np.intp)
        seq_len, size = int(log.seq_lens[number]), int(log.sizes[number])
        return PlacedStage(
            number=number,
            from_step=int(log.from_steps[number]),
            global_batch_size=size,
            mixture=mixture,
            sources=sources,
            positions=positions,
            rows=rows,
            seq_len=seq_len,
            num_parts=(num_parts := self._seq_len // seq_len),
            step_windows=size // num_parts,
        )

    def _whole_steps(self, num_rows: int) -> int:
        """Return how many whole training steps the rows of a run make."""
        if not num_rows:
            return 0
        stages = ((placed, int(placed.rows.sum())) for placed in reversed(self.stages))
        placed, before = next(each for each in stages if each[1] < num_rows)
        end = placed.from_step + (num_rows - before) // placed.global_batch_size
        return self.skips.outside_before(end)

    @property
    def stages(self) -> Sequence[PlacedStage]:
        """The stages, with the positions of the sources; one that is not used is not made."""
        return Made(self._num_stages, self._stage)

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

    def plan_steps(self, steps: UInt64Array) -> PlanSteps:
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
        first, last = self.stage_at(int(plan_steps[0])), self.stage_at(int(plan_steps[-1]))
        if first.number == last.number:
            return [(first, plan_steps)]
        numbers = self.from_steps.searchsorted(plan_steps.astype(np.int64), side="right") - 1
        return [(self._stage(number), plan_steps[here]) for number, here in grouped(numbers)]

    def stage_at(self, plan_step: int) -> PlacedStage:
        """Return the stage of a plan step."""
        return self._stage(bisect_right(self._log.from_steps, plan_step, hi=self._num_stages) - 1)

    def stage_of(self, step: int) -> PlacedStage:
        """Return the stage of a training step."""
        return self.stage_at(self.plan_step(step))

    def check_part(self, step: int, *, count: int = 1, rank: int = 0, world_size: int = 1) -> int:
        """Check that a rank slice of consecutive training steps exists, and return its rows per step.

        Raises:
            InvalidParameter: a value is outside its range, or the steps have batches of several shapes.
        """
        if self.num_steps is not None and step + count > self.num_steps:
            most = self.num_steps - count
            raise InvalidParameter(
                f"the plan's order ends after {self.num_steps} steps, and step {step} with count {count} "
                f"ends beyond; give the loader num_steps={self.num_steps}, or the plan's order a longer run",
                parameter="step",
                received=step,
                accepted=f"at most {most}" if most >= 0 else "none with this count",
            )
        if not 0 <= step <= MAX_STEP - count + 1:
            raise InvalidParameter.expected("step", f"in [0, {MAX_STEP - count + 1}]", step)
        placed = self.stage_of(step)
        if count > 1 and self._num_stages > 1:
            self._check_one_shape(step, count, placed)
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

    def _check_one_shape(self, step: int, count: int, placed: PlacedStage) -> None:
        """Refuse steps with batches of several shapes, because a response is one array."""
        last = self.plan_step(step + count - 1)
        stop = int(self.from_steps.searchsorted(last, side="right"))
        its = slice(placed.number, stop)
        if (self.sizes[its] == placed.global_batch_size).all() and (
            self.seq_lens[its] == placed.seq_len
        ).all():
            return
        for later in self.stages[placed.number + 1 : stop]:
            if self.first_training_step(later.number) is None:
                continue
            until = self.skips.outside_before(later.from_step)
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

    def given_before(self, plan_step: int) -> UInt64Array:
        """Return the positions of all sources at a plan step, and their rows before it: `(2, sources)`."""
        return self.stage_at(plan_step).given_at(np.array([plan_step], dtype=np.uint64))

    def given_in(self, placed: PlacedStage, plan_steps: PlanSteps, seq_len: int) -> UInt64Array:
        """Return what all sources have given in stages of one `seq_len` before plan steps of a stage.

        `(sources,)`: positions, summed over the steps modulo 2^64, see `PlacedStage.given_at`.
        """
        seq_lens = self.seq_lens[: placed.number]
        is_its = np.concatenate(([False], seq_lens == seq_len, [False]))
        # Neighbours of one length are looked up together: a chain may have 100,000 stages.
        begins, stops = np.flatnonzero(is_its[1:] != is_its[:-1]).reshape(-1, 2).T
        positions = self._log.positions[:, : len(self._numbers)]
        before = (positions[stops] - positions[begins]).sum(axis=0, dtype=np.uint64)
        given: UInt64Array = before * np.uint64(plan_steps.size)
        if placed.seq_len == seq_len:
            given += placed.given_at(plan_steps)[0] - placed.positions * np.uint64(plan_steps.size)
        return given

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
            placed = self._stage(number)
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
            placed = self._stage(number)
            if (member := placed.member(source)) is not None:
                at = placed.mixture.find(member, positions[here] - placed.positions[source])
                steps, windows = np.divmod(at, np.uint64(placed.step_windows))
                rows[here] = windows * np.uint64(placed.num_parts)
                plan_steps[here] = steps + np.uint64(placed.from_step)
                given[here] = True
        return plan_steps, rows, given
