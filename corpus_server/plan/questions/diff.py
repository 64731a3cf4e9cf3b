"""What differs between two plans: fields by name, rows by step.

A step depends on the stages up to its own and on the steps skipped before it, on nothing later. So the
documents tell up to which step two plans are equal. From there on rows are compared: step by step, or, where
only exclusions differ, at the steps that hold excluded windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.described import described
from corpus_server.errors import counted
from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.plan.document import MAX_STAGES, Plan
from corpus_server.plan.questions.suspects import only_exclusions_differ, suspects
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.stage import MAX_STEP
from corpus_server.work import Budget

SHOWN_RANGES: Final = 100
"""Of a list; their number is said."""

_FIELD_BYTES: Final = 60  # of the shortest field in JSON
_PIECE_ROWS: Final = 1 << 14  # of windows, compared together: some 10 ms
_STEPS_COST: Final = 1 << 9  # of steps that are compared together, besides their rows
_NEVER: Final = MAX_STEP + 1


@described
class FieldChange:
    """A field in which two plans differ; null in the plan that lacks it.

    Of a list of ranges, each value has only those that the other plan lacks, and of these the first 100.
    """

    field: str
    """Like `stages[from_step=100].mixture.web`."""
    a: Any
    b: Any
    num_a: int | None = None
    """Of ranges: how many only the first plan has."""
    num_b: int | None = None
    """Of ranges: how many only the second plan has."""


@described
class StepChange:
    """A training step that differs."""

    step: int
    plan_steps: tuple[int, int]
    """Of each plan."""
    num_rows: int
    """Rows that differ, those included that only one plan has."""
    rows: tuple[tuple[int, int], ...]
    """Half-open ranges of the global batch, the first 100."""


@described
class RowComparison:
    """Which rows differ: those of steps [equal_steps, compared_until) were compared."""

    equal_steps: int | None
    """First steps that are equal by the documents alone; null: all."""
    compared_until: int | None
    """Null if all steps are equal by the documents; `equal_steps` if one step is too large to compare."""
    steps: tuple[StepChange, ...]
    """The first that differ, in order."""
    first_step: int | None
    """The first training step that differs; null if no compared step does."""

    @classmethod
    def of(cls, equal_steps: int | None, until: int | None, steps: Sequence[StepChange]) -> RowComparison:
        """Return what was found when steps before `until` were compared."""
        first_step = steps[0].step if steps else None
        return cls(equal_steps=equal_steps, compared_until=until, steps=tuple(steps), first_step=first_step)


class _Compared:
    """A plan's rows, with shard numbers that mean the same in both plans."""

    def __init__(self, sampler: Sampler, other: Sampler) -> None:
        self.sampler = sampler
        sizes = {
            content: int(size)
            for each in (sampler, other)
            for content, size in zip(each.contents, np.diff(each.windows.first_shard), strict=True)
        }
        # For each shard of the plan's list, its number in a list that does not depend on the plan.
        ordered = sorted(sizes)
        first = dict(zip(ordered, accumulate((sizes[each] for each in ordered), initial=0), strict=False))
        self._common = np.concatenate([first[each] + np.arange(sizes[each]) for each in sampler.contents])

    def rows(self, step: int, places: range, count: int) -> Pieces:
        """Return what rows at the same places of some steps are made of, with common shard numbers."""
        found, borders = self.sampler.pieces(step, places, count=count)
        shards = np.where(found[:, 0] == NO_SHARD, NO_SHARD, self._common[found[:, 0]])
        return Pieces(np.column_stack((shards, found[:, 1:])), borders)


