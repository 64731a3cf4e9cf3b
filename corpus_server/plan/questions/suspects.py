"""Find the steps at which two plans can differ if only their exclusions differ.

Then a row can differ only if one of the plans excludes the window, or a piece, at its position. The inverse
of the order gives the steps that hold such units. So a document excluded from a run over 10^13 tokens is
found without looking at every step before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.document import MAX_STAGES, Plan
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.stage import MAX_STEP
from corpus_server.work import Budget

_LEAST_LOOKED_UP: Final = 1 << 10  # an epoch with one window takes as long as one with so many
_FIRST_SPAN: Final = 1 << 12
_AT_ONCE: Final = 1 << 13


def only_exclusions_differ(a: Plan, b: Plan) -> bool:
    """Return whether the documents of two plans are known to put the same positions into the same rows."""
    if max(len(plan.stages) for plan in (a, b)) > MAX_STAGES:
        return False  # the positions of excluded windows may lie in as many blocks, 0.4 ms each
    same = a.arithmetic == b.arithmetic and a.skip_steps == b.skip_steps
    return same and a.fingerprints == b.fingerprints and _placements(a) == _placements(b)


def suspects(a: Sampler, b: Sampler, since: int, budget: Budget) -> Iterator[tuple[int, list[int]]]:
    """Yield (plan step, the training steps before it that may differ), up to half of the budget's rows.

    Of plans whose order has epochs and of which `only_exclusions_differ`, from the plan step `since` on.
    """
    left = budget.left_rows // 2  # the other half is for the rows of those steps
    units = [_excluded_units(a, b), _excluded_units(b, a)]
    span = _FIRST_SPAN
    while since <= MAX_STEP:
        until = min(since + span, MAX_STEP + 1)
        steps: set[int] = set()
        for sampler, its in zip((a, b), units, strict=True):
            for found, cost in _steps_between(sampler, its, since, until):
                budget.spend(rows=cost)
                left -= cost
                if left < 0:
                    return  # this round is incomplete
                steps.update(found)
        yield until, sorted(steps)
        since, span = until, 2 * span


def _placements(plan: Plan) -> list[tuple[int, object]]:
    """Return from which plan step on what decides the rows, exclusions aside."""
    log, found = plan.log, list[tuple[int, object]]()
    columns = zip(
        *(each[: len(plan.stages)].tolist() for each in (log.from_steps, log.sizes, log.seq_lens)),
        strict=True,
    )
    for number, (from_step, *shape) in enumerate(columns):
        # A mixture's rows depend on its stage's number; a stage of one source continues the one before.
        shares = log.shares(number)
        decides = (shape, shares, number if len(shares) > 1 else None)
        if not found or found[-1][1] != decides:
            found.append((from_step, decides))
    return found


def _excluded_units(sampler: Sampler, other: Sampler) -> list[NDArray[np.uint64]]:
    """Return for each source the units that any stage excludes; none where the other plan excludes the same.

    Exclusions add up, so the last stage excludes all. Units that both plans exclude count: what stands in for
    one follows from all that its pool excludes.
    """
    if not sampler.exclusions:
        return [np.empty(0, dtype=np.uint64)] * len(sampler.plan.sources)
    _, last = sampler.exclusions[-1]
    first = sampler.rows.first_unit
    inside = last.units.num_inside_below(first)
    return [
        np.empty(0, dtype=np.uint64)
        if _excludes_same(sampler.plan, other.plan, name)
        else last.units.nth_inside(np.arange(*inside[source : source + 2], dtype=np.uint64))
        for source, name in enumerate(sampler.plan.sources)
    ]


def _excludes_same(a: Plan, b: Plan, name: str) -> bool:
    if [each.from_step for each in a.stages] != [each.from_step for each in b.stages]:
        return False
    excluding = ({n: its[name] for n, its in each.log.exclude.items() if name in its} for each in (a, b))
    one, other = ({n: its for n, its in each.items() if n < len(a.stages)} for each in excluding)
    return one == other


def _steps_between(
    sampler: Sampler, excluded: list[NDArray[np.uint64]], since: int, until: int
) -> Iterator[tuple[list[int], int]]:
    """Yield training steps between two plan steps that hold some of the units, and what finding them cost."""
    timeline = sampler.timeline
    before, after = (timeline.given_before(step)[0].tolist() for step in (since, until))
    for source, units in enumerate(excluded):
        first, stop, size = before[source], after[source], int(sampler.num_windows[source])
        if first == stop or not units.size:
            continue
        for epoch in range(first // size, (stop - 1) // size + 1):
            for at in range(0, units.size, _AT_ONCE):
                its = units[at : at + _AT_ONCE]
                positions = sampler.positions_of(source, its, np.array([epoch], dtype=np.uint64))
                positions = positions[(positions >= first) & (positions < stop)]
                plan_steps, _, given = timeline.rows_of(source, positions)
                plan_steps = plan_steps[given]
                seen = plan_steps[~timeline.skips.contains(plan_steps)]
                steps = np.unique(timeline.skips.num_outside_below(seen)).tolist()
                yield steps, max(its.size * sampler.row_cost, _LEAST_LOOKED_UP)
