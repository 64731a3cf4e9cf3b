"""What training has seen of each source before a step, and what it skipped."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

import numpy as np

from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.plan.sampler import Sampler

MAX_MIXED_SKIPS: Final = 2048
"""Skipped ranges in stages with a mixture, up to 0.8 ms each: under 2 s. Others cost nothing."""
_COUNTS_PER_SLICE: Final = 64


@described
class SourceUsage:
    """Rows of one source."""

    rows: int
    tokens: int
    """Inputs: of each row the `seq_len` of its stage."""
    epochs: float | None
    """Passes over the source, by its tokens; null if the order has no epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What was used of all sources, by name, between two training steps."""

    plan_step: int  # of the later one
    sources: dict[str, SourceUsage]  # what training saw
    skipped_steps: int  # plan steps between the two that training did not see
    skipped: dict[str, SourceUsage]  # what those held


def usage_slices(sampler: Sampler, since: int, step: int) -> Generator[None, None, Usage]:
    """Return what training sees in steps [since, step), in slices of at most about 50 ms.

    Raises:
        InvalidParameter: `since` is above `step`, or too much between them is skipped to be counted.
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
    if num_mixed > MAX_MIXED_SKIPS:
        raise InvalidParameter(
            f"{num_mixed} ranges of skipped steps lie between steps {since} and {step} in stages with a "
            f"mixture, and at most {MAX_MIXED_SKIPS} can be counted at once; ask for fewer steps with since=",
            parameter="step",
            received=step,
            remedy="ask for parts with since= and add them up",
        )
    total = timeline.given_before(last) - timeline.given_before(first)
    skipped = np.zeros_like(total)
    # The sums over all ends and over all starts may wrap at 2^64; their difference is right.
    for add, plan_steps in ((np.add, between.stops), (np.subtract, between.starts)):
        for placed, steps in timeline.by_stage(plan_steps):
            at_once = _COUNTS_PER_SLICE if len(placed.mixture.names) > 1 else steps.size
            for k in range(0, steps.size, at_once):
                add(skipped, placed.given_at(steps[k : k + at_once]), out=skipped)
                yield
    return Usage(
        plan_step=timeline.plan_step(step),
        sources=_by_name(sampler, (total - skipped).tolist()),
        skipped_steps=between.total,
        skipped=_by_name(sampler, skipped.tolist()),
    )


def _by_name(sampler: Sampler, given: list[list[int]]) -> dict[str, SourceUsage]:
    plan, sizes = sampler.plan, sampler.num_windows.tolist()
    used = {}
    for name, num_windows, rows, size in zip(plan.sources, *given, sizes, strict=True):
        epochs = num_windows / size if plan.order.has_epochs else None
        used[name] = SourceUsage(rows=rows, tokens=num_windows * plan.seq_len, epochs=epochs)
    return used
