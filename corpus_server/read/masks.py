"""Loss masks of the rows of a plan: gathered as their tokens are, from the masks beside the shards.

A shard without a mask counts as all ones. Which ones does not matter, so every window and every piece of such
a shard is read from the beginning of one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.formats.masks import MASK_DTYPE
from corpus_server.plan.rows import NO_SHARD
from corpus_server.plan.stage import MAX_SEQ_LEN
from corpus_server.read.gather import Gatherer, Selection

if TYPE_CHECKING:
    from corpus_server.corpus.shards import Shard


class _Ones:
    """Stands for the mask of each shard that has none; it is also its own file."""

    is_local: Final = True
    dtype: Final = MASK_DTYPE
    num_tokens: Final = MAX_SEQ_LEN + 1  # of the longest window
    data_bytes: Final = num_tokens

    def __init__(self) -> None:
        self.file = self
        self.tokens = np.ones(self.num_tokens, dtype=self.dtype)
        self.tokens.flags.writeable = False
        self.address = self.tokens.ctypes.data

    def check_unchanged(self) -> None:
        """Do nothing: no file holds it."""

    def is_resident(self, token: int) -> bool:
        """Tell that it is in memory."""
        return True


@cache
def _ones() -> Shard:
    return cast("Shard", _Ones())


class MaskGatherer(Gatherer):
    """Gathers the masks, of `MASK_DTYPE`, of windows and pieces of `shards`, given where their tokens lie."""

    def __init__(self, shards: Sequence[Shard], *, reads_ahead: bool = True) -> None:
        self._is_masked = np.array([shard.mask is not None for shard in shards], dtype=bool)
        super().__init__([shard.mask or _ones() for shard in shards], reads_ahead=reads_ahead)

    def select(self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]) -> Selection:
        """See `Gatherer.select`."""
        return super().select(self.places_of(locations), length, dtype)

    def read_ahead(self, locations: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> None:
        """See `Gatherer.read_ahead`; the shards that have no mask are left out."""
        has = self._is_masked[locations[:, 0]]
        super().read_ahead(locations[has], lengths if isinstance(lengths, int) else lengths[has])

    def places_of(self, locations: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the masks of windows or pieces lie, `(k, ...)`: in shards without a mask at 0.

        The end of a row that no piece fills (`NO_SHARD`) becomes zeros.
        """
        moved, shard_numbers = locations.copy(), locations[:, 0]
        moved[:, 1] *= self._is_masked[shard_numbers] & (shard_numbers != NO_SHARD)
        return moved
