"""Which shards the next steps of every rank read, for as far ahead as the cache has room.

    steps     |- last requests -|------- planned -------|- waits for room -|
            steps.start                                next

A shard that no planned step reads any more may leave the cache. Arithmetic only: `staging` fetches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import CacheTooSmall
from corpus_server.plan import BoundedShuffle
from corpus_server.plan.orders.order import ShardSizes
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.ahead import Ahead
from corpus_server.stores import StagedFile

_MAX_LOCATED = 16384  # located at once, in some ms
_MAX_WINDOWS = 2**22  # planned for one rank
_REQUESTS_BACK = 4  # count as planned: a slow client may still be receiving them

Uses = dict[StagedFile, int]
"""Shards of some steps, first used first -> the step after the last one that reads it."""


class LocatedSteps(NamedTuple):
    """Consecutive steps, the windows of each, and the shards of all."""

    num_steps: int
    step_windows: int
    uses: Uses


class RankShards(Ahead):
    """The shards of one rank's next steps; a step costs its windows. `locate` takes ms.

    Attributes:
        uses: the shards of the planned steps; the first of these that may go does so at the step `first_end`.
        waits: the shards of the next step, if the cache has no room for them.
    """

    def __init__(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> None:
        super().__init__(bound, rank, world_size, steps)
        self.uses: Uses = {}
        self.first_end = math.inf
        self.waits: set[StagedFile] | None = None
        self._step = self.steps.start
        self._max_located = _MAX_LOCATED  # to plan at once; fewer where the shards of more do not fit

    def follow(self) -> float:
        """Follow the latest request; return the step before which shards may go."""
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

    def locate(self) -> LocatedSteps:
        """Return the next steps and their shards. Steps that the rank does not have count as empty ones."""
        sampler = self.bound.sampler
        rows, count = self.next_steps(self._max_located)
        if not rows:
            return LocatedSteps(_MAX_LOCATED, 1, {})
        uses: Uses = {}
        start = self.part["rank"] * rows
        for low in range(start, start + rows, _MAX_LOCATED):  # one range, unless a step is larger
            chunk = range(low, min(low + _MAX_LOCATED, start + rows))
            ranks = {"world_size": self.part["world_size"]}
            pieces, borders = sampler.pieces(self.next, chunk, count=count, **ranks)
            numbers = pieces[borders[:-1], 0]  # all pieces of a row lie in one shard
            _, first_places = np.unique(numbers, return_index=True)
            _, last_places = np.unique(numbers[::-1], return_index=True)
            last_steps = self.next + (numbers.size - 1 - last_places) // len(chunk)
            for place in np.argsort(first_places).tolist():
                for file in self.bound.staged[numbers[first_places[place]]]:
                    uses[file] = max(uses.get(file, 0), int(last_steps[place]) + 1)
        return LocatedSteps(count, rows, uses)

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

    def extend(self, rank: RankShards, steps: LocatedSteps) -> None:
        """Plan the shards of some steps if there is room; else note what they wait for."""
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
        rank.add(steps.num_steps, steps.step_windows)

    def drop_margins(self) -> None:
        """Drop the shards that only steps before the latest requests read."""
        for rank in self._ranks:
            self._drop(rank, rank.steps.start)

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


def check_working_set(bound: BoundPlan, cache_bytes: int) -> None:
    """Raise CacheTooSmall if the cache holds less than a plan's order needs at a time (`Order.working_set`).

    Such a cache would have to fetch whole shards for single windows.
    """
    order, plan = bound.plan.order, bound.plan
    working_sets = [order.working_set(_sizes(bound, name)) for name in plan.sources]
    needed = sum(each.num_bytes for each in working_sets)
    if needed <= cache_bytes:
        return
    _, reads, remedy = working_sets[0]
    if reads:
        why, remedy = f"{reads} {needed:,} bytes", f"{remedy}, or a larger --cache-bytes"
    else:
        why, remedy = _random_access(bound, cache_bytes)
    raise CacheTooSmall(
        f"the cache holds {cache_bytes:,} bytes, and with order {order} {why}",
        parameter="plan",
        received=f"{needed} bytes",
        accepted=f"at most {cache_bytes} bytes",
        remedy=remedy,
    )


def _sizes(bound: BoundPlan, name: str) -> ShardSizes:
    numbers = [number for number, (its, _) in enumerate(bound.shards) if its == name]
    sizes = [sum(file.size_bytes for file in bound.staged[number]) for number in numbers]
    num_bytes = np.array(sizes, dtype=np.int64)
    first_row = _first_rows(bound)
    return ShardSizes(num_bytes, first_row[np.array(numbers) + 1] - first_row[numbers[0]])


def _first_rows(bound: BoundPlan) -> NDArray[np.int64]:
    assert bound.sampler.rows.shard_row is not None  # a plan of others is not bound to staged corpora
    return bound.sampler.rows.shard_row.astype(np.int64)


def _random_access(bound: BoundPlan, cache_bytes: int) -> tuple[str, str]:
    """Return what an order costs that reads windows of shards anywhere, and an order that does not."""
    sizes = [sum(file.size_bytes for file in files) for files in bound.staged if files]
    total, num_shards, rows = sum(sizes), len(sizes), bound.plan.stages[0].global_batch_size
    touched = min(num_shards, rows)
    new = touched * (1 - cache_bytes / total)
    rows_of_shards = np.diff(_first_rows(bound))
    better = BoundedShuffle(
        block_windows=max(1, int(np.median(rows_of_shards))),
        group_blocks=max(1, cache_bytes // (4 * max(sizes))),  # each block may lie across two shards
    )
    return (
        f"each step of {rows} rows reads windows of up to {touched} of {num_shards} "
        f"shards at random, {total:,} bytes together: about {new:.0f} of them, "
        f"{new * total / num_shards:,.0f} bytes, would have to be fetched for every step",
        f'bounded shuffle, for example "order": {json.dumps(better.to_json())}, or a larger --cache-bytes',
    )
