"""What training has seen of each source before a step, and what it skipped."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_server.errors import InvalidParameter
from corpus_server.plan.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceUsage:
    """Of one source.

    Args:
        rows: rows that training saw.
        tokens: inputs of those rows, `rows * seq_len`.
        epochs: passes over the source, `rows / windows`; None for order random.
    """

    rows: int
    tokens: int
    epochs: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of all sources, between two training steps.

    Args:
        plan_step: of the later one.
        sources: what training saw, by name.
        skipped_steps: plan steps between the two that training did not see.
        skipped: what those held, by name.
    """

    plan_step: int
    sources: dict[str, SourceUsage]
    skipped_steps: int
    skipped: dict[str, SourceUsage]


def usage_between(sampler: Sampler, since: int, step: int) -> Usage:
    """Return what training sees in steps [since, step).

    Raises:
        InvalidParameter: `since` is above `step`.
    """
    if since > step:
        raise InvalidParameter(
            f"since must be at most step {step}, got {since}",
            parameter="since",
            received=since,
            accepted=f"[0, {step}]",
        )
    timeline = sampler.timeline
    # Training step 0 comes after all that is skipped before it: that belongs to no step before.
    first = timeline.plan_step(since) if since else 0
    last = timeline.plan_step(step) if step > since else first
    total = _between(sampler, first, last)
    skipped = [0] * len(total)
    num_skipped = 0
    for start, stop in timeline.skips.to_json():
        start, stop = max(start, first), min(stop, last)
        if start < stop:
            num_skipped += stop - start
            skipped = [a + b for a, b in zip(skipped, _between(sampler, start, stop), strict=True)]
    seen = [a - b for a, b in zip(total, skipped, strict=True)]
    return Usage(
        plan_step=timeline.plan_step(step),
        sources=_by_name(sampler, seen),
        skipped_steps=num_skipped,
        skipped=_by_name(sampler, skipped),
    )


def _between(sampler: Sampler, first: int, last: int) -> list[int]:
    before, after = sampler.timeline.rows_before(first), sampler.timeline.rows_before(last)
    return [b - a for a, b in zip(before, after, strict=True)]


def _by_name(sampler: Sampler, rows: list[int]) -> dict[str, SourceUsage]:
    windows = sampler.num_windows.tolist()
    random = sampler.plan.order == "random"
    return {
        name: SourceUsage(
            rows=count,
            tokens=count * sampler.plan.seq_len,
            epochs=None if random else count / num_windows,
        )
        for name, count, num_windows in zip(sampler.plan.sources, rows, windows, strict=True)
    }
