"""A plan as tests ask about it: rows one at a time, by `tests/second.py`, slow and easy to check by eye."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count as counting
from typing import Any, NamedTuple

import numpy as np

from tests import second

BLOCK = second.BLOCK_ROWS

units_of = second.units


class ReferenceSource(NamedTuple):
    """The shape of one corpus under a plan."""

    shard_tokens: Sequence[int]
    num_windows: int


class Row(NamedTuple):
    """One row of a run; `step` is the training step, None where training skips the plan step."""

    plan_step: int
    step: int | None
    row: int
    source: str
    position: int
    epoch: int
    shard: int
    start: int
    substitute: bool


class ReferencePlan:
    """A plan over corpora of some shapes.

    Args:
        plan: the plan's JSON; `seq_len` and `stages`, the rest may be left out.
        shard_tokens: tokens of each shard, by corpus.
    """

    def __init__(self, plan: Mapping[str, Any], shard_tokens: Mapping[str, Sequence[int]]) -> None:
        self.plan = second.SecondPlan(plan, shard_tokens)
        self.stages, self.skip_steps = plan["stages"], self.plan.skip_steps
        self.windows = {
            name: rows for (name, _), rows in self.plan.rows.items() if isinstance(rows, second.Windows)
        }
        self.sources = {
            name: ReferenceSource(shard_tokens[name], windows.n) for name, windows in self.windows.items()
        }
        self.first_shard = self.plan.first_shards
        self.units = [stage.units for stage in self.plan.stages]
        self.parts = [stage.parts for stage in self.plan.stages]
        # bases[k]: windows that each source has given before stage k.
        self.bases = [stage.positions for stage in self.plan.stages]
        self.denied = [
            {name: [range(*each) for each in excluded] for (name, _), excluded in stage.excluded.items()}
            for stage in self.plan.stages
        ]
        self.plan_step = self.plan.plan_step
        self.global_batch_size = self.plan.global_batch_size
        self.seq_len = self.plan.seq_len

    def stage_of(self, plan_step: int) -> int:
        """Number of the stage that a plan step belongs to."""
        return self.plan.stage_at(plan_step).number

    def training_step(self, plan_step: int) -> int | None:
        """The training step of a plan step; None where it is skipped."""
        skipped = 0
        for start, stop in self.skip_steps:
            if start <= plan_step < stop:
                return None
            if stop <= plan_step:
                skipped += stop - start
        return plan_step - skipped

    def row_of(self, plan_step: int, row: int) -> Row:
        """One row of a plan step, skipped or not."""
        stage, name, position = self.plan.position(plan_step, row)
        window, epoch, substitute = self.plan.window(stage, name, position)
        shard, start = self.windows[name].place(window)
        start += row % stage.parts * stage.seq_len
        step = self.training_step(plan_step)
        return Row(plan_step, step, row, name, position, epoch, shard, start, substitute)

    def window(self, step: int, row: int) -> tuple[str, int, int]:
        """(source, shard of that source, start) of one row of a training step."""
        found = self.row_of(self.plan_step(step), row)
        return found.source, found.shard, found.start

    def located(self, step: int, row: int) -> list[int]:
        """The same as indices have it: shard number over all sources, start."""
        name, shard, start = self.window(step, row)
        return [self.first_shard[name] + shard, start]

    def rows(self) -> Iterator[Row]:
        """Every row of the run from its first plan step on, without end."""
        for plan_step in counting():
            for row in range(self.stages[self.stage_of(plan_step)]["global_batch_size"]):
                yield self.row_of(plan_step, row)

    def lookup(self, name: str, start: int, stop: int, *, epochs: int, plan_steps: int) -> list[Row]:
        """Every row of the first plan steps that touches corpus-wide tokens [start, stop)."""
        source = self.sources[name]
        found = []
        for each in self.rows():
            if each.plan_step >= plan_steps:
                break
            first = sum(source.shard_tokens[: each.shard]) + each.start
            seq_len = self.plan.stage_at(each.plan_step).seq_len
            touches = first < stop and start <= first + seq_len
            if each.source == name and each.epoch < epochs and touches:
                found.append(each)
        return found


def window_of_row(
    plan: Mapping[str, Any], shard_tokens: Sequence[int], step: int, row: int
) -> tuple[int, int]:
    """Return (shard, start) of one global row of a plan with one source."""
    (source,) = plan["stages"][0]["mixture"]
    _, shard, start = ReferencePlan(plan, {source: shard_tokens}).window(step, row)
    return shard, start


def batch(
    plan: Mapping[str, Any],
    shards: Sequence[np.ndarray] | Mapping[str, Sequence[np.ndarray]],
    step: int,
    *,
    count: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> np.ndarray:
    """Return the tokens `(count, rows, seq_len + 1)` of a rank, by plain slicing.

    Args:
        plan: the plan's JSON.
        shards: of its only source, or of each source by name.
        step, count: training steps, of one batch size and length.
        rank, world_size: which rows.
    """
    if not isinstance(shards, Mapping):
        shards = {next(iter(plan["stages"][0]["mixture"])): shards}
    reference = ReferencePlan(plan, {name: [len(s) for s in own] for name, own in shards.items()})
    rows, window = reference.global_batch_size(step) // world_size, reference.seq_len(step) + 1
    found = []
    for k in range(count):
        for row in range(rank * rows, (rank + 1) * rows):
            source, shard, start = reference.window(step + k, row)
            found.append(shards[source][shard][start : start + window].tolist())
    return np.array(found).reshape(count, rows, window)


def one_source(corpus: str, seq_len: int, batch_size: int, **fields: Any) -> dict[str, Any]:
    """Return the JSON of a plan over one corpus."""
    return {
        "seq_len": seq_len,
        "stages": [{"from_step": 0, "global_batch_size": batch_size, "mixture": {corpus: 1.0}}],
        **fields,
    }
