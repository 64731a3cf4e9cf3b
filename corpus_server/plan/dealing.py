"""Rows of a step dealt to ranks, so that attention within documents costs each rank about the same.

Attention within a document of t tokens costs about t * t, so a row of many short documents is cheap and one
long document is dear. Each rank gets the same number of rows. Six rows for three ranks:

    row       0   1   2   3   4   5        dearest first     3   0   4   1   5   2
    cost     81  50  25  98  58  41        goes to rank      0   1   2   2   1   0
                                           rows of ranks     2, 3  |  0, 5  |  1, 4
                                           sums              123   |  122   |  108
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import numpy as np

from corpus_server.pieces import Int64Array
from corpus_server.plan.numbers import BatchRows

MAX_DEALT_ROWS: Final = 2**16
"""Rows of a global batch that may be dealt: 1 us each, on the machines of 2020."""

_KEPT_ROWS: Final = 2**17
"""Rows of the steps that a plan keeps dealt: 1 MiB. Ranks and prefetching ask for the same steps."""


def deal(costs: Int64Array, num_ranks: int) -> BatchRows:
    """Return the rows of all ranks, one rank after another, each rank's ascending: `(rows,) uint64`.

    The dearest row comes first, and goes to the rank with the smallest sum of those that have room. In a tie
    the row, or the rank, with the lower number comes first.

    Args:
        costs: `(rows,)`, of which `num_ranks` is a divisor.
    """
    rows = np.argsort(-costs, kind="stable")
    room = [len(costs) // num_ranks] * num_ranks
    ranks = []
    sums = list(range(num_ranks))  # a heap of sum * num_ranks + rank: half the time of pairs
    for cost in costs[rows].tolist():
        rank = sums[0] % num_ranks
        ranks.append(rank)
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(sums, sums[0] + cost * num_ranks)
        else:
            heapq.heappop(sums)
    rank_of = np.empty(len(costs), dtype=np.int64)
    rank_of[rows] = ranks
    return np.argsort(rank_of, kind="stable").astype(np.uint64)


class DealtSteps:
    """The steps of a plan that were dealt last; safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], BatchRows] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, step: int, num_ranks: int, costs: Callable[[], Int64Array]) -> BatchRows:
        """Return the rows of a step's ranks, see `deal`; `costs` is called if they are not kept."""
        with self._lock:
            found = self._kept.get((step, num_ranks))
            if found is not None:
                self._kept.move_to_end((step, num_ranks))
                return found
        found = deal(costs(), num_ranks)
        with self._lock:
            self._kept[step, num_ranks] = found
            while len(self._kept) > max(1, _KEPT_ROWS // found.size):
                self._kept.popitem(last=False)
        return found
