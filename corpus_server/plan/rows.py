"""What a row of a plan consists of: a window, or pieces of several documents laid end to end.

Rows are numbered through all sources of a plan, so that a number says its source. An order permutes the rows
of each source by numbers alone, see `orders/order.py`; here are the tokens that a number stands for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter

UInt64Array = NDArray[np.uint64]
Pieces = tuple[NDArray[np.int64], NDArray[np.int64]]
"""`(p, 3) int64`: shard number, start token, tokens; and `(k + 1,) int64`: the first piece of each of k rows,
then their number."""


class Rows(ABC):
    """The rows of a plan's sources.

    Attributes:
        is_window: whether each row is one piece, so that a shard and a start token say where it lies.
        num_rows: `(sources,) uint64`, over which the order permutes.
        epoch_rows: `(sources,) uint64`, rows of one pass over a source, by which epochs are counted.
        first_row: `(sources + 1,) uint64`, number of each source's first row; then of all rows.
    """

    is_window: bool
    num_rows: UInt64Array
    epoch_rows: UInt64Array
    first_row: UInt64Array

    @abstractmethod
    def pieces(self, sources: NDArray[np.intp] | int, rows: UInt64Array, epochs: UInt64Array) -> Pieces:
        """Return what rows consist of, in these epochs of their sources: `(k,)` each."""

    @abstractmethod
    def touching(
        self, source: int, start: int, stop: int, *, most: int
    ) -> Generator[None, None, UInt64Array]:
        """Return the rows, ascending, that hold a token of [start, stop) of a source; in slices of work.

        Raises:
            InvalidParameter: they are more than `most`.
        """

    @abstractmethod
    def extents(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where rows [start, stop), at least one, lie: shard number, tokens [start, stop) in it."""


def check_number(number: int, most: int, stop: int) -> None:
    """Refuse a look-up that goes through too many rows.

    Raises:
        InvalidParameter: naming both numbers.
    """
    if number > most:
        raise InvalidParameter(
            f"the range touches {number} rows, and a look-up goes through at most {most}; ask for fewer "
            "tokens",
            parameter="stop",
            received=stop,
        )
