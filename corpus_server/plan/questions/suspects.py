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

MAX_LOOKED_UP: Final = 1 << 22
"""Excluded windows times epochs; takes a few seconds."""

_LEAST_LOOKED_UP: Final = 1 << 10  # an epoch with one window takes as long as one with so many
_FIRST_SPAN: Final = 1 << 12


def only_exclusions_differ(a: Plan, b: Plan) -> bool:
    """Return whether the documents of two plans are known to put the same positions into the same rows."""
    if max(len(plan.stages) for plan in (a, b)) > MAX_STAGES:
        return False  # the positions of excluded windows may lie in as many blocks, 0.4 ms each
    same = a.arithmetic == b.arithmetic and a.skip_steps == b.skip_steps
    return same and a.fingerprints == b.fingerprints and _placements(a) == _placements(b)


def suspects(a: Sampler, b: Sampler, since: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (plan step, the training steps before it that may differ), until the work gets too large.

    Of plans whose order has epochs and of which `only_exclusions_differ`, from the plan step `since` on.
    """
    excluded = [(sampler, excluded_units(sampler)) for sampler in (a, b)]
    span, looked_up = _FIRST_SPAN, 0
    while since <= MAX_STEP and looked_up < MAX_LOOKED_UP:
        until = min(since + span, MAX_STEP + 1)
        steps: set[int] = set()
        for sampler, windows in excluded:
            num_looked_up, found = _steps_between(sampler, windows, since, until)
            looked_up += num_looked_up
            steps.update(found.tolist())
        if looked_up > MAX_LOOKED_UP:
            return  # the last round may be incomplete
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


def excluded_units(sampler: Sampler) -> list[NDArray[np.uint64]]:
    """Return for each source the units that any stage excludes: those of the last, as exclusions add up."""
    if not sampler.exclusions:
        return [np.empty(0, dtype=np.uint64)] * len(sampler.plan.sources)
    _, last = sampler.exclusions[-1]
    inside = last.units.num_inside_below(sampler.rows.pools.first_unit)
    units = last.units.nth_inside(np.arange(last.units.total, dtype=np.uint64))
    return np.split(units, inside[1:-1].astype(np.intp))


def _steps_between(
    sampler: Sampler, excluded: list[NDArray[np.uint64]], since: int, until: int
) -> tuple[int, NDArray[np.uint64]]:
    """Return how many windows were looked up, and which training steps between two plan steps hold one."""
    timeline = sampler.timeline
    before, after = (timeline.given_before(step)[0].tolist() for step in (since, until))
    looked_up, found = 0, [np.empty(0, dtype=np.uint64)]
    for source, windows in enumerate(excluded):
        first, stop, size = before[source], after[source], int(sampler.num_windows[source])
        if first == stop or not windows.size:
            continue
        for epoch in range(first // size, (stop - 1) // size + 1):
            looked_up += max(windows.size, _LEAST_LOOKED_UP)
            if looked_up > MAX_LOOKED_UP:
                break
            positions = sampler.positions_of(source, windows, np.array([epoch], dtype=np.uint64))
            positions = positions[(positions >= first) & (positions < stop)]
            plan_steps, _, given = timeline.rows_of(source, positions)
            plan_steps = plan_steps[given]
            found.append(plan_steps[~timeline.skips.contains(plan_steps)])
    return looked_up, timeline.skips.num_outside_below(np.concatenate(found))