def changed_fields(a: Plan, b: Plan, budget: Budget) -> list[FieldChange]:
    """Return the fields that differ, stages matched by their `from_step`.

    Of plans that continue others, up to `MAX_STAGES` stages from the first one that differs on are compared.

    Raises:
        ResponseTooLarge: there are more fields than a response may hold.
    """
    changes = list(_changes("", a.arithmetic, b.arithmetic))
    same = a.log.first_difference(len(a.stages), b.log, len(b.stages))
    one, other = (
        {stage.from_step: stage for stage in plan.stages[same : same + MAX_STAGES]} for plan in (a, b)
    )
    for from_step in sorted({*one, *other}):
        where = f"stages[from_step={from_step}]"
        stages = one.get(from_step), other.get(from_step)
        shown = [None if stage is None else stage.to_json(spell=_no_ranges) for stage in stages]
        if shown[0] is None or shown[1] is None:
            changes.append(FieldChange(field=where, a=shown[0], b=shown[1]))
        else:
            changes += _changes(f"{where}.", shown[0], shown[1], ("global_batch_size", "seq_len"))
            changes += _changes(f"{where}.mixture.", shown[0]["mixture"], shown[1]["mixture"])
        excluded = [{} if stage is None else stage.exclude for stage in stages]
        for name in sorted({*excluded[0], *excluded[1]}):
            its = (each.get(name, Ranges()) for each in excluded)
            changes += _range_changes(f"{where}.exclude.{name}", *its)
        budget.check_response(_FIELD_BYTES * len(changes))
        budget.spend()
    if any(len(plan.stages) > same + MAX_STAGES for plan in (a, b)):
        changes.append(FieldChange(field="number of stages", a=len(a.stages), b=len(b.stages)))
    changes += _range_changes("skip_steps", a.skip_steps, b.skip_steps)
    changes += _changes("fingerprints.", a.fingerprints, b.fingerprints)
    return changes


def count_equal_steps(a: Plan, b: Plan) -> int | None:
    """Return how many of the first training steps are equal by the documents alone; None: all."""
    if a.arithmetic != b.arithmetic:
        return 0
    plan_step = min(_first_stage_change(a, b), _first_skip_change(a.skip_steps, b.skip_steps))
    return None if plan_step == _NEVER else a.skip_steps.outside_before(plan_step)


