"""Copy rows that join pieces of several documents, of an order that is a table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.readahead import num_major_faults, read_ahead
from corpus_server.read.timing import OF_THREAD

_SAMPLE_PIECES = 16  # looked up in the page cache before all pieces of a selection are prefetched


class PieceSelection:
    """Rows made of pieces, with the methods of a `Selection`; the shards are local files.

    The pieces are copied one by one. A single fancy index for all of them would need an index of 8 bytes for
    each token, and is slower from 200 tokens a piece on.

    Args:
        pieces: `(p, 3) int64`: shard number, start token, tokens; all rows have the same number of tokens.
        borders: `(k + 1,) int64`: first piece of each row, then their number.
    """

    def __init__(self, bound: BoundPlan, pieces: NDArray[np.int64], borders: NDArray[np.int64]) -> None:
        self._gatherer = bound.gatherer
        self._shards = [shard for _, shard in bound.shards]
        self._dtype = bound.dtype
        self._pieces, self._borders = pieces, borders
        self._asked_ahead = not bound.gatherer.reads_ahead

    def read(self, part: slice) -> NDArray[np.integer]:
        """Return some of the rows, `(k, length)`, C order, owned by the caller; see `Selection.read`."""
        gatherer, pieces = self._gatherer, self._of(part)
        if gatherer.cold and not self._asked_ahead:
            self._ask_ahead(part)
        tokens = np.empty(int(pieces[:, 2].sum()), dtype=self._dtype)
        before, at = num_major_faults(), 0
        for number, start, count in pieces.tolist():
            tokens[at : at + count] = self._shards[number].tokens[start : start + count]
            at += count
        num_faults = num_major_faults() - before
        OF_THREAD.count_read(num_faults)
        if num_faults > 0:
            gatherer.num_faults += num_faults
            gatherer.cold = True
        self.check_unchanged(part)
        return tokens.reshape(len(range(*part.indices(len(self._borders) - 1))), -1)

    def check_unchanged(self, part: slice) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if a shard of these rows is not what was opened."""
        self._gatherer.check_unchanged(self._of(part)[:, 0].astype(np.uint64))

    def _of(self, part: slice) -> NDArray[np.int64]:
        start, stop, _ = part.indices(len(self._borders) - 1)
        return self._pieces[self._borders[start] : self._borders[stop]]

    def _ask_ahead(self, part: slice) -> None:
        """Ask the kernel for all pieces from this part on, unless a sample of them is resident."""
        self._asked_ahead = True
        rest = self._of(slice(part.start, None))
        if self._gatherer.are_resident(rest[:: max(1, len(rest) // _SAMPLE_PIECES), :2]):
            self._gatherer.cold = False
            return
        numbers = rest[:, 0]
        sizes = np.array([shard.dtype.itemsize for shard in self._shards])[numbers]
        origins = np.array([shard.address for shard in self._shards], dtype=np.uint64)[numbers]
        read_ahead(origins + (rest[:, 1] * sizes).astype(np.uint64), rest[:, 2] * sizes)
