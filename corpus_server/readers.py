"""Who reads which plan, and what they ask for next: the arithmetic of reading ahead, without disk or threads.

    steps        |-- request --|-------- horizon --------|
             step           stop                     wanted
                       everything below `asked` has been asked for

A *reader* is one rank that goes through a plan. Each of its requests moves `wanted` on. Nothing is asked for
beyond, so a reader that went away costs its horizon.

Most corpora lie in the page cache, where asking is for nothing. So a reader is taken for warm when a sample
of its next windows is resident, and is left alone until a gather of its plan had to wait for the disk.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.catalog import BoundPlan
from corpus_server.errors import InvalidParameter

_BLOCK_WINDOWS = 1024
"""Located at once for one reader, before the next one's turn: what a fast disk reads in 10 ms."""

_LEAST_SHARES = 4
"""No reader gets more than this part of the budget, even alone: a quarter of the default is half a second of
a fast disk, and what is read for a reader that goes away is lost."""

_IDLE_SECONDS = 60.0
"""A reader that asked nothing for so long has no share of the budget; should it come back, it is new."""

_MAX_READERS = 4096


@dataclass(slots=True, eq=False)
class Reader:
    """One rank of a plan, as its latest request left it.

    Args:
        bound, rank, world_size: say who it is.
        step: first step of the latest request; older ones are not worth asking for any more.
        asked: first step that was not asked for.
        wanted: asking ends before this step.
        warm: its windows were found resident, and no gather had to wait since.
        num_faults: of its plan's gatherer when that was last looked at.
        sampled: whether the stretch up to `wanted` was looked at for being resident.
        queued: whether its turn will come.
        seen_seconds: when it asked last.
    """

    bound: BoundPlan
    rank: int
    world_size: int
    step: int = 0
    asked: int = 0
    wanted: int = 0
    warm: bool = False
    num_faults: int = 0
    sampled: bool = False
    queued: bool = False
    seen_seconds: float = 0.0

    @property
    def first(self) -> int:
        """The step to go on with."""
        return max(self.asked, self.step)

    def next_block(self) -> Block:
        """Return what to ask for next; the first block of a stretch is to be looked at for being resident."""
        samples, self.sampled = not self.sampled, True
        return Block(self, self.first, self.wanted, samples)

    def finish(self, block: Block, after: int, *, warm: bool) -> bool:
        """Learn that a block reaches to the step `after`, and whether it is resident.

        Returns:
            Whether it is to be asked for: not if it is resident, or a request has changed what is wanted.
        """
        if warm and block.first <= self.first <= block.stop:
            self.warm, self.asked = True, self.wanted
        elif self.first == block.first:
            self.asked = after
            return True
        return False


class Block(NamedTuple):
    """Steps of a reader from `first` on, at most to `stop`.

    Args:
        samples: whether it is to be looked at for being resident.
    """

    reader: Reader
    first: int
    stop: int
    samples: bool

    def locate(self) -> tuple[NDArray[np.int64], int]:
        """Return the block's windows, `(count, rows, 2) int64`, and the step after it.

        It ends where the batch size changes. Where a rank has no further step (the range of steps ends, or
        its world size no longer divides the batch) it is empty and reaches to `stop`.
        """
        sampler = self.reader.bound.sampler
        part = {"rank": self.reader.rank, "world_size": self.reader.world_size}
        try:
            rows = sampler.check_part(self.first, **part)
        except InvalidParameter:
            return np.empty((0, 0, 2), dtype=np.int64), self.stop
        count = min(self.stop - self.first, max(1, _BLOCK_WINDOWS // rows))
        try:
            return sampler.locate(self.first, count=count, **part), self.first + count
        except InvalidParameter:  # it holds a border of stages, or of the range of steps
            return sampler.locate(self.first, **part), self.first + 1


class Readers:
    """The readers of a process and whose turn it is; not safe to use from several threads.

    Args:
        budget_bytes: pages asked for ahead of requests, over all readers, which get equal shares, a quarter
            at most. A reader whose share is less than one of its steps is not read ahead for.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._readers: OrderedDict[tuple[str, int, int], Reader] = OrderedDict()  # longest idle first
        self._queue: deque[Reader] = deque()

    def note(
        self, bound: BoundPlan, *, step: int, count: int, rows: int, rank: int, world_size: int, now: float
    ) -> None:
        """Learn of a request.

        Args:
            bound, step, count, rank, world_size: what is asked for, checked.
            rows: of a step of this rank.
            now: seconds of a clock that never goes back.
        """
        reader = self._reader(bound, rank, world_size, now)
        reader.step = step
        num_faults = bound.gatherer.num_faults
        if reader.warm and num_faults == reader.num_faults:
            return
        stop = step + count
        share = self._budget_bytes // max(_LEAST_SHARES, len(self._readers))
        horizon = share // (rows * _pages_bytes(bound))
        # It is new, was warm, went faster than the disk, or jumped: its own windows come first.
        if reader.warm or not step <= reader.asked <= stop + 2 * horizon:
            reader.asked = step
        reader.warm, reader.num_faults = False, num_faults
        if not horizon or reader.asked - stop > horizon // 2:
            return
        reader.wanted, reader.sampled = stop + horizon, False
        if not reader.queued:
            reader.queued = True
            self._queue.append(reader)

    @property
    def has_work(self) -> bool:
        """Whether somebody may want a block."""
        return bool(self._queue)

    def next(self) -> Reader | None:
        """Return the reader whose turn it is and that wants a block; None if nobody wants any."""
        while self._queue:
            reader = self._queue.popleft()
            if reader.first < reader.wanted:
                self._queue.append(reader)
                return reader
            reader.queued = False
        return None

    def _reader(self, bound: BoundPlan, rank: int, world_size: int, now: float) -> Reader:
        """Return a rank's reader, made if it is new; those that are idle are forgotten."""
        key = (bound.plan.id, rank, world_size)
        reader = self._readers.get(key)
        if reader is None or reader.bound is not bound:
            reader = self._readers[key] = Reader(bound, rank, world_size)
        self._readers.move_to_end(key)
        reader.seen_seconds = now
        longest_idle = next(iter(self._readers.values()))
        while now - longest_idle.seen_seconds > _IDLE_SECONDS or len(self._readers) > _MAX_READERS:
            longest_idle.wanted = 0
            self._readers.popitem(last=False)
            longest_idle = next(iter(self._readers.values()))
        return reader


def _pages_bytes(bound: BoundPlan) -> int:
    """Return the page cache that a window takes on average, as it begins anywhere in a page."""
    return (bound.plan.seq_len + 1) * bound.dtype.itemsize + mmap.PAGESIZE
