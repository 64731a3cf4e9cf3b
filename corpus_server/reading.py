"""What a token answer is made of, readable piece by piece.

A reading is a sequence of units of equal size (rows of a batch, tokens of a range). It is decided
in full before a byte is read, so its size can be checked first, and any part of it can be read
again: large answers are hashed in one pass and sent in another, a small piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus import Corpus
from corpus_server.gather import Gatherer, Selection

MAX_LOCATED_ROWS = 4096
"""Of an answer, at a time: they take 9 to 12 bytes each while they are read. NumPy's calls cost much the same
for any number; with 1,024 an answer of 64 x 1,025 took a fifth longer than with 4,096."""


class Reading(Protocol):
    """Tokens that can be read in pieces."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """Type of a token."""

    @property
    def num_units(self) -> int:
        """Units in the whole array."""

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return the tokens of units from `first` on, in C order; blocks, and may raise."""

    def forget(self) -> None:
        """Drop what can be worked out again: nobody may read on for long."""

    def check_unchanged(self) -> None:
        """Raise if what was read must not be used any more, because a file has changed since."""


class Windows:
    """Rows of batches; for one thread at a time.

    Args:
        gatherer: over the shards that locations number.
        locate: of (first step, number of steps, first row, number of rows) of the answer, computes
            `(steps, rows, 2) int64`: shard number, start token. It is asked when rows are read, by the thread
            that reads, for a few at a time.
        count, rows, length: steps, rows of a step, tokens of a window.
        dtype: type of the answer.
    """

    def __init__(
        self,
        *,
        gatherer: Gatherer,
        locate: Callable[[int, int, int, int], NDArray[np.int64]],
        count: int,
        rows: int,
        length: int,
        dtype: np.dtype[np.integer],
    ) -> None:
        self._gatherer = gatherer
        self._locate = locate
        self.shape = (count, rows, length)
        self.num_units = count * rows
        self.unit_tokens = length
        self.dtype = dtype
        self._group: tuple[range, Selection] | None = None  # rows that were located, those read last
        self._touched: frozenset[int] = frozenset()

    def locations(self) -> NDArray[np.int64]:
        """Return where the rows lie: `(count, rows, 2) int64`."""
        return self._locate(0, self.shape[0], 0, self.shape[1])

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return rows from `first` on: `(num_units, length)`."""
        parts, stop = [], first + num_units
        while first < stop:
            group, selection = self._group_of(first)
            until = min(stop, group.stop)
            parts.append(selection.read(first - group.start, until - first))
            first = until
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def forget(self) -> None:
        """Locate the rows anew that are read next."""
        self._group = None

    def check_unchanged(self) -> None:
        """Raise if a shard that was read from is not what was opened: what was read must not be used."""
        self._gatherer.check_unchanged(self._touched)

    def read_parts(self, number: int) -> list[Part]:
        """Read everything at once, and return it in `number` equal parts, each of whole steps."""
        count, rows, length = self.shape
        steps, rest = divmod(count, number)
        if rest:
            raise ValueError(f"{count} steps cannot be cut into {number} equal parts")
        locations = self.locations().reshape(-1, 2)
        tokens = self._gatherer.gather(locations, length, self.dtype).reshape(number, -1, length)
        shards = locations[:, 0].reshape(number, -1)
        return [
            Part(self._gatherer, self._gatherer.touched(its), part, (steps, rows, length))
            for its, part in zip(shards, tokens, strict=True)
        ]

    def _group_of(self, row: int) -> tuple[range, Selection]:
        """Return the rows that are located together with a row: of whole steps, or of a part of one."""
        if self._group is None or row not in self._group[0]:
            count, rows, length = self.shape
            step, within = divmod(row, rows)
            steps = min(max(1, MAX_LOCATED_ROWS // rows), count - step)
            first = within - within % MAX_LOCATED_ROWS
            number = min(MAX_LOCATED_ROWS, rows - first)
            locations = self._locate(step, steps, first, number).reshape(-1, 2)
            selection = self._gatherer.select(locations, length, self.dtype)
            start = step * rows + first
            self._group = (range(start, start + len(locations)), selection)
            self._touched = self._touched.union(selection.touched)
        return self._group


class Part:
    """Rows that were read already.

    Args:
        gatherer: that read them.
        touched: shards that they come from.
        tokens: `(rows, length)`, C order.
        shape: of the answer, `(steps, rows of a step, length)`.
    """

    def __init__(
        self, gatherer: Gatherer, touched: set[int], tokens: NDArray[np.integer], shape: tuple[int, ...]
    ) -> None:
        self._gatherer = gatherer
        self._touched = touched
        self._tokens = tokens
        self.shape = shape
        self.dtype = tokens.dtype
        self.num_units, self.unit_tokens = tokens.shape

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return rows from `first` on: `(num_units, length)`."""
        return self._tokens[first : first + num_units]

    def forget(self) -> None:
        """Nothing: all of it was read."""

    def check_unchanged(self) -> None:
        """Raise if a shard that was read from is not what was opened."""
        self._gatherer.check_unchanged(self._touched)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRange:
    """Consecutive tokens of a corpus, over the borders of its shards.

    Args:
        corpus, gatherer: of the same corpus.
        start, stop: corpus-wide token numbers, half open.
    """

    corpus: Corpus
    gatherer: Gatherer
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """`(stop - start,)`."""
        return (self.stop - self.start,)

    @property
    def dtype(self) -> np.dtype[np.integer]:
        """The corpus's."""
        return self.corpus.dtype

    @property
    def num_units(self) -> int:
        """Tokens."""
        return self.stop - self.start

    @property
    def unit_tokens(self) -> int:
        """One."""
        return 1

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return tokens from `first` on: `(num_units,)`."""
        parts = [
            self.gatherer.gather(np.array([[shard, start]], dtype=np.int64), stop - start, self.dtype)[0]
            for shard, start, stop in self.corpus.locate_range(self.start + first, num_units)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, self.dtype)])

    def forget(self) -> None:
        """Nothing is kept."""

    def check_unchanged(self) -> None:
        """Raise if a shard of the range is not what was opened."""
        for shard, _, _ in self.corpus.locate_range(self.start, self.stop - self.start):
            self.corpus.shards[shard].check_unchanged()


def num_bytes(reading: Reading) -> int:
    """Return the bytes of the whole array."""
    return reading.num_units * reading.unit_tokens * reading.dtype.itemsize


def read_all(reading: Reading) -> NDArray[np.integer]:
    """Return the whole array."""
    return reading.read(0, reading.num_units).reshape(reading.shape)


def pieces(reading: Reading, piece_bytes: int) -> list[tuple[int, int]]:
    """Return (first unit, number of units) of pieces of about `piece_bytes`, one unit at least."""
    units = max(1, piece_bytes // (reading.unit_tokens * reading.dtype.itemsize))
    starts = range(0, reading.num_units, units)
    return [(first, min(units, reading.num_units - first)) for first in starts]


def read_piece(reading: Reading, piece: tuple[int, int]) -> memoryview:
    """Read one piece; return its bytes, little-endian."""
    return reading.read(*piece).reshape(-1).view(np.uint8).data


def checksum(reading: Reading, piece_bytes: int, prefix: bytes = b"") -> xxhash.xxh3_64:
    """Hash a prefix and the whole array, a piece at a time."""
    digest = xxhash.xxh3_64(prefix)
    for piece in pieces(reading, piece_bytes):
        digest.update(read_piece(reading, piece))
    return digest
