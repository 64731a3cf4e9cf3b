"""What to prefetch for one reader, window by window: arithmetic only, without disk or threads.

Most corpora lie in the page cache, where prefetching is useless. Therefore a reader whose next windows
are resident, by a sample, counts as warm, and nothing is prefetched for it until a gather of its plan
had to wait for the disk.
"""

from __future__ import annotations

import mmap
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import NO_SHARD
from corpus_server.readers.ahead import Ahead
from corpus_server.readers.groups import Groups

# Windows of one turn: what a fast disk reads in 10 ms, so that readers wait little for each other.
_TURN_WINDOWS = 1024

_TOO_LARGE_STEPS = 16  # until a reader whose next step exceeds its share is looked at again

_ALL: Final = range(2**63)


class Turn(NamedTuple):
    """Windows or pieces of consecutive steps, to be prefetched until the reader asks for the step `stop`.

    `(k, 2)` shard number and start token, and `(k,)` tokens of each. `samples` says whether to look first if
    they are resident.
    """

    windows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    stop: int
    samples: bool


class Windows(Ahead):
    """The windows of one reader's next steps; a step costs the page cache that it takes.

    Attributes:
        groups: of its plan, which are read ahead instead if there is room for them.
    """

    groups: Groups | None = None
    _samples = True
    _is_warm = False

    def next_turn(self, share_bytes: int) -> Turn | None:
        """Return what to prefetch next; takes some ms. None, and quiet, if there is nothing to do.

        Args:
            share_bytes: page cache for windows beyond the latest request.
        """
        steps, sampler = self.steps, self.bound.sampler
        self.num_faults = self.bound.gatherer.num_faults
        # The reader was warm, overtook the disk, or jumped: begin with its own windows.
        if self._is_warm or self.next < steps.start or self.cost_from(steps.stop) > 2 * share_bytes:
            self.begin(steps.start)
            self._is_warm, self._samples = False, True
        self.quiet, count, step_bytes = self._next(steps, share_bytes)
        if not count:
            self._samples = True
            return None
        rows = sampler.check_part(self.next, count=count, **self.part)
        first = self.part["rank"] * rows
        ranks = {"world_size": self.part["world_size"]}
        pieces, _ = sampler.pieces(self.next, range(first, first + rows), count=count, **ranks)
        pieces = pieces[pieces[:, 0] != NO_SHARD]
        self.add(count, step_bytes)
        samples, self._samples = self._samples, False
        return Turn(pieces[:, :2], pieces[:, 2], self.next, samples)

    def _next(self, steps: range, share_bytes: int) -> tuple[range, int, int]:
        """Return which requests are quiet, and the number and the cost of the steps to prefetch next."""
        rows, count = self.next_steps(_TURN_WINDOWS)
        if not rows:
            return range(steps.start, self.next), 0, 0
        # A window may begin anywhere in a page.
        tokens = self.bound.sampler.seq_len(self.next) + 1
        step_bytes = rows * (tokens * self.bound.token_bytes + mmap.PAGESIZE)
        if step_bytes > share_bytes:
            return range(steps.start, max(self.next, steps.start + _TOO_LARGE_STEPS)), 0, 0
        room = max(0, share_bytes - self.cost_from(steps.stop)) // step_bytes
        if count := min(count, max(0, steps.stop - self.next) + room):
            return range(0), count, step_bytes
        # Half a share at a time, so that most requests cause no work.
        num_ahead = self.next - steps.stop
        return range(steps.start - num_ahead, steps.start + num_ahead // 2), 0, 0

    def note_warm(self) -> None:
        """Note that the windows are resident: no request matters until a gather waits for the disk."""
        self._is_warm, self.quiet = True, _ALL
