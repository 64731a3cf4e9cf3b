"""Which shards the next steps of every rank read, for as far ahead as the cache has room.

    steps     |- last requests -|------- planned -------|- waits for room -|
               step                                      next

A shard that no planned step reads any more may leave the cache. Arithmetic only: `staging` fetches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from corpus_server.readers.prepared import Prepared, next_steps
from corpus_server.readers.registry import StepsRequest
from corpus_server.stores import StagedFile

_MAX_LOCATED = 16384  # located at once, in some ms
_MAX_WINDOWS = 2**22  # planned for one rank
_REQUESTS_BACK = 4

Uses = dict[StagedFile, int]
"""Shards of some steps, first used first -> the step after the last one that reads it."""


class LocatedSteps(NamedTuple):
    """Steps that were located at once: `of` which they continue, and the windows of each."""

    of: Prepared
    num_steps: int
    step_windows: int
    uses: Uses


class RankShards:
    """The shards of one rank's next steps. `locate` takes ms and belongs to one thread; the rest is brief.

    Args:
        request: the reader's first one.

    Attributes:
        step: of the latest request.
        margin: steps back that count as planned: a slow client may still be receiving them.
        prepared: the steps that are planned, in windows.
        uses: their shards; the first of these that may go does so at the step `first_end`.
        waits: the shards of the next step, if the cache has no room for them.
        has_jumped_back, has_ended: set where the shards that were planned so far may go.
        rests_until: after a failure, the monotonic time before which nothing is planned.
    """

    def __init__(self, request: StepsRequest) -> None:
        self.bound = request.bound
        self.step, self.margin = request.step, 0
        self.prepared = Prepared(request.step)
        self.uses: Uses = {}
        self.first_end = math.inf
        self.waits: set[StagedFile] | None = None
        self.has_jumped_back = self.has_ended = False
        self.rests_until = 0.0
        self._rank, self._world_size = request.rank, request.world_size
        self._max_located = _MAX_LOCATED  # to plan at once; fewer where the shards of more do not fit
        self._wake_at = 0  # the step from which to look further ahead

    def note(self, request: StepsRequest) -> bool:
        """Note a request; return whether it is time to look further ahead."""
        margin = _REQUESTS_BACK * request.count
        has_jumped_back = request.step + margin < self.step
        if has_jumped_back or self.prepared.next < request.step:  # or it was faster than planning
            self.prepared, self.waits, self._wake_at = Prepared(request.step), None, request.step
            self.has_jumped_back |= has_jumped_back
        self.step, self.margin = request.step, margin
        # Not at each request: waking up costs more than a small response.
        return self.step >= self._wake_at

    def look(self) -> bool:
        """Note that the thread looks; return whether more windows may be planned."""
        self._wake_at = self.step + 1 + (self.prepared.next - self.step) // 16
        return self.prepared.cost_from(self.step) < _MAX_WINDOWS

    def locate(self) -> LocatedSteps:
        """Return the next steps and their shards. Steps that the rank does not have count as empty ones."""
        prepared, sampler = self.prepared, self.bound.sampler
        part = {"rank": self._rank, "world_size": self._world_size}
        rows, count = next_steps(sampler, prepared.next, max_windows=self._max_located, **part)
        if not rows:
            return LocatedSteps(prepared, _MAX_LOCATED, 1, {})
        uses: Uses = {}
        start = self._rank * rows
        for low in range(start, start + rows, _MAX_LOCATED):  # one range, unless a step is larger
            chunk = range(low, min(low + _MAX_LOCATED, start + rows))
            numbers = sampler.locate_rows(prepared.next, chunk, count=count)[..., 0].reshape(-1)
            _, first_places = np.unique(numbers, return_index=True)
            _, last_places = np.unique(numbers[::-1], return_index=True)
            last_steps = prepared.next + (numbers.size - 1 - last_places) // len(chunk)
            for place in np.argsort(first_places).tolist():
                if (file := self.bound.staged[numbers[first_places[place]]]) is not None:
                    uses[file] = max(uses.get(file, 0), int(last_steps[place]) + 1)
        return LocatedSteps(prepared, count, rows, uses)

    def fit(self, *, fits: bool) -> None:
        """Locate more windows at once after those that fitted the cache, fewer after others."""
        self._max_located = min(_MAX_LOCATED, 2 * self._max_located) if fits else self._max_located // 4


class PlannedShards:
    """The shards that ranks will read; not safe to use from several threads.

    Args:
        limit_bytes: of the cache.

    Attributes:
        absent: those that are not known to be on this machine; read soonest first, roughly.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.absent: dict[StagedFile, None] = {}
        self._limit_bytes = limit_bytes
        self._ranks: set[RankShards] = set()
        self._num_ranks: dict[StagedFile, int] = {}  # that read it
        self._num_bytes = 0

    def __contains__(self, file: StagedFile) -> bool:
        return file in self._num_ranks

    def files(self) -> list[StagedFile]:
        """Return all planned shards."""
        return list(self._num_ranks)

    def add(self, rank: RankShards) -> None:
        """Plan for a new rank."""
        self._ranks.add(rank)

    def note_absent(self, files: Iterable[StagedFile]) -> None:
        """Note that shards are not on this machine."""
        self.absent.update((file, None) for file in files if file in self._num_ranks)

    def next_rank(self, now: float) -> RankShards | None:
        """Return the rank that has looked least far ahead and can look further, if any."""
        for each in list(self._ranks):
            if each.has_ended:
                self._ranks.discard(each)
            self._drop(each, math.inf if each.has_ended or each.has_jumped_back else each.step - each.margin)
            each.has_jumped_back = False
        ready = []
        for each in self._ranks:
            if each.waits is not None and self._has_room(each.waits):
                each.waits = None
            if each.look() and each.waits is None and each.rests_until <= now:
                ready.append(each)
        return min(ready, key=lambda each: each.prepared.next - each.step, default=None)

    def extend(self, rank: RankShards, steps: LocatedSteps) -> None:
        """Plan the shards of some steps if there is room; else note what they wait for."""
        if rank.prepared is not steps.of or rank.has_ended:
            return  # requests went on while they were located
        fits = self._has_room(steps.uses)
        if not fits and steps.num_steps == 1:
            rank.waits = set(steps.uses)
            return
        rank.fit(fits=fits)
        if not fits:
            return
        for file in [file for file in steps.uses if file not in rank.uses]:
            if file not in self._num_ranks:
                self._num_ranks[file] = 0
                self._num_bytes += file.size_bytes
                self.absent[file] = None
            self._num_ranks[file] += 1
        rank.uses.update(steps.uses)
        rank.first_end = min(rank.uses.values(), default=math.inf)
        steps.of.add(steps.num_steps, steps.step_windows)

    def drop_margins(self) -> None:
        """Drop the shards that only steps before the latest requests read."""
        for rank in self._ranks:
            self._drop(rank, rank.step)

    def _has_room(self, files: Iterable[StagedFile]) -> bool:
        """Tell whether the cache holds shards beside all that are planned."""
        more = sum(file.size_bytes for file in files if file not in self._num_ranks)
        return self._num_bytes + more <= self._limit_bytes

    def _drop(self, rank: RankShards, step: float) -> None:
        """Drop the shards that no step from `step` on reads, as far as is planned."""
        if rank.first_end > step:
            return
        for file in [file for file, end in rank.uses.items() if end <= step]:
            del rank.uses[file]
            self._num_ranks[file] -= 1
            if not self._num_ranks[file]:
                del self._num_ranks[file]
                self._num_bytes -= file.size_bytes
                self.absent.pop(file, None)
                file.release()
        rank.first_end = min(rank.uses.values(), default=math.inf)
