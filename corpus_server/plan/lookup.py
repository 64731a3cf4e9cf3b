"""Backwards: which rows hold a token, over stages, skips and substitutes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter
from corpus_server.plan.sampler import Sampler

MAX_PAIRS = 1_000_000
"""Windows, and the excluded ones for which they stand in, times epochs: what a look-up goes through."""
MAX_MIXED_PAIRS = 10_000
"""The same for a plan that mixes sources: each may lie in a block of its own, up to 4 ms of work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """One row that holds what was looked for.

    Args:
        epoch: pass over the source.
        step: training step, or None if training skips it.
        plan_step: plan step; equal to `step` before the first skip.
        row: of the global batch.
        shard: number over the plan's shard list.
        start: first token of the row's window in its shard.
        substitute: whether the window stands in for an excluded one.
    """

    epoch: int
    step: int | None
    plan_step: int
    row: int
    shard: int
    start: int
    substitute: bool


def look_up(sampler: Sampler, corpus: str, start: int, stop: int, *, epochs: int = 1) -> list[Sighting]:
    """Return every row of the first epochs that holds a token of [start, stop), by plan step and row.

    Args:
        sampler: of the plan.
        corpus: a source of the plan.
        start, stop: corpus-wide tokens, half open, not empty, inside the corpus.
        epochs: passes over the source to look through.

    Raises:
        InvalidParameter: the plan's order is random, or the range touches too many windows.
    """
    source = sampler.plan.sources.index(corpus)
    low, high = sampler.windows_touching(source, start, stop)
    laps = max((each.num_laps(source) for each in sampler.exclusions if each is not None), default=0)
    mixes = any(len(stage.mixture) > 1 for stage in sampler.plan.stages)
    limit = MAX_MIXED_PAIRS if mixes else MAX_PAIRS
    if (high - low) * epochs * (1 + laps) > limit:
        substitutes = f", each of which stands in for up to {laps} excluded ones" if laps else ""
        raise InvalidParameter(
            f"the range touches {high - low} windows{substitutes}: over {epochs} epochs that is more than "
            f"{limit} rows; ask for less",
            parameter="epochs" if epochs > 1 else "stop",
            received=epochs,
        )
    windows = np.arange(low, high, dtype=np.uint64)
    found: list[Sighting] = []
    for epoch in range(epochs):
        found += _sightings(sampler, source, windows, windows, epoch, substitute=False)
        for number, exclusion in enumerate(sampler.exclusions):
            if exclusion is not None:
                left = windows[~exclusion.windows.contains(windows)]
                excluded, by = exclusion.stood_in_for(source, left, epoch)
                found += _sightings(sampler, source, excluded, by, epoch, substitute=True, stage=number)
    return sorted(found, key=lambda each: (each.plan_step, each.row))


def _sightings(
    sampler: Sampler,
    source: int,
    held: NDArray[np.uint64],
    shown: NDArray[np.uint64],
    epoch: int,
    *,
    substitute: bool,
    stage: int | None = None,
) -> list[Sighting]:
    """Return the rows whose positions hold some windows and that show others, or the same.

    Args:
        held: `(k,)` windows by position.
        shown: `(k,)` windows that the rows show instead.
        stage: the only stage in which they do; None: every stage that does not exclude them.
    """
    positions = sampler.positions_of(source, held, epoch)
    numbers, plan_steps, rows, given = sampler.timeline.rows_of(source, positions)
    if stage is not None:
        given &= numbers == stage
    else:
        for number, exclusion in enumerate(sampler.exclusions):
            if exclusion is not None:
                given &= ~((numbers == number) & exclusion.windows.contains(held))
    located = sampler.windows.locate(shown)
    skips = sampler.timeline.skips
    skipped = skips.contains(plan_steps)
    steps = skips.num_outside_below(plan_steps)
    return [
        Sighting(
            epoch=epoch,
            step=None if skipped[k] else int(steps[k]),
            plan_step=int(plan_steps[k]),
            row=int(rows[k]),
            shard=int(located[k, 0]),
            start=int(located[k, 1]),
            substitute=substitute,
        )
        for k in np.flatnonzero(given).tolist()
    ]
