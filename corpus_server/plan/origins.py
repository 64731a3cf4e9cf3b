"""Where the tokens of sources lie that are views: virtual sequences over the documents of a corpus.

A plan computes in the tokens of its sources, whatever they are. Only what leaves the arithmetic (pieces of
rows) and what users say in the corpus's own tokens (exclusions, look-ups) is translated.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Pieces
from corpus_server.plan.ranges import Ranges


class Origins(Protocol):
    """Translates between the sources of a plan, of which some are views, and their corpora.

    Attributes:
        num_tokens: of the corpus of each source.
    """

    num_tokens: tuple[int, ...]

    def resolve(self, rows: Pieces) -> Pieces:
        """Return rows of pieces in the corpora's shards for those of pieces in the views'."""

    def ranges(self, source: int, given: Ranges) -> Ranges:
        """Return the tokens of a source that are those of ranges of its corpus, wherever they come."""

    def extents(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which tokens of a corpus's shard hold those of pieces: `(k, 2)`, start, stop.

        Others may lie between them.

        Args:
            pieces: `(k, 3)`: the plan's shard, start, tokens, of which there is one at least.
        """
