"""Which extents the next steps of every rank read, for as far ahead as the cache has room.

    steps     |- last requests -|------- planned -------|- waits for room -|
            steps.start                                next

An extent that no planned step reads any more may leave the cache. Arithmetic only: `staging` fetches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.ahead import Ahead
from corpus_server.stores import Extent

_MAX_LOCATED = 16384  # located at once, in some ms
_MAX_WINDOWS = 2**22  # planned for one rank
_STANDS_FOR = 64  # times so many windows: steps that read all extents, as of a full shuffle
_REQUESTS_BACK = 4  # count as planned: a slow client may still be receiving them

Uses = dict[Extent, int]
"""Extents of some steps, first used first -> the step after the last one that reads it."""


class LocatedSteps(NamedTuple):
    """Consecutive steps, the windows of each, the extents of all, and the first step that reads each.

    With `reads_all` they read every extent of the plan.
    """

    num_steps: int
    step_windows: int
    uses: Uses
    begins: dict[Extent, int]
    reads_all: bool = False


class RankExtents(Ahead):
    """The extents of one rank's next steps; a step costs its windows. `locate` takes ms.

    Attributes:
        uses: the extents of the planned steps; the first of them that may go does so at the step `first_end`.
        begins: the first planned step that reads each of them.
        waits: the extents of the next step, if the cache has no room for them.
    """

    def __init__(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> None:
        super().__init__(bound, rank, world_size, steps)
        self.uses: Uses = {}
        self.begins: dict[Extent, int] = {}
        self.first_end = math.inf
        self.waits: set[Extent] | None = None
        self._step = self.steps.start
        self._num_extents = sum(staged.num_extents for staged in bound.staged)
        self._max_located = _MAX_LOCATED  # to plan at once; fewer where the shards of more do not fit

    def follow(self) -> float:
        """Follow the latest request; return the step before which extents may go."""
        step, margin = self.steps.start, _REQUESTS_BACK * len(self.steps)
        has_jumped_back = step + margin < self._step
        if has_jumped_back or self.next < step:  # or it was faster than planning
            self.begin(step)
            self.waits = None
        self._step = step
        # Not told of each request: waking the thread costs more than a small response.
        self.num_faults = self.bound.gatherer.num_faults
        self.quiet = range(step - margin, step + 1 + (self.next - step) // 16)
        return math.inf if has_jumped_back or self.has_ended else step - margin

    def locate(self, stop: int | None = None) -> LocatedSteps:
        """Return the next steps, those before `stop`, and their extents.

        Steps that the rank does not have count as empty ones.
        """
        sampler = self.bound.sampler
        rows, count = self.next_steps(self._max_located)
        count = count if stop is None else min(count, stop - self.next)
        if not rows:
            return LocatedSteps(_MAX_LOCATED, 1, {}, {})
        uses: Uses = {}
        begins: dict[Extent, int] = {}
        start = self.part["rank"] * rows
        for low in range(start, start + rows, _MAX_LOCATED):  # one range, unless a step is larger
            chunk = range(low, min(low + _MAX_LOCATED, start + rows))
            ranks = {"world_size": self.part["world_size"]}
            pieces, borders = sampler.pieces(self.next, chunk, count=count, **ranks)
            found = [each for staged in self.bound.staged for each in staged.uses(pieces)]
            pieces_of = np.array([use[:2] for use in found], dtype=np.int64).reshape(-1, 2)
            rows_of = borders.searchsorted(pieces_of, side="right") - 1
            steps = self.next + rows_of // len(chunk)
            for (_, _, extent), (begin, last) in sorted(
                zip(found, steps.tolist(), strict=True), key=lambda use: use[0][0]
            ):
                uses[extent] = max(uses.get(extent, 0), last + 1)
                begins[extent] = min(begins.get(extent, begin), begin)
        return LocatedSteps(count, rows, uses, begins, reads_all=len(uses) == self._num_extents)

    def fit(self, *, fits: bool) -> None:
        """Locate more windows at once after those that fitted the cache, fewer after others."""
        self._max_located = min(_MAX_LOCATED, 2 * self._max_located) if fits else self._max_located // 4


class PlannedExtents:
    """The extents that ranks will read; not safe to use from several threads.

    Args:
        limit_bytes: of the cache.

    Attributes:
        absent: those that are not known to be on this machine; read soonest first, roughly.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.absent: dict[Extent, None] = {}
        self._limit_bytes = limit_bytes
        self._ranks: set[RankExtents] = set()
        self._num_ranks: dict[Extent, int] = {}  # that read it
        self._num_bytes = 0

    def __contains__(self, each: Extent) -> bool:
        return each in self._num_ranks

    def extents(self) -> list[Extent]:
        """Return all planned extents."""
        return list(self._num_ranks)

    def add(self, rank: RankExtents) -> None:
        """Plan for a new rank."""
        self._ranks.add(rank)

    def note_absent(self, extents: Iterable[Extent]) -> None:
        """Note that extents are not on this machine."""
        self.absent.update((each, None) for each in extents if each in self._num_ranks)

    def next_rank(self, now: float) -> RankExtents | None:
        """Return the rank that has looked least far ahead and can look further, if any."""
        for each in list(self._ranks):
            self._drop(each, each.follow())
            if each.has_ended:
                self._ranks.discard(each)
        ready = []
        for each in self._ranks:
            if each.waits is not None and self._has_room(each.waits):
                each.waits = None
            is_done = each.cost_from(each.steps.start) >= _MAX_WINDOWS
            if not is_done and each.waits is None and each.rests_until <= now:
                ready.append(each)
        return min(ready, key=lambda each: each.next - each.steps.start, default=None)

    def extend(self, rank: RankExtents, steps: LocatedSteps) -> None:
        """Plan the extents of some steps if there is room; else note what they wait for."""
        fits = self._has_room(steps.uses)
        if not fits and steps.num_steps == 1:
            rank.waits = set(steps.uses)
            return
        rank.fit(fits=fits)
        if not fits:
            return
        for each in [each for each in steps.uses if each not in rank.uses]:
            if each not in self._num_ranks:
                self._num_ranks[each] = 0
                self._num_bytes += each.size_bytes
                self.absent[each] = None
            self._num_ranks[each] += 1
        count, uses = steps.num_steps, steps.uses
        if steps.reads_all:  # so nothing is missed until those after them are located
            count *= _STANDS_FOR
            uses = dict.fromkeys(uses, rank.next + count)
        rank.uses.update(uses)
        for each, begin in steps.begins.items():
            rank.begins.setdefault(each, begin)
        rank.first_end = min(rank.uses.values(), default=math.inf)
        rank.add(count, steps.step_windows)

    def readers(self) -> dict[BoundPlan, int]:
        """Return the plans that ranks go through, and the step of each one's slowest rank."""
        steps: dict[BoundPlan, int] = {}
        for rank in self._ranks:
            steps[rank.bound] = min(rank.steps.start, steps.get(rank.bound, rank.steps.start))
        return steps

    def staged_steps(self) -> dict[BoundPlan, int]:
        """Return how many steps after its last request each plan's slowest rank can read at once."""
        found: dict[BoundPlan, int] = {}
        for rank in self._ranks:
            absent = rank.begins.keys() & self.absent.keys()  # looks at the smaller one's
            first = min((rank.begins[each] for each in absent), default=rank.next)
            steps = max(0, first - rank.steps.stop)
            found[rank.bound] = min(steps, found.get(rank.bound, steps))
        return found

    def drop_margins(self) -> None:
        """Drop the extents that only steps before the latest requests read."""
        for rank in self._ranks:
            self._drop(rank, rank.steps.start)

    def _has_room(self, extents: Iterable[Extent]) -> bool:
        """Tell whether the cache holds extents beside all that are planned."""
        more = sum(each.size_bytes for each in extents if each not in self._num_ranks)
        return self._num_bytes + more <= self._limit_bytes

    def _drop(self, rank: RankExtents, step: float) -> None:
        """Drop the extents that no step from `step` on reads, as far as is planned."""
        if rank.first_end > step:
            return
        for each in [each for each, end in rank.uses.items() if end <= step]:
            del rank.uses[each], rank.begins[each]
            self._num_ranks[each] -= 1
            if not self._num_ranks[each]:
                del self._num_ranks[each]
                self._num_bytes -= each.size_bytes
                self.absent.pop(each, None)
                each.touch(planned=False)
        rank.first_end = min(rank.uses.values(), default=math.inf)
