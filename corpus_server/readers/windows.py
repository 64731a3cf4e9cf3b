"""What to prefetch for one reader, window by window: arithmetic only, without disk or threads.

Most corpora lie in the page cache, where prefetching is useless. Therefore a reader whose next windows
are resident, by a sample, counts as warm, and nothing is prefetched for it until a gather of its plan
had to wait for the disk.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.readers.groups import Groups
from corpus_server.readers.prepared import Prepared, next_steps
from corpus_server.readers.registry import StepsRequest

# Windows of one turn: what a fast disk reads in 10 ms, so that readers wait little for each other.
_TURN_WINDOWS = 1024


class Turn(NamedTuple):
    """Consecutive steps to prefetch.

    Args:
        of: the steps that they continue.
        step_bytes: page cache that each takes.
        samples: whether to look first if their windows are resident.
    """

    of: Prepared
    num_steps: int
    step_bytes: int
    length: int
    windows: NDArray[np.int64]
    samples: bool

    @property
    def after(self) -> int:
        """The step after its last one."""
        return self.of.next + self.num_steps


class Windows:
    """The windows of one reader. `next_turn` takes some ms and belongs to one thread; the rest is brief.

    Args:
        request: the reader's first one.
        groups: of its plan, which are read ahead instead if there is room for them.

    Attributes:
        step: of the latest request; windows of older steps need no prefetching any more.
        has_ended: whether the reader is idle.
        rests_until: after a failure, the monotonic time before which requests cause no turn.
    """

    def __init__(self, request: StepsRequest, groups: Groups | None = None) -> None:
        self.groups = groups
        self.bound = request.bound
        self.step = self._stop = request.step
        self.has_ended, self.rests_until = False, 0.0
        self._part = {"rank": request.rank, "world_size": request.world_size}
        self._share_bytes = 0
        self._prepared = Prepared(request.step)
        self._is_warm = False  # the windows were found resident, and no gather has waited for the disk since
        self._num_faults = -1  # of the plan's gatherer, at the latest request that was looked at
        self._has_sampled = False  # since it wanted a turn
        self._ended: Prepared | None = None  # after which the rank has no step

    def note(self, request: StepsRequest, share_bytes: int) -> bool:
        """Note a request; return whether windows are wanted.

        Args:
            share_bytes: page cache for windows beyond the request.
        """
        self.step, self._stop = request.step, request.step + request.count
        self._share_bytes = share_bytes
        num_faults = self.bound.gatherer.num_faults
        if self._is_warm and num_faults == self._num_faults:
            return False
        # The reader was warm, overtook the disk, or jumped: begin with its own windows.
        is_behind = self._prepared.next < self.step
        if self._is_warm or is_behind or self._prepared.cost_from(self._stop) > 2 * share_bytes:
            self._prepared = Prepared(self.step)
        self._is_warm, self._num_faults = False, num_faults
        # Half a share at a time, so that most requests cause no work.
        if self._ended is self._prepared or self._prepared.cost_from(self._stop) > share_bytes // 2:
            return False
        self._has_sampled = False
        return self._step_bytes(self.step, request.rows) <= share_bytes

    def next_turn(self) -> Turn | None:
        """Return what to prefetch next, None if nothing; the first turn after a request is sampled."""
        prepared, sampler = self._prepared, self.bound.sampler
        first, stop, share_bytes = prepared.next, self._stop, self._share_bytes
        rows, count = next_steps(sampler, first, max_windows=_TURN_WINDOWS, **self._part)
        if not rows:
            self._ended = prepared
            return None
        step_bytes = self._step_bytes(first, rows)
        room = max(0, share_bytes - prepared.cost_from(stop)) // step_bytes
        count = min(count, max(0, stop - first) + room)
        if not count:
            return None
        windows = sampler.locate(first, count=count, **self._part).reshape(-1, 2)
        samples, self._has_sampled = not self._has_sampled, True
        return Turn(prepared, count, step_bytes, sampler.seq_len(first) + 1, windows, samples)

    def finish(self, turn: Turn, *, is_warm: bool) -> bool:
        """Note whether a turn's windows are resident; return whether to prefetch them.

        No if they are resident, or if a request began anew meanwhile.
        """
        if self._prepared is not turn.of:
            return False
        if is_warm:
            self._is_warm = True
            return False
        turn.of.add(turn.num_steps, turn.step_bytes)
        return True

    def _step_bytes(self, step: int, rows: int) -> int:
        # The page cache that a window takes on average: it may begin anywhere in a page.
        return rows * ((self.bound.sampler.seq_len(step) + 1) * self.bound.dtype.itemsize + mmap.PAGESIZE)
