"""Loss masks of the rows of a plan: gathered as their tokens are, from the masks beside the shards.

Masks of 0 and 1 become numbers of the same type where others hold weights, as tokens of two types do.

A shard without a mask counts as all ones. Which ones does not matter, so every window and every piece of such
a shard is read from the beginning of one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.formats.masks import MASK_DTYPE
from corpus_server.corpus.shards import Shard
from corpus_server.pieces import Pieces
from corpus_server.plan.stage import MAX_SEQ_LEN
from corpus_server.read.gather import Gatherer, Selection
from corpus_server.stores import Extents


class _Ones:
    """Stands for the mask of each shard that has none; it is also its own file."""

    data_offset: Final = 0
    dtype: Final[np.dtype[np.integer]] = MASK_DTYPE
    num_tokens: Final = MAX_SEQ_LEN + 1  # of the longest window

    def __init__(self) -> None:
        self.file = self
        self._ones = np.ones(self.num_tokens, dtype=self.dtype)
        self.address: int = self._ones.ctypes.data

    def check_unchanged(self) -> None:
        """Do nothing: no file holds it."""

    def is_resident(self, token: int) -> bool:
        """Tell that it is in memory."""
        return True


_ONES: Final = cache(_Ones)


class MaskGatherer(Gatherer):
    """Gathers the masks of windows and pieces of `shards`, given where their tokens lie."""

    def __init__(self, shards: Sequence[Shard], *, reads_ahead: bool = True) -> None:
        self._is_masked = np.array([shard.mask is not None for shard in shards], dtype=bool)
        super().__init__([shard.mask or _ONES() for shard in shards], reads_ahead=reads_ahead)

    def end_token(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Gatherer.end_token`: the end of a row that no piece fills is no target."""
        return np.zeros_like(tokens)

    def read_ahead(self, locations: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> None:
        """See `Gatherer.read_ahead`; the shards that have no mask are left out."""
        has = self._is_masked[locations[:, 0]]
        super().read_ahead(locations[has], lengths if isinstance(lengths, int) else lengths[has])

    def select(self, rows: Pieces, dtype: np.dtype[np.integer], extents: Extents | None = None) -> Selection:
        """See `Gatherer.select`."""
        places = rows.places.copy()
        places[:, 1] *= self._is_masked[places[:, 0]]  # without a mask all are read from the first one on
        return super().select(Pieces(places, rows.borders), dtype, extents)
