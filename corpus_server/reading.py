"""What a token answer is made of, readable piece by piece into any buffer.

A reading is a sequence of units of equal size (rows of a batch, tokens of a range). It is decided
in full before a byte is read, so its size can be checked first, and any part of it can be read
again: large answers are hashed in one pass and sent in another, through one small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus import Corpus
from corpus_server.gather import Gatherer

ByteArray = NDArray[np.uint8]


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

    def fill(self, first: int, tokens: NDArray[np.integer]) -> None:
        """Read units from `first` on into `(num_units * unit_tokens,)`; blocks, and may raise."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Rows of batches.

    Args:
        gatherer: over the shards that locations number.
        locate: computes `(count, rows, 2) int64`: shard number, start token; called once, when the
            first row is read, in the thread that reads.
        count, rows, length: steps, rows of a step, tokens of a window.
        dtype: type of the answer.
    """

    gatherer: Gatherer
    locate: Callable[[], NDArray[np.int64]]
    count: int
    rows: int
    length: int
    dtype: np.dtype[np.integer]

    @cached_property
    def locations(self) -> NDArray[np.int64]:
        """Where the rows lie: `(count, rows, 2) int64`."""
        return self.locate()

    @property
    def shape(self) -> tuple[int, ...]:
        """`(count, rows, length)`."""
        return (self.count, self.rows, self.length)

    @property
    def num_units(self) -> int:
        """Rows of all steps."""
        return self.count * self.rows

    @property
    def unit_tokens(self) -> int:
        """Tokens of a row."""
        return self.length

    def fill(self, first: int, tokens: NDArray[np.integer]) -> None:
        """Gather rows from `first` on."""
        out = tokens.reshape(-1, self.length)
        self.gatherer.gather(self.locations.reshape(-1, 2)[first : first + len(out)], out)


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

    def fill(self, first: int, tokens: NDArray[np.integer]) -> None:
        """Copy tokens from `first` on."""
        filled = 0
        for shard, start, stop in self.corpus.locate_range(self.start + first, len(tokens)):
            part = tokens[filled : filled + stop - start].reshape(1, -1)
            self.gatherer.gather(np.array([[shard, start]], dtype=np.int64), part)
            filled += stop - start


def num_bytes(reading: Reading) -> int:
    """Return the bytes of the whole array."""
    return reading.num_units * reading.unit_tokens * reading.dtype.itemsize


def read_all(reading: Reading) -> NDArray[np.integer]:
    """Return the whole array in fresh memory."""
    tokens = np.empty(reading.num_units * reading.unit_tokens, dtype=reading.dtype)
    reading.fill(0, tokens)
    return tokens.reshape(reading.shape)


def pieces(reading: Reading, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first unit, number of units) of the pieces that fit a buffer."""
    units = max(1, buffer_bytes // (reading.unit_tokens * reading.dtype.itemsize))
    for first in range(0, reading.num_units, units):
        yield first, min(units, reading.num_units - first)


def read_piece(reading: Reading, piece: tuple[int, int], buffer: ByteArray) -> memoryview:
    """Read one piece to the front of a buffer and return its bytes, little-endian, as a view."""
    first, num_units = piece
    size = num_units * reading.unit_tokens * reading.dtype.itemsize
    reading.fill(first, buffer[:size].view(reading.dtype))
    return buffer.data[:size]


def checksum(reading: Reading, buffer: ByteArray, prefix: bytes = b"") -> xxhash.xxh3_64:
    """Hash a prefix and the whole array through a buffer, which holds the last piece afterwards."""
    digest = xxhash.xxh3_64(prefix)
    for piece in pieces(reading, buffer.nbytes):
        digest.update(read_piece(reading, piece, buffer))
    return digest
