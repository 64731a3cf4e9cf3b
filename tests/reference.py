"""The plan's arithmetic once more: plain integers, one row at a time, slow and easy to check by eye.

Written from the contract and not from the code; which window an order gives is said by `tests/second.py`.
Between rows only a block's slots and its ranks are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import count as counting
from typing import Any, NamedTuple

import numpy as np

from tests import second
from tests.arithmetic import all_shuffled, stream

BLOCK = 65536


def units_of(mixture: Mapping[str, float]) -> dict[str, int]:
    """Weights in units of 1/65536 by largest remainder, in sorted order of the names."""
    total = sum(Fraction(weight) for weight in mixture.values())
    exact = {name: Fraction(mixture[name]) / total * BLOCK for name in sorted(mixture)}
    units = {name: math.floor(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (units[name] - exact[name], name))
    for name in by_remainder[: BLOCK - sum(units.values())]:
        units[name] += 1
    return units


@lru_cache(64)
def slots_of(seed: int, stage: int, block: int) -> list[int]:
    """The slot of every offset of a block."""
    key = stream("mixture", seed, str(stage))
    return all_shuffled(BLOCK, key, block)


class ReferenceSource:
    """The windows of one corpus as a plan reads them.

    Args:
        plan: the plan's JSON.
        name: the corpus.
        shard_tokens: tokens of each shard.
    """

    def __init__(self, plan: Mapping[str, Any], name: str, shard_tokens: Sequence[int]) -> None:
        self.name, self.shard_tokens = name, shard_tokens
        self.seed, self.order = plan.get("seed", 0), plan.get("order", "shuffle")
        self.seq_len = plan["seq_len"]
        self.stride = plan.get("stride") or (1 if self.order == "random" else self.seq_len)
        self.counts = [len(range(0, tokens - self.seq_len, self.stride)) for tokens in shard_tokens]
        self.num_windows = sum(self.counts)

    def sample(self, position: int) -> tuple[int, int]:
        """The epoch of a position and the window that it holds before any exclusion."""
        return second.chosen(self.order, position, self.num_windows, self.seed, self.name)

    def touching(self, ranges: Sequence[Sequence[int]]) -> list[range]:
        """The windows that touch a token of some corpus-wide ranges: sorted, apart."""
        found = []
        for start, stop in ranges:
            first_token = first_window = 0
            for tokens, windows in zip(self.shard_tokens, self.counts, strict=True):
                low, high = max(start - first_token, 0), min(stop - first_token, tokens)
                if low < high:
                    # Window k holds the tokens k * stride to k * stride + seq_len, both included.
                    first = max(0, math.ceil(Fraction(low - self.seq_len, self.stride)))
                    last = min(windows - 1, (high - 1) // self.stride)
                    found.append(range(first_window + first, first_window + last + 1))
                first_token += tokens
                first_window += windows
        apart: list[range] = []
        for windows_touched in sorted(filter(None, found), key=lambda each: each.start):
            if apart and windows_touched.start <= apart[-1].stop:
                windows_touched = range(apart[-1].start, max(apart.pop().stop, windows_touched.stop))
            apart.append(windows_touched)
        return apart

    def substitute(self, window: int, epoch: int, denied: Sequence[range]) -> int:
        """The window that stands in for a denied one."""
        excluded = [(each.start, each.stop) for each in denied]
        return second.stand_in(self.order, window, self.num_windows, excluded, self.seed, self.name, epoch)

    def locate(self, window: int) -> tuple[int, int]:
        """The shard of a window and its start there."""
        shard = 0
        while window >= self.counts[shard]:
            window -= self.counts[shard]
            shard += 1
        return shard, window * self.stride


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
        self.seed, self.stages = plan.get("seed", 0), plan["stages"]
        self.skip_steps = sorted(plan.get("skip_steps", ()))
        self.units = [units_of(stage["mixture"]) for stage in self.stages]
        names = list(dict.fromkeys(name for units in self.units for name in units))
        self.sources = {name: ReferenceSource(plan, name, shard_tokens[name]) for name in names}
        self.first_shard: dict[str, int] = {}
        for name in names:
            self.first_shard[name] = sum(len(shard_tokens[other]) for other in self.first_shard)
        self._ranks: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self.denied: list[dict[str, list[range]]] = []
        ranges: dict[str, list[Sequence[int]]] = {name: [] for name in names}
        for stage in self.stages:
            for name, more in stage.get("exclude", {}).items():
                ranges[name] = [*ranges[name], *more]
            self.denied.append({name: self.sources[name].touching(ranges[name]) for name in names})
        # Rows of each stage, in inputs; a window of the plan is read as so many of them.
        self.seq_lens = [stage.get("seq_len", plan["seq_len"]) for stage in self.stages]
        self.parts = [plan["seq_len"] // seq_len for seq_len in self.seq_lens]
        # bases[k]: windows that each source has given before stage k.
        self.bases = [dict.fromkeys(names, 0)]
        for number, (stage, following) in enumerate(zip(self.stages, self.stages[1:], strict=False)):
            rows = (following["from_step"] - stage["from_step"]) * stage["global_batch_size"]
            windows = rows // self.parts[number]
            self.bases.append(
                {
                    name: base + self.windows_given(number, name, windows)
                    for name, base in self.bases[-1].items()
                }
            )

    def ranks(self, stage: int, block: int) -> list[tuple[str, int]]:
        """For every offset of a block, its source and how many before it in the block have the same."""
        if (stage, block) not in self._ranks:
            names = [name for name, units in self.units[stage].items() for _ in range(units)]
            seen = dict.fromkeys(names, 0)
            table = self._ranks[stage, block] = []
            for slot in slots_of(self.seed, stage, block):
                name = names[slot]
                table.append((name, seen[name]))
                seen[name] += 1
        return self._ranks[stage, block]

    def windows_given(self, stage: int, name: str, windows: int) -> int:
        """How many of the first windows of a stage are of a source."""
        units = self.units[stage]
        if name not in units or len(units) == 1:
            return windows if name in units else 0
        block, rest = divmod(windows, BLOCK)
        given = block * units[name]
        return given + (sum(each == name for each, _ in self.ranks(stage, block)[:rest]) if rest else 0)

    def stage_of(self, plan_step: int) -> int:
        """Number of the stage that a plan step belongs to."""
        return max(k for k, stage in enumerate(self.stages) if stage["from_step"] <= plan_step)

    def global_batch_size(self, step: int) -> int:
        """Rows of a training step."""
        return int(self.stages[self.stage_of(self.plan_step(step))]["global_batch_size"])

    def seq_len(self, step: int) -> int:
        """Inputs of a row of a training step."""
        return int(self.seq_lens[self.stage_of(self.plan_step(step))])

    def plan_step(self, step: int) -> int:
        """The plan step of a training step."""
        for start, stop in self.skip_steps:
            if step >= start:
                step += stop - start
        return step

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
        number = self.stage_of(plan_step)
        stage = self.stages[number]
        row_of_stage = (plan_step - stage["from_step"]) * stage["global_batch_size"] + row
        within, part = divmod(row_of_stage, self.parts[number])
        if len(self.units[number]) == 1:
            (name,) = self.units[number]
            given = within
        else:
            block, offset = divmod(within, BLOCK)
            name, rank = self.ranks(number, block)[offset]
            given = block * self.units[number][name] + rank
        source, denied = self.sources[name], self.denied[number][name]
        position = self.bases[number][name] + given
        epoch, window = source.sample(position)
        substitute = any(window in each for each in denied)
        if substitute:
            window = source.substitute(window, epoch, denied)
        shard, start = source.locate(window)
        start += part * self.seq_lens[number]
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
            seq_len = self.seq_lens[self.stage_of(each.plan_step)]
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
