"""Find the steps at which two plans can differ if only their exclusions differ.

Then a row can differ only if one of the plans excludes the window, or a piece, at its position. The inverse
of the order gives the steps that hold such units. So a document excluded from a run over 10^13 tokens is
found without looking at every step before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from corpus_server.plan.document import MAX_STAGES, Plan
from corpus_server.plan.laid import Laid
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
    kept_rows = budget.left_rows - budget.left_rows // 2  # for the rows of those steps
    looked_up = [
        [(laid, _looked_up(one, laid, other)) for laid in one.laid] for one, other in ((a, b), (b, a))
    ]
    span = _FIRST_SPAN
    while since <= MAX_STEP:
        until = min(since + span, MAX_STEP + 1)
        steps: set[int] = set()
        for sampler, numbers in zip((a, b), looked_up, strict=True):
            for laid, its in numbers:
                for some_steps in _steps_between(sampler, laid, its, since, until, budget, kept_rows):
                    if some_steps is None:
                        return  # this round is incomplete
                    steps.update(some_steps)
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


def _looked_up(sampler: Sampler, laid: Laid, other: Sampler) -> list[range]:
    """Return which of all excluded units of rows of a length are each source's.

    None where the other plan excludes the same. Exclusions add up, so the last stage excludes all. Units that
    both plans exclude count: what stands in for one follows from all that its pool excludes.
    """
    plan = sampler.plan
    if not laid.exclusions:
        return [range(0)] * len(plan.sources)
    _, last = laid.exclusions[-1]
    bounds = pairwise(last.units.num_inside_below(laid.rows.first_unit).tolist())
    return [
        range(0) if _excludes_same(plan, other.plan, name) else range(*pair)
        for name, pair in zip(plan.sources, bounds, strict=True)
    ]


def _excludes_same(a: Plan, b: Plan, name: str) -> bool:
    if [each.from_step for each in a.stages] != [each.from_step for each in b.stages]:
        return False
    excluding = ({n: its[name] for n, its in each.log.exclude.items() if name in its} for each in (a, b))
    one, other = ({n: its for n, its in each.items() if n < len(a.stages)} for each in excluding)
    return one == other


def _steps_between(
    sampler: Sampler,
    laid: Laid,
    looked_up: list[range],
    since: int,
    until: int,
    budget: Budget,
    kept_rows: int,
) -> Iterator[list[int] | None]:
    """Yield training steps between two plan steps that hold some of the units.

    None: finding more would leave less than `kept_rows` of the budget.
    """
    timeline, at_once = sampler.timeline, max(1, _AT_ONCE // sampler.row_cost)
    before, after = (timeline.given_before(step)[0].tolist() for step in (since, until))
    for source, numbers in enumerate(looked_up):
        size = int(laid.rows.epoch_rows[source])
        first, stop = (each[source] * laid.num_parts for each in (before, after))
        if first == stop or not numbers:
            continue
        excluded = laid.exclusions[-1][1].units
        for epoch in range(first // size, (stop - 1) // size + 1):
            for at in range(0, len(numbers), at_once):
                some = numbers[at : at + at_once]  # of the excluded units, which may be very many
                cost = max(len(some) * sampler.row_cost, _LEAST_LOOKED_UP)
                if budget.left_rows - cost < kept_rows:
                    yield None
                    return
                budget.spend(rows=cost)
                units = excluded.nth_inside(np.arange(some.start, some.stop, dtype=np.uint64))
                positions = laid.positions_of(source, units, np.array([epoch], dtype=np.uint64))
                positions = positions[(positions >= first) & (positions < stop)]
                positions = laid.of_timeline(positions)[0]
                positions = positions[sampler.has_at(laid, source, positions)]
                plan_steps, _, given = timeline.rows_of(source, positions)
                plan_steps = plan_steps[given]
                seen = plan_steps[~timeline.skips.contains(plan_steps)]
                yield np.unique(timeline.skips.num_outside_below(seen)).tolist()
