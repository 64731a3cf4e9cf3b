"""Arrays that a response holds beside the tokens of its rows, where `with` asks for them.

They are readings, too, and each begins at a multiple of 8 bytes of the body. With `with=sources`, two steps
of three rows of five tokens are:

    bytes  0 to 60     tokens     (2, 3, 5) uint16
           60 to 64    zeros
           64 to 76    sources    (2, 3) uint16
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.read.reading import Reading, WindowReading

ROWS: Final = "rows"
"""Name of the rows' numbers, which a JSON response has without being asked where a plan balances ranks."""


class _OfRows:
    """A number of each row, `(count, rows)`; no file is read for it."""

    unit_tokens = 1
    dtype: np.dtype[np.integer]

    def __init__(self, rows: WindowReading) -> None:
        self._rows = rows
        self.shape: tuple[int, ...] = rows.shape[:2]
        self.num_units = rows.num_units


class RowSources(_OfRows):
    """The source of each row, `(count, rows) uint16`: its number among `Plan.sources`."""

    dtype = np.dtype(np.uint16)

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return the sources of rows from `first` on: at most those that are located together."""
        selection, part = self._rows.selected(first, num_units)
        sources: NDArray[np.uint16] = self._rows.bound.source_of_shard[selection.first_shards(part)]
        return sources


class BatchRowNumbers(_OfRows):
    """The number of each row in its global batch, `(count, rows) uint32`."""

    dtype = np.dtype(np.uint32)

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return the numbers of rows from `first` on: at most those that are located together."""
        return self._rows.row_numbers(first, num_units).astype(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """An array that a request may name; `reads_files` as opposed to arithmetic alone."""

    make: Callable[[WindowReading], Reading]
    reads_files: bool


BESIDE: Final[Mapping[str, Beside]] = {
    "sources": Beside(make=RowSources, reads_files=False),
    "loss_mask": Beside(make=WindowReading.masks, reads_files=True),
    ROWS: Beside(make=BatchRowNumbers, reads_files=False),
}
"""By the names in `with`."""