def compare(a: Sampler, b: Sampler, budget: Budget, *, num_steps: int = 10) -> RowComparison:
    """Find the first `num_steps` steps whose rows differ, and which rows, as far as the budget's rows reach.

    Args:
        a, b: of plans bound to the same corpora.
        budget: bounds the rows of both plans that are compared.
    """
    plans = a.plan, b.plan
    equal = count_equal_steps(*plans)
    if equal is None:
        return RowComparison.of(None, None, ())
    pair = _Compared(a, b), _Compared(b, a)
    # A plan may end; of the steps behind its last none is compared.
    end = min(sampler.num_steps if sampler.num_steps is not None else _NEVER for sampler in (a, b))
    found: list[StepChange] = []
    compared: list[StepChange] | None
    if a.plan.order.has_epochs and only_exclusions_differ(*plans):
        until = equal
        for plan_step, steps in suspects(a, b, a.timeline.plan_step(equal), budget):
            for step in steps:
                if (compared := _step_changes(pair, step, 1, budget)) is None:
                    return RowComparison.of(equal, step, found)
                found += compared
                if len(found) == num_steps:
                    return RowComparison.of(equal, step + 1, found)
            until = a.plan.skip_steps.outside_before(plan_step)
        if until > equal:  # else too much is excluded to be looked up, and the first steps will differ
            return RowComparison.of(equal, until, found)
    timelines = a.timeline, b.timeline
    largest = max(int(each.sizes.max()) for each in timelines)
    begins = [each.skips.num_outside_below(each.from_steps.astype(np.uint64)) for each in timelines]
    borders = np.unique(np.concatenate(begins)).tolist()
    row_cost = a.row_cost + b.row_cost
    step, most = equal, max(1, _PIECE_ROWS // (largest * row_cost))
    while step < end and len(found) < num_steps:
        # Within a piece no stage begins, so that its batches have one shape in each plan.
        border = borders[at] if (at := bisect_right(borders, step)) < len(borders) else _NEVER
        left = max(0, budget.left_rows - _STEPS_COST) // (largest * row_cost)
        count = max(1, min(most, border - step, end - step, left))
        if (compared := _step_changes(pair, step, count, budget)) is None:
            break
        found += compared
        step += count
    if len(found) >= num_steps:
        step = found[num_steps - 1].step + 1
    return RowComparison.of(equal, step, found[:num_steps])


def _changes(
    prefix: str, a: Mapping[str, Any], b: Mapping[str, Any], names: Iterable[str] | None = None
) -> Iterator[FieldChange]:
    for name in sorted({*a, *b}) if names is None else names:
        one, other = a.get(name), b.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _changes(f"{prefix}{name}.", one, other)
        elif one != other:
            yield FieldChange(field=prefix + name, a=one, b=other)


def _range_changes(name: str, a: Ranges, b: Ranges) -> Iterator[FieldChange]:
    only = _without(a, b), _without(b, a)
    if sum(map(len, only)):
        one, other = (each[:SHOWN_RANGES].tolist() for each in only)
        yield FieldChange(field=name, a=one, b=other, num_a=len(only[0]), num_b=len(only[1]))


def _without(a: Ranges, b: Ranges) -> NDArray[np.uint64]:
    """Return the ranges of one set that are none of another, `(k, 2)`."""
    if not b:
        return a.bounds
    at = np.minimum(b.starts.searchsorted(a.starts), b.starts.size - 1)
    is_in = (b.starts[at] == a.starts) & (b.stops[at] == a.stops)
    found: NDArray[np.uint64] = a.bounds[~is_in]
    return found


def _no_ranges(ranges: Ranges) -> str:
    return counted(ranges.starts.size, "range")


def _first_stage_change(a: Plan, b: Plan) -> int:
    """Return the first plan step whose stage, or whose sources' content, differs."""
    # A stage's rows do not depend on its length, so two stages differ from the earlier beginning on.
    number = a.log.first_difference(len(a.stages), b.log, len(b.stages))
    found = [int(plan.log.from_steps[number]) for plan in (a, b) if number < len(plan.stages)]
    for name in {*a.sources, *b.sources}:
        if a.fingerprints.get(name) != b.fingerprints.get(name):
            using = (plan.log for plan in (a, b) if name in plan.sources)
            found += [int(log.from_steps[log.first_use(name)]) for log in using]
    return min(found, default=_NEVER)


def _first_skip_change(a: Ranges, b: Ranges) -> int:
    """Return the first plan step that only one of the two skips."""
    # Where neither has a bound, they go on to differ or to agree.
    bounds = np.unique(np.concatenate((a.bounds, b.bounds)))
    differ = bounds[a.contains(bounds) != b.contains(bounds)]
    return int(differ[0]) if differ.size else _NEVER


def _step_changes(
    pair: tuple[_Compared, _Compared], step: int, count: int, budget: Budget
) -> list[StepChange] | None:
    """Compare consecutive steps, of one stage in each plan, and return those that differ.

    None: the budget has no rows left for them.
    """
    a, b = pair
    in_a, in_b = (each.sampler.check_part(step, count=count) for each in pair)
    row_cost = a.sampler.row_cost + b.sampler.row_cost
    shared = min(in_a, in_b)
    if _STEPS_COST + count * shared * row_cost > budget.left_rows:
        return None
    budget.spend(rows=_STEPS_COST)
    differs = np.ones((count, max(in_a, in_b)), dtype=bool)
    at_once = max(1, _PIECE_ROWS // (row_cost * count))
    for first in range(0, shared, at_once):
        places = range(first, min(first + at_once, shared))
        budget.spend(rows=count * len(places) * row_cost)
        unlike = _unlike_rows(*(each.rows(step, places, count) for each in pair))
        differs[:, places.start : places.stop] = unlike.reshape(count, len(places))
    changes, timelines = [], [compared.sampler.timeline for compared in pair]
    for k in np.flatnonzero(differs.any(axis=1)).tolist():
        edges = np.flatnonzero(np.diff(differs[k], prepend=False, append=False)).reshape(-1, 2)
        changes.append(
            StepChange(
                step=step + k,
                plan_steps=(timelines[0].plan_step(step + k), timelines[1].plan_step(step + k)),
                num_rows=int(differs[k].sum()),
                rows=tuple((int(start), int(stop)) for start, stop in edges[:SHOWN_RANGES]),
            )
        )
    return changes


def _unlike_rows(a: Pieces, b: Pieces) -> NDArray[np.bool_]:
    """Return which of some rows are made of other pieces than those that they stand against."""
    counts = np.diff(a[1])
    differs: NDArray[np.bool_] = counts != np.diff(b[1])
    same = np.flatnonzero(~differs)
    differing = (a.rows(same).places != b.rows(same).places).any(axis=1)
    differs[np.repeat(same, counts[same])[differing]] = True
    return differs
