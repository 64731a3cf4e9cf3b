"""Steps at which two plans can differ when only their exclusions do, found backwards.

Then a row differs only where the window that its position holds is excluded by one of the plans. The
steps that hold those windows follow from the inverse of the order, so that a document denied to a
run over 10^13 tokens is found at its place, and not by looking at every step before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.document import MAX_STEP
from corpus_server.plan.sampler import Sampler

MAX_LOOKED_UP: Final = 1 << 22
"""Excluded windows times epochs that are gone through: a few seconds."""

_LEAST_LOOKED_UP: Final = 1 << 10  # an epoch of one window takes as long as one of so many
_FIRST_SPAN: Final = 1 << 12


def only_exclusions_differ(a: Sampler, b: Sampler, since: int) -> bool:
    """Return whether from plan step `since` on two plans hold the same rows but for exclusions."""
    one, other = a.plan, b.plan
    if (one.seq_len, one.stride, one.seed, one.order, one.skip_steps) != (
        other.seq_len,
        other.stride,
        other.seed,
        other.order,
        other.skip_steps,
    ):
        return False
    borders = {since, *(s.from_step for plan in (one, other) for s in plan.stages if s.from_step > since)}
    return all(_placement(a, border) == _placement(b, border) for border in sorted(borders))


def suspects(a: Sampler, b: Sampler, since: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (plan step, the training steps before it that may differ), until the work grows too large.

    Args:
        a, b: plans for which `only_exclusions_differ` holds; not of order random.
        since: plan step to begin at.
    """
    excluded = [(sampler, _excluded(sampler)) for sampler in (a, b)]
    span, looked_up = _FIRST_SPAN, 0
    while since <= MAX_STEP and looked_up < MAX_LOOKED_UP:
        until = min(since + span, MAX_STEP + 1)
        steps: set[int] = set()
        for sampler, windows in excluded:
            num_looked_up, found = _steps_between(sampler, windows, since, until)
            looked_up += num_looked_up
            steps.update(found.tolist())
        if looked_up > MAX_LOOKED_UP:
            return  # the last round may have broken off
        yield until, sorted(steps)
        since, span = until, 2 * span


def _placement(sampler: Sampler, plan_step: int) -> object:
    """Return what decides the rows of a stage from a plan step on, exclusions aside."""
    timeline = sampler.timeline
    placed = timeline.stage_at(plan_step)
    stage = placed.stage
    if len(stage.mixture) == 1:
        (name,) = stage.mixture
        position = timeline.rows_before(plan_step)[timeline.names.index(name)]
        return stage.global_batch_size, name, position
    positions = placed.positions[placed.sources].tolist()
    return stage.global_batch_size, stage.mixture, positions, stage.from_step, placed.number


def _excluded(sampler: Sampler) -> list[NDArray[np.uint64]]:
    """Return for each source the windows that any stage excludes: those of the last, for they add up."""
    last = sampler.exclusions[-1]
    if last is None:
        return []
    inside = last.windows.num_inside_below(sampler.first_window).tolist()
    numbers = (np.arange(inside[k], inside[k + 1], dtype=np.uint64) for k in range(len(inside) - 1))
    return [last.windows.nth_inside(each) if each.size else each for each in numbers]


def _steps_between(
    sampler: Sampler, excluded: list[NDArray[np.uint64]], since: int, until: int
) -> tuple[int, NDArray[np.uint64]]:
    """Return how many windows were looked up, and the training steps in between that hold one."""
    timeline = sampler.timeline
    before, after = timeline.rows_before(since), timeline.rows_before(until)
    looked_up, found = 0, [np.empty(0, dtype=np.uint64)]
    for source, windows in enumerate(excluded):
        first, stop, size = before[source], after[source], int(sampler.num_windows[source])
        if first == stop or not windows.size:
            continue
        for epoch in range(first // size, (stop - 1) // size + 1):
            looked_up += max(windows.size, _LEAST_LOOKED_UP)
            if looked_up > MAX_LOOKED_UP:
                break
            positions = sampler.positions_of(source, windows, epoch)
            positions = positions[(positions >= first) & (positions < stop)]
            _, plan_steps, _, given = timeline.rows_of(source, positions)
            plan_steps = plan_steps[given]
            found.append(plan_steps[~timeline.skips.contains(plan_steps)])
    return looked_up, timeline.skips.num_outside_below(np.concatenate(found))
