"""Who reads which plan, and what to prefetch for them: arithmetic only, without disk or threads.

    steps        |-- request --|-------- horizon --------|
             step           stop                     wanted
                       everything below `asked` has been prefetched

A *reader* is one rank that goes through a plan. Each of its requests moves `wanted` forward. Nothing
beyond `wanted` is prefetched, so a reader that goes away wastes at most one horizon.

Most corpora lie in the page cache, where prefetching is useless. Therefore a reader whose next windows
are resident, by a sample, counts as warm, and nothing is prefetched for it until a gather of its plan
had to wait for the disk.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter
from corpus_server.plan import Sampler
from corpus_server.read.bound_plan import BoundPlan

# Windows of one turn: what a fast disk reads in 10 ms, so that readers wait little for each other.
_TURN_WINDOWS = 1024

# No reader gets more than this part of the budget, even alone. A quarter of the default budget is half a
# second of a fast disk; pages prefetched for a reader that goes away are wasted.
_MIN_SHARES = 4

# A reader that is silent for so long has no share of the budget. When it comes back, it starts anew.
_IDLE_SECONDS = 60.0

_MAX_READERS = 4096


@dataclass(slots=True, eq=False)
class Reader:
    """One rank of a plan, as its latest request left it.

    Args:
        bound, rank, world_size: identity.
        step: first step of the latest request; older steps need no prefetching any more.
        asked: first step that was not prefetched.
        wanted: prefetching ends before this step.
        warm: its windows were found resident, and no gather has waited for the disk since.
        num_faults: `num_faults` of its plan's gatherer at the latest request.
        sampled: whether the steps up to `wanted` were sampled for being resident.
        queued: whether it waits for a turn.
        seen_seconds: time of its latest request.
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
        """First step to prefetch next."""
        return max(self.asked, self.step)

    def give_up(self) -> None:
        """Want nothing until the next request."""
        self.wanted = 0

    def next_turn(self) -> Turn:
        """Return the steps to prefetch next; the first turn after a request is sampled for being resident."""
        samples, self.sampled = not self.sampled, True
        return Turn(self, self.first, self.wanted, samples)

    def finish(self, turn: Turn, after: int, *, warm: bool) -> bool:
        """Note that a turn reaches to the step `after`, and whether its windows are resident.

        Returns:
            Whether to prefetch its windows: no if they are resident, or if a request came meanwhile and
            changed what is wanted.
        """
        if warm and turn.first <= self.first <= turn.stop:
            self.warm, self.asked = True, self.wanted
        elif self.first == turn.first:
            self.asked = after
            return True
        return False


class Turn(NamedTuple):
    """Steps of a reader from `first` on, at most to `stop`.

    Args:
        samples: whether to look first if the windows are resident.
    """

    reader: Reader
    first: int
    stop: int
    samples: bool

    def locate(self) -> tuple[NDArray[np.int64], int]:
        """Return the turn's windows, see `locate_some`."""
        reader = self.reader
        part = {"rank": reader.rank, "world_size": reader.world_size}
        return locate_some(reader.bound.sampler, self.first, self.stop, most=_TURN_WINDOWS, **part)


def locate_some(
    sampler: Sampler, first: int, stop: int, *, rank: int, world_size: int, most: int
) -> tuple[NDArray[np.int64], int]:
    """Return windows of a rank from the step `first` on, `(count, rows, 2) int64`, and the step after them.

    They are about `most` windows, of one step at least. They end before the step `stop`, and where the
    shape of batches changes. If the rank has no further step (the range of steps ends, or its world size no
    longer divides the batch), there are none, and they reach to `stop`.
    """
    part = {"rank": rank, "world_size": world_size}
    try:
        rows = sampler.check_part(first, **part)
    except InvalidParameter:
        return np.empty((0, 0, 2), dtype=np.int64), stop
    count = min(stop - first, max(1, most // rows))
    try:
        return sampler.locate(first, count=count, **part), first + count
    except InvalidParameter:  # a stage or the range of steps ends within: one step at a time
        return sampler.locate(first, **part), first + 1


class Readers:
    """The readers of a process, and whose turn it is; not safe to use from several threads.

    Args:
        budget_bytes: pages prefetched beyond the requests, for all readers together. Readers get
            equal shares, a quarter at most. A reader whose share is less than one of its steps gets none.

    Attributes:
        reserved_bytes: of the budget, for the groups of bounded shuffles.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self._readers: OrderedDict[tuple[str, int, int], Reader] = OrderedDict()  # longest idle first
        self._queue: deque[Reader] = deque()

    def note(
        self, bound: BoundPlan, *, step: int, count: int, rows: int, rank: int, world_size: int, now: float
    ) -> None:
        """Note a request.

        Args:
            bound, step, count, rank, world_size: the request, checked.
            rows: rows of a step of this rank.
            now: seconds of a monotonic clock.
        """
        reader = self._reader(bound, rank, world_size, now)
        reader.step = step
        num_faults = bound.gatherer.num_faults
        if reader.warm and num_faults == reader.num_faults:
            return
        stop = step + count
        share = (self._budget_bytes - self.reserved_bytes) // max(_MIN_SHARES, len(self._readers))
        # The page cache that a window takes on average: it may begin anywhere in a page.
        window_bytes = (bound.sampler.seq_len(step) + 1) * bound.dtype.itemsize + mmap.PAGESIZE
        horizon = share // (rows * window_bytes)
        # The reader is new, was warm, overtook the disk, or jumped: begin with its own windows.
        if reader.warm or not step <= reader.asked <= stop + 2 * horizon:
            reader.asked = step
        reader.warm, reader.num_faults = False, num_faults
        # Half a horizon at a time, so that most requests cause no work.
        if not horizon or reader.asked - stop > horizon // 2:
            return
        reader.wanted, reader.sampled = stop + horizon, False
        if not reader.queued:
            reader.queued = True
            self._queue.append(reader)

    def has_work(self) -> bool:
        """Tell whether a reader may want a turn."""
        return bool(self._queue)

    def next(self) -> Reader | None:
        """Return the reader whose turn it is; None if no reader wants anything."""
        while self._queue:
            reader = self._queue.popleft()
            if reader.first < reader.wanted:
                self._queue.append(reader)
                return reader
            reader.queued = False
        return None

    def bounds(self) -> list[BoundPlan]:
        """Return the plans that are being read."""
        return [reader.bound for reader in self._readers.values()]

    def _reader(self, bound: BoundPlan, rank: int, world_size: int, now: float) -> Reader:
        """Return a rank's reader, a new one if there is none; forget readers that are idle."""
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
