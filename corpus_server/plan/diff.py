"""What differs between two plans: fields by name, rows by step.

How far two plans are equal follows from their documents: a step depends on the stages up to its own
and on the steps skipped before it, on nothing later. From there on rows are compared: step by step,
or, where only exclusions differ, at the steps that hold what is excluded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.document import MAX_STEP, Plan
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.suspects import only_exclusions_differ, suspects

MAX_ROWS: Final = 1 << 24
"""Rows of each plan that are compared by default: some ten seconds."""

_PIECE_ROWS: Final = 1 << 19
_NEVER: Final = MAX_STEP + 1

Pairs = list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldChange:
    """One field that differs.

    Attributes:
        field: its name, like `stages[from_step=100].mixture.web`.
        a, b: its value in either plan, None where it lacks it; of lists of ranges only those that the
            other plan lacks.
    """

    field: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepChange:
    """One training step that differs.

    Attributes:
        step: training step.
        plan_steps: the plan step that it is in either plan.
        num_rows: rows that differ; those that only one plan has count too.
        rows: which, as half-open ranges of rows of the global batch.
    """

    step: int
    plan_steps: tuple[int, int]
    num_rows: int
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowComparison:
    """Which rows differ.

    Attributes:
        equal_steps: first training steps that are equal because of what the plans say; None: all are.
        compared_until: steps [equal_steps, compared_until) were compared row by row; None if all are
            equal.
        steps: the first that differ, in order.
    """

    equal_steps: int | None
    compared_until: int | None
    steps: tuple[StepChange, ...]

    @property
    def first_step(self) -> int | None:
        """The first training step that differs; None if there is none as far as was compared."""
        return self.steps[0].step if self.steps else None


def changed_fields(a: Plan, b: Plan) -> list[FieldChange]:
    """Return the fields that differ, stages matched by their `from_step`."""
    first, second = a.to_json(), b.to_json()
    changes = list(_changes("", first, second, ("seq_len", "stride", "seed", "order")))
    one, other = ({stage["from_step"]: stage for stage in plan["stages"]} for plan in (first, second))
    for from_step in sorted({*one, *other}):
        where = f"stages[from_step={from_step}]"
        if from_step not in one or from_step not in other:
            changes.append(FieldChange(field=where, a=one.get(from_step), b=other.get(from_step)))
            continue
        stages = one[from_step], other[from_step]
        changes += _changes(f"{where}.", *stages, ("global_batch_size",))
        changes += _changes(f"{where}.mixture.", *(stage["mixture"] for stage in stages))
        excluded = [stage.get("exclude", {}) for stage in stages]
        for name in sorted({*excluded[0], *excluded[1]}):
            changes += _range_changes(f"{where}.exclude.{name}", *(each.get(name, []) for each in excluded))
    changes += _range_changes("skip_steps", first["skip_steps"], second["skip_steps"])
    changes += _changes("fingerprints.", first["fingerprints"], second["fingerprints"])
    return changes


def count_equal_steps(a: Plan, b: Plan) -> int | None:
    """Return how many first training steps hold the same tokens by the documents alone; None: all."""
    if (a.seq_len, a.stride, a.seed, a.order) != (b.seq_len, b.stride, b.seed, b.order):
        return 0
    plan_step = min(_first_stage_change(a, b), _first_skip_change(a.skip_steps, b.skip_steps))
    return None if plan_step == _NEVER else _training_step(a.skip_steps, plan_step)


def compare_rows(
    a: Plan,
    b: Plan,
    shard_tokens: Mapping[str, Sequence[int]],
    *,
    num_steps: int = 10,
    max_rows: int = MAX_ROWS,
) -> RowComparison:
    """Return the first steps whose rows differ, and which rows.

    Args:
        a, b: plans bound to the same corpora.
        shard_tokens: of every source of both, the tokens of its shards.
        num_steps: stop after so many differing steps.
        max_rows: stop after about so many rows of either plan, where more than exclusions differ.
    """
    equal = count_equal_steps(a, b)
    if equal is None:
        return RowComparison(equal_steps=None, compared_until=None, steps=())
    pair = _Located(a, shard_tokens), _Located(b, shard_tokens)
    largest = max(stage.global_batch_size for plan in (a, b) for stage in plan.stages)
    borders = sorted({border for located in pair for border in located.borders})
    found: list[StepChange] = []
    since = pair[0].plan_step(equal)
    if a.order != "random" and only_exclusions_differ(pair[0].sampler, pair[1].sampler, since):
        until = equal
        for plan_step, steps in suspects(pair[0].sampler, pair[1].sampler, since):
            for step in steps:
                found += _step_changes(pair, step, 1)
                if len(found) == num_steps:
                    return RowComparison(equal_steps=equal, compared_until=step + 1, steps=tuple(found))
            until = _training_step(a.skip_steps, plan_step)
        if until > equal:  # else too much is excluded to look it up, and the first steps will differ
            return RowComparison(equal_steps=equal, compared_until=until, steps=tuple(found))
    step, count, left = equal, num_steps, max_rows
    while left > 0 and step <= MAX_STEP and len(found) < num_steps:
        # Within a piece no stage begins, so that it has one batch size in each plan.
        border = borders[at] if (at := bisect_right(borders, step)) < len(borders) else _NEVER
        piece = min(count, border - step, max(1, left // largest))
        found += _step_changes(pair, step, piece)
        step, left = step + piece, left - piece * largest
        count = min(2 * count, max(1, _PIECE_ROWS // largest))  # mostly the first steps tell
    if len(found) >= num_steps:
        step = found[num_steps - 1].step + 1
    return RowComparison(equal_steps=equal, compared_until=step, steps=tuple(found[:num_steps]))


class _Located:
    """A plan's windows, named alike in both plans.

    Attributes:
        sampler: of the plan.
        borders: training steps at which a stage begins.
    """

    def __init__(self, plan: Plan, shard_tokens: Mapping[str, Sequence[int]]) -> None:
        self.sampler = Sampler(plan, {name: shard_tokens[name] for name in plan.sources})
        self.borders = [_training_step(plan.skip_steps, stage.from_step) for stage in plan.stages]
        # The number of each shard of the plan's list in a list that does not depend on the plan.
        names = sorted(shard_tokens)
        first = dict(
            zip(names, np.cumsum([0, *(len(shard_tokens[name]) for name in names)]).tolist(), strict=False)
        )
        self._common = np.array(
            [first[name] + k for name in plan.sources for k in range(len(shard_tokens[name]))], dtype=np.int64
        )

    def windows(self, step: int, count: int) -> NDArray[np.int64]:
        """Return `(count, rows, 2) int64`: common shard number, start token."""
        windows = self.sampler.locate(step, count=count)
        windows[..., 0] = self._common[windows[..., 0]]
        return windows

    def plan_step(self, step: int) -> int:
        """Return the plan step of a training step."""
        return self.sampler.timeline.plan_step(step)


def _changes(
    prefix: str, a: Mapping[str, Any], b: Mapping[str, Any], names: Iterable[str] | None = None
) -> Iterator[FieldChange]:
    for name in sorted({*a, *b}) if names is None else names:
        if a.get(name) != b.get(name):
            yield FieldChange(field=prefix + name, a=a.get(name), b=b.get(name))


def _range_changes(name: str, a: Pairs, b: Pairs) -> Iterator[FieldChange]:
    one, other = ({(start, stop) for start, stop in pairs} for pairs in (a, b))
    if one != other:
        only = [[list(pair) for pair in sorted(pairs)] for pairs in (one - other, other - one)]
        yield FieldChange(field=name, a=only[0], b=only[1])


def _first_stage_change(a: Plan, b: Plan) -> int:
    """Return the first plan step whose stage differs, or whose sources have other content."""
    for one, other in zip_longest(a.stages, b.stages):
        if one is None or other is None or one != other:
            # Rows of a stage are the same however long it is, so the earlier of two beginnings counts.
            return min(stage.from_step for stage in (one, other) if stage is not None)
        if any(a.fingerprints.get(name) != b.fingerprints.get(name) for name in one.mixture):
            return one.from_step
    return _NEVER


def _first_skip_change(a: Ranges, b: Ranges) -> int:
    """Return the first plan step that only one of the two skips."""
    for one, other in zip_longest(a.to_json(), b.to_json()):
        if one is None or other is None:
            start, _ = one or other
            return int(start)
        if one != other:
            # The first place at which a range begins or ends in one of them alone.
            return min(one[0], other[0]) if one[0] != other[0] else min(one[1], other[1])
    return _NEVER


def _training_step(skips: Ranges, plan_step: int) -> int:
    """Return how many plan steps before `plan_step` training sees."""
    return int(skips.num_outside_below(np.array([plan_step], dtype=np.uint64))[0])


def _step_changes(pair: tuple[_Located, _Located], step: int, count: int) -> list[StepChange]:
    """Compare consecutive steps, of one batch size in each plan, and return those that differ."""
    a, b = (located.windows(step, count) for located in pair)
    shared, rows = min(a.shape[1], b.shape[1]), max(a.shape[1], b.shape[1])
    differs = np.ones((count, rows), dtype=bool)
    if pair[0].sampler.plan.seq_len == pair[1].sampler.plan.seq_len:
        differs[:, :shared] = (a[:, :shared] != b[:, :shared]).any(axis=2)
    changes = []
    for k in np.flatnonzero(differs.any(axis=1)).tolist():
        edges = np.flatnonzero(np.diff(differs[k], prepend=False, append=False)).reshape(-1, 2)
        changes.append(
            StepChange(
                step=step + k,
                plan_steps=(pair[0].plan_step(step + k), pair[1].plan_step(step + k)),
                num_rows=int(differs[k].sum()),
                rows=tuple((int(start), int(stop)) for start, stop in edges),
            )
        )
    return changes
