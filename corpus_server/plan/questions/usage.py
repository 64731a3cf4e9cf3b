"""What training has seen of each source before a step, and what it skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import UInt64Array
from corpus_server.plan.mixture import BLOCK_COST
from corpus_server.plan.numbers import PlanSteps
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.timeline import PlacedStage
from corpus_server.work import Budget

_COUNTS_AT_ONCE: Final = 64


@described
class SourceUsage:
    """Rows of one source."""

    rows: int
    tokens: int
    """Inputs: of each row the `seq_len` of its stage."""
    epochs: float | None
    """Passes over the source: rows to those of a pass, of each length its own; null if the order has no
    epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What was used of all sources, by name, between two training steps."""

    plan_step: int  # of the later one
    sources: dict[str, SourceUsage]  # what training saw
    skipped_steps: int  # plan steps between the two that training did not see
    skipped: dict[str, SourceUsage]  # what those held


def count_usage(sampler: Sampler, since: int, step: int, budget: Budget) -> Usage:
    """Return what training sees in steps [since, step).

    Raises:
        InvalidParameter: `since` is above `step`.
        ResponseTooLarge: too much between them is skipped to be counted.
    """
    if since > step:
        raise InvalidParameter.expected("since", f"in [0, {step}]", since)
    timeline = sampler.timeline
    # Skipped steps before training step 0 count as used before step 1, like those before any other step.
    first = timeline.plan_step(since) if since else 0
    last = timeline.plan_step(step) if step > since else first
    between = timeline.skips.within(first, last)
    staged = timeline.by_stage(between.starts)
    num_mixed = sum(steps.size for placed, steps in staged if len(placed.mixture.names) > 1)
    budget.check(
        rows=2 * num_mixed * BLOCK_COST, parameter="step", remedy="ask for parts with since= and add them up"
    )
    ends = [(timeline.stage_at(each), np.array([each], dtype=np.uint64)) for each in (first, last)]
    before, after = (_given(sampler, *each) for each in ends)
    total = after - before
    skipped = np.zeros_like(total)
    # The sums over all ends and over all starts may wrap at 2^64; their difference is right.
    for add, plan_steps in ((np.add, between.stops), (np.subtract, between.starts)):
        for placed, steps in timeline.by_stage(plan_steps):
            at_once = _COUNTS_AT_ONCE if len(placed.mixture.names) > 1 else steps.size
            for k in range(0, steps.size, at_once):
                add(skipped, _given(sampler, placed, steps[k : k + at_once]), out=skipped)
                budget.spend()
    return Usage(
        plan_step=timeline.plan_step(step),
        sources=_by_name(sampler, (total - skipped).tolist()),
        skipped_steps=between.total,
        skipped=_by_name(sampler, skipped.tolist()),
    )


def _given(sampler: Sampler, placed: PlacedStage, plan_steps: PlanSteps) -> UInt64Array:
    """Return what all sources have given before plan steps of a stage, summed over these modulo 2^64.

    `(2 + lengths, sources)`: positions, rows, then of each length that has rows of its own the positions.
    """
    given = placed.given_at(plan_steps)
    if len(sampler.laid) == 1:
        return np.concatenate((given, given[:1]))
    lengths = (laid.seq_len for laid in sampler.laid)
    own = [sampler.timeline.given_in(placed, plan_steps, seq_len) for seq_len in lengths]
    return np.concatenate((given, own))


def _by_name(sampler: Sampler, given: list[list[int]]) -> dict[str, SourceUsage]:
    plan, (positions, rows, *own) = sampler.plan, given
    passes = [
        [num / (size / laid.num_parts) for num, size in zip(its, laid.rows.epoch_rows.tolist(), strict=True)]
        for laid, its in zip(sampler.laid, own, strict=True)
    ]
    return {
        name: SourceUsage(
            rows=rows[source],
            tokens=positions[source] * plan.seq_len,
            epochs=sum(its[source] for its in passes) if plan.order.has_epochs else None,
        )
        for source, name in enumerate(plan.sources)
    }
