"""How far plans have come over corpora in object stores, and when they need extents again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.extents import PlannedExtents
from corpus_server.readers.next_use import NextUse
from corpus_server.stores import is_staged

_MAX_SHOWN = 64  # plans, or their corpora, that have numbers of their own: whatever clients ask for

Steps = dict[tuple[str, ...], list[float]]
"""Labels of a metric: a number of steps."""


class Progress:
    """Where the plans are that ranks go through; safe to use from several threads.

    A plan and those that continue it have one id, and the slowest rank of all counts.

    Args:
        lock: guards what is planned.
    """

    def __init__(self, planned: PlannedExtents, lock: AbstractContextManager[object]) -> None:
        self._planned, self._lock = planned, lock
        self._first_passes: WeakKeyDictionary[BoundPlan, dict[str, int]] = WeakKeyDictionary()
        self._next_uses: WeakKeyDictionary[BoundPlan, NextUse] = WeakKeyDictionary()

    def staged_steps(self) -> Steps:
        """Return, by plan, how many steps after its last request a rank finds staged."""
        with self._lock:
            staged = self._planned.staged_steps()
        return _least([((bound.root_id,), steps) for bound, steps in staged.items()])

    def unread_steps(self) -> Steps:
        """Return, by plan and corpus, how many steps a rank needs to have read the corpus once; then 0."""
        with self._lock:
            readers = self._planned.readers()
        found: list[tuple[tuple[str, ...], int]] = []
        for bound, step in readers.items():
            if (ends := self._first_passes.get(bound)) is None:
                ends = self._first_passes[bound] = _first_pass_steps(bound)
            found += [((bound.root_id, corpus), max(0, end - step)) for corpus, end in ends.items()]
        return _least(found)

    def needed_in(self, keys: Sequence[str]) -> NDArray[np.float64]:
        """Return in how many steps extents are needed again, given their keys; infinity: not known."""
        with self._lock:
            readers = self._planned.readers()
        needed_in = np.full(len(keys), np.inf)
        for bound, step in readers.items():
            if (its := self._next_uses.get(bound)) is None:
                its = self._next_uses[bound] = NextUse(bound)
            needed_in = np.minimum(needed_in, its.steps_until(step, keys))
        return needed_in


def _least(found: Iterable[tuple[tuple[str, ...], int]]) -> Steps:
    """Return the smallest number of each label."""
    least: Steps = {}
    for labels, steps in found:
        least[labels] = [min(steps, *least.get(labels, [steps]))]
    return dict(sorted(least.items())[:_MAX_SHOWN])


def _first_pass_steps(bound: BoundPlan) -> dict[str, int]:
    """Return how many training steps of a plan read all rows of a corpus once, for those in object stores.

    A corpus is left out if the plan never does, and all are with an order that has no epochs.
    """
    sampler = bound.sampler
    if not sampler.plan.order.has_epochs:
        return {}
    staged = [is_staged(shard.file) for _, shard in bound.shards]
    steps = {}
    for source in np.unique(bound.source_of_shard[np.array(staged, bool)]).tolist():
        if not (num_rows := sampler.laid[0].num_positions(source, 1)):
            continue
        plan_steps, _, given = sampler.timeline.rows_of(source, np.array([num_rows - 1], dtype=np.uint64))
        if given[0]:
            steps[sampler.plan.sources[source]] = sampler.timeline.skips.outside_before(
                int(plan_steps[0]) + 1
            )
    return steps
