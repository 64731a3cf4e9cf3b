"""Which shards the next steps of every rank read, for as far ahead as the cache has room.

    steps     |- last requests -|------- planned -------|- waits for room -|
               step                                      next

A shard that no planned step reads any more may leave the cache. Arithmetic only: `staging` fetches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from corpus_server.plan.stage import MAX_STEP
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.windows import locate_some
from corpus_server.stores import StagedFile

_PART_WINDOWS = 16384  # located at once, in some ms
_MAX_WINDOWS = 2**22  # planned for one rank
_STEPS_BACK = 4  # requests
_IDLE_SECONDS = 60.0  # a rank that is silent for so long is not followed any more


@dataclass(slots=True, eq=False)
class Follower:
    """One rank of a plan.

    Args:
        step: of its latest request.
        next: first step that is not planned.
        until: the shards of planned steps -> the step after the last one that reads it.
        waits: the shards of the step `next`, if the cache has no room for them.
        part_windows: to plan at once; fewer where the shards of more do not fit.
        wake_at: the step from which to look further ahead.
        rows: of a step.
        margin: steps back that count as planned: a slow reader may still be receiving them.
        seen_seconds: time of its latest request.
        is_gone: not followed any more.
    """

    bound: BoundPlan
    rank: int
    world_size: int
    step: int
    next: int
    until: dict[StagedFile, int] = field(default_factory=dict)
    waits: set[StagedFile] | None = None
    part_windows: int = _PART_WINDOWS
    margin: int = 0
    rows: int = 1
    wake_at: int = 0
    seen_seconds: float = 0.0
    is_gone: bool = False

    def locate(self, first: int) -> tuple[int, dict[StagedFile, int]]:
        """Return the step after some steps from `first` on, and their shards, first used first.

        Each shard comes with the step after the last one that reads it. Takes some ms.
        """
        part = {"rank": self.rank, "world_size": self.world_size}
        stop = first + _PART_WINDOWS
        located, after = locate_some(self.bound.sampler, first, stop, most=self.part_windows, **part)
        self.rows = max(1, located.shape[1])
        numbers = located[..., 0].reshape(-1)
        _, first_rows = np.unique(numbers, return_index=True)
        _, last_rows = np.unique(numbers[::-1], return_index=True)
        last_steps = first + (numbers.size - 1 - last_rows) // self.rows
        until: dict[StagedFile, int] = {}
        for place in np.argsort(first_rows).tolist():
            if (file := self.bound.staged[numbers[first_rows[place]]]) is not None:
                until[file] = int(last_steps[place]) + 1
        return after, until


class PlannedShards:
    """The shards that ranks will read; not safe to use from several threads.

    Args:
        limit_bytes: of the cache.

    Attributes:
        present: those that are on this machine, as far as this process knows.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.present: set[StagedFile] = set()
        self._limit_bytes = limit_bytes
        self._followers: dict[tuple[str, int, int], Follower] = {}
        self._num_ranks: dict[StagedFile, int] = {}  # that read it; read soonest first, roughly
        self._num_bytes = 0

    def files(self) -> list[StagedFile]:
        """Return all planned shards, roughly in the order in which they are read."""
        return list(self._num_ranks)

    def add_present(self, file: StagedFile) -> None:
        """Note that a shard is on this machine, if it is planned."""
        if file in self._num_ranks:
            self.present.add(file)

    def note(
        self, bound: BoundPlan, *, step: int, count: int, rank: int, world_size: int, now: float
    ) -> bool:
        """Note a request of a rank; return whether it is time to look further ahead."""
        key = (bound.plan.id, rank, world_size)
        follower = self._followers.get(key)
        margin = _STEPS_BACK * count
        if follower is not None and step + margin < follower.step:
            self._forget(key)
            follower = None
        if follower is None:
            follower = self._followers[key] = Follower(bound, rank, world_size, step, step)
        follower.step, follower.margin, follower.seen_seconds = step, margin, now
        if follower.next < step:  # it was faster than planning
            follower.next, follower.waits, follower.wake_at = step, None, step
        # Not at each request: waking up costs more than a small answer.
        return step >= follower.wake_at

    def next_follower(self) -> Follower | None:
        """Return the rank that has looked least far ahead and can look further, if any."""
        ready = []
        for each in self._followers.values():
            self._pass(each, each.step - each.margin)
            if each.waits is not None and self._has_room(each.waits):
                each.waits = None
            ahead = each.next - each.step
            each.wake_at = each.step + 1 + ahead // 16
            if each.waits is None and ahead * each.rows < _MAX_WINDOWS:
                ready.append(each)
        return min(ready, key=lambda each: each.next - each.step, default=None)

    def extend(self, follower: Follower, first: int, after: int, until: dict[StagedFile, int]) -> None:
        """Plan the shards of the steps [first, after) if there is room; else note what they wait for."""
        if (follower.next, follower.is_gone) != (first, False):
            return  # requests went on while they were located
        if self._has_room(until):
            for file in [file for file in until if file not in follower.until]:
                if file not in self._num_ranks:
                    self._num_ranks[file] = 0
                    self._num_bytes += file.size_bytes
                self._num_ranks[file] += 1
            follower.until.update(until)
            follower.next = after
            follower.part_windows = min(_PART_WINDOWS, 2 * follower.part_windows)
        elif after - first > 1:
            follower.part_windows //= 4
        else:
            follower.waits = set(until)

    def forget_margins(self) -> None:
        """Drop the shards that only steps before the latest requests read."""
        for follower in self._followers.values():
            self._pass(follower, follower.step)

    def forget_idle(self, now: float) -> None:
        """Forget ranks that have been silent."""
        for key, follower in list(self._followers.items()):
            if now - follower.seen_seconds > _IDLE_SECONDS:
                self._forget(key)

    def _has_room(self, files: Iterable[StagedFile]) -> bool:
        """Tell whether the cache holds shards beside all that are planned."""
        more = sum(file.size_bytes for file in files if file not in self._num_ranks)
        return self._num_bytes + more <= self._limit_bytes

    def _forget(self, key: tuple[str, int, int]) -> None:
        follower = self._followers.pop(key)
        follower.is_gone = True
        self._pass(follower, MAX_STEP + 2)

    def _pass(self, follower: Follower, step: int) -> None:
        """Drop the shards that no step from `step` on reads, as far as is planned."""
        for file in [file for file, until in follower.until.items() if until <= step]:
            del follower.until[file]
            self._num_ranks[file] -= 1
            if not self._num_ranks[file]:
                del self._num_ranks[file]
                self._num_bytes -= file.size_bytes
                self.present.discard(file)
                file.release()
