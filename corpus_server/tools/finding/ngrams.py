"""The n-grams of some texts, in a table that tells where a run of tokens holds one of them.

Not every token of a corpus is hashed. Every n-gram holds a shorter one of `k` tokens at a place that is a
multiple of `n - k + 1`: the *seed*. Seeds alone are hashed, and looked up in a filter of bits:

    n = 5, k = 3      tokens   . . . . . . . . . . . .
                      seeds    [0    ]     [6    ]          every third token begins one
                                     [3    ]     [9    ]
                      n-gram         . [4        ]          begins at 4, and holds the seed at 6

Where the filter has a seed, the n-grams around it are hashed, looked up in the sorted table, and compared
token by token with the one that the table means. So none is missed, and none is reported that is not there.
The first bits of a hash say which few entries of the table to search:

    buckets    [0 | 3 | 3 | 5 | ...]       hashes that begin with 0 are entries 0 to 2, with 1 none

Hashes are multilinear: the sum of each token times an odd number of 64 bits (Lemire and Kaser, "Strongly
universal string hashing is fast", 2014). They do not roll, so seeds cost nothing where none begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter
from corpus_server.pieces import Int64Array, UInt64Array

Columns = dict[str, NDArray[Any]]

MAX_N: Final = 256
MAX_TOKENS: Final = 1 << 26
"""Tokens of all items: the table takes 19 to 26 bytes for each, in files that are mapped."""
AT_ONCE: Final = 1 << 18
"""Places, or n-grams, of the items that are worked on together: 2 MiB of each array beside the table."""

_MAX_SEED_TOKENS: Final = 12  # more tell hardly more seeds apart, and cost
_MAX_SEED_BYTES: Final = 24  # of text: 12 bytes are two words, which stand everywhere
_BITS_PER_SEED: Final = 16  # of the filter: 1 in 16 other seeds passes one probe, 1 in 4,096 all three
_PROBES: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_COLUMNS: Final = ("tokens", "keys", "buckets", "borders", "places", "filter", "odd", "size")
_ATTEMPTS: Final = 8
_PART_BITS: Final = 8  # n-grams are sorted in parts, by the first bits of their hashes
_BUCKET_BITS: Final = 2  # fewer than the table has: 2 to 4 hashes a bucket, mostly in one cache line


def seed_tokens(n: int, dtype: np.dtype[Any]) -> int:
    """Return how many tokens a seed has: more tell it better from others, but seeds must be closer then."""
    return min(n, n // 2 + 2, _MAX_SEED_BYTES if dtype == np.uint8 else _MAX_SEED_TOKENS)


class NGrams:
    """All n-grams of some texts, in files of a folder that processes map.

    Attributes:
        n: tokens of each.
        tokens: `(t,)`: the texts one after another.
        keys: `(g,) uint64`: hashes of the distinct n-grams, ascending.
        buckets: `(2^b + 1,) uint32`: of each value of the first b bits, the first key that is not below it.
        borders, places: `(g + 1,)` and `(p,) uint32`: n-gram k begins at `places[borders[k]:borders[k + 1]]`,
            ascending.
    """

    def __init__(self, n: int, columns: Columns) -> None:
        self.n, num_grams = n, int(columns["size"][0])
        self.tokens: NDArray[np.unsignedinteger[Any]] = columns["tokens"]
        self.keys: UInt64Array = columns["keys"][:num_grams]
        self.buckets: NDArray[np.uint32] = columns["buckets"]
        self.borders: NDArray[np.uint32] = columns["borders"][: num_grams + 1]
        self.places: NDArray[np.uint32] = columns["places"]
        self._filter, self._odd = columns["filter"], columns["odd"]
        self._seed_tokens = seed_tokens(n, self.tokens.dtype)
        self._stride = n - self._seed_tokens + 1
        self._shift = np.uint64(64 - (self._filter.size * 8).bit_length() + 1)

    @classmethod
    def make(
        cls, folder: Path, tokens: NDArray[np.unsignedinteger[Any]], text_ends: Int64Array, n: int
    ) -> Self:
        """Write the table of texts, which end at `text_ends` of `tokens`, to a folder, and map it.

        Raises:
            InvalidParameter: n, or the number of tokens, is too large.
        """
        if not 1 <= n <= MAX_N:
            raise InvalidParameter.expected("n", f"in [1, {MAX_N}]", n)
        if tokens.size > MAX_TOKENS:
            raise InvalidParameter(
                f"the items have {tokens.size:,} tokens, one pass takes {MAX_TOKENS:,}",
                parameter="items",
                received=tokens.size,
                accepted=f"at most {MAX_TOKENS} tokens",
                remedy="name fewer items, and look for the others in another pass",
            )
        for attempt in range(_ATTEMPTS):
            odd = np.random.default_rng(attempt).integers(0, 2**63, MAX_N).astype(np.uint64) * 2 + 1
            if _write_grams(folder, tokens, text_ends, n, odd):
                break
        else:  # pragma: no cover - two of 2^26 n-grams collide once in 8,000 attempts
            raise InvalidParameter("two n-grams of the items have the same hash", parameter="items")
        _write_filter(folder, tokens, text_ends, n, odd)
        np.save(folder / "odd.npy", odd)
        np.save(folder / "tokens.npy", tokens)
        return cls.load(folder, n)

    @classmethod
    def load(cls, folder: Path, n: int) -> Self:
        """Map a table that was written; processes share its memory."""
        return cls(n, {each: np.asarray(np.load(_file(folder, each), mmap_mode="r")) for each in _COLUMNS})

    def first(self, grams: Int64Array) -> Int64Array:
        """Return where some n-grams begin first in the texts."""
        found: Int64Array = self.places[self.borders[grams]].astype(np.int64)
        return found

    def num_places(self, grams: Int64Array) -> Int64Array:
        """Return at how many places of the texts some n-grams begin."""
        found: Int64Array = self.borders[grams + 1].astype(np.int64) - self.borders[grams]
        return found

    def parts(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield the places of all n-grams, and which begins at each: a bounded number at a time."""
        for first in range(0, self.places.size, AT_ONCE):
            stop = min(first + AT_ONCE, self.places.size)
            low = int(self.borders.searchsorted(first, side="right")) - 1
            high = int(self.borders.searchsorted(stop, side="left"))
            ends = self.borders[low + 1 : high + 1].astype(np.int64).clip(max=stop)
            grams = np.repeat(np.arange(low, high), np.diff(ends, prepend=first))
            yield self.places[first:stop].astype(np.int64), grams

    def find(self, tokens: NDArray[np.integer]) -> tuple[Int64Array, Int64Array]:
        """Return where n-grams of the table begin in some tokens, ascending, and which: `(m,)` each."""
        num_starts = tokens.size - self.n + 1
        if num_starts <= 0 or not self.keys.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        seeds = self._seeds(tokens)
        # The n-grams that hold a seed begin at it, or before it by less than the stride.
        starts = (seeds[:, None] - np.arange(self._stride - 1, -1, -1)).reshape(-1)
        starts = starts[(starts >= 0) & (starts < num_starts)]
        wanted = np.zeros(starts.size, dtype=np.uint64)
        for offset in range(self.n):
            wanted += tokens[starts + offset].astype(np.uint64) * self._odd[offset]
        found, grams = self._entries(wanted)
        starts = starts[found]
        kept = np.ones(starts.size, dtype=bool)
        first = self.first(grams)
        for offset in range(self.n):
            kept &= tokens[starts + offset].astype(np.int64) == self.tokens[first + offset]
        return starts[kept], grams[kept]

    def _entries(self, wanted: UInt64Array) -> tuple[Int64Array, Int64Array]:
        """Return which of some hashes the table has, and where: `(m,)` each.

        A binary search of the whole table costs five times as much: it waits for memory at each step.
        """
        bucket = (wanted >> _bucket_shift(self.buckets.size)).view(np.int64)
        low = self.buckets[bucket].astype(np.int64)
        high = self.buckets[bucket + 1].astype(np.int64)
        stop = high.copy()
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            is_below = self.keys[middle] < wanted[open_]
            low[open_[is_below]] = middle[is_below] + 1
            high[open_[~is_below]] = middle[~is_below]
        found = np.flatnonzero(low < stop)
        found = found[self.keys[low[found]] == wanted[found]]
        return found, low[found]

    def _seeds(self, tokens: NDArray[np.integer]) -> Int64Array:
        """Return where seeds begin that the filter has."""
        hashes = _hashed(tokens, self._seed_tokens, self._odd, self._stride)
        found = np.arange(hashes.size)
        for probe in _PROBES:
            byte, bit = _bit(hashes, probe, self._shift)
            passed = np.flatnonzero(np.right_shift(self._filter.take(byte), bit) & np.uint8(1))
            found, hashes = found[passed], hashes[passed]
        return found * self._stride


class _Block(NamedTuple):
    """Consecutive tokens of the texts, from `first` on.

    Attributes:
        left: `(b,)`: tokens from each to the end of its text, itself included.
        length: `(b,)`: of its text.
        tokens: they, and as many behind them as an n-gram needs.
    """

    first: int
    left: Int64Array
    length: Int64Array
    tokens: NDArray[np.unsignedinteger[Any]]

    def hashed(self, length: int, odd: UInt64Array, where: NDArray[np.bool_]) -> UInt64Array:
        """Return hashes of the n-grams that begin where it says, which is only where texts hold them."""
        hashes = _hashed(self.tokens[: self.left.size + length - 1], length, odd)
        return hashes[where[: hashes.size]]


def _blocks(tokens: NDArray[np.unsignedinteger[Any]], text_ends: Int64Array, n: int) -> Iterator[_Block]:
    lengths = np.diff(text_ends, prepend=0)
    for first in range(0, tokens.size, AT_ONCE):
        stop = min(first + AT_ONCE, tokens.size)
        low = int(text_ends.searchsorted(first, side="right"))
        high = int(text_ends.searchsorted(stop, side="left")) + 1
        counts = np.diff(text_ends[low:high].clip(max=stop), prepend=first)
        left = np.repeat(text_ends[low:high], counts) - np.arange(first, stop)
        yield _Block(first, left, np.repeat(lengths[low:high], counts), tokens[first : stop + n - 1])


def _write_grams(
    folder: Path, tokens: NDArray[np.unsignedinteger[Any]], text_ends: Int64Array, n: int, odd: UInt64Array
) -> bool:
    """Write keys, borders and places; tell whether no two n-grams have one hash.

    The n-grams are dealt to parts by the first bits of their hashes, and each part is sorted, so that what
    sorting needs beside the table is small.
    """
    shift = np.uint64(64 - _PART_BITS)
    counts = np.zeros(1 << _PART_BITS, np.int64)
    for block in _blocks(tokens, text_ends, n):
        hashes = block.hashed(n, odd, block.left >= n)
        counts += np.bincount((hashes >> shift).view(np.int64), minlength=counts.size)
    total = int(counts.sum())
    keys = _column(folder, "keys", total, np.uint64)
    places = _column(folder, "places", total, np.uint32)
    next_ = counts.cumsum() - counts
    for block in _blocks(tokens, text_ends, n):
        is_start = block.left >= n
        hashes = block.hashed(n, odd, is_start)
        parts = (hashes >> shift).astype(np.uint8)
        order = np.argsort(parts, kind="stable")
        sizes = np.bincount(parts, minlength=counts.size)
        to = np.arange(order.size) + np.repeat(next_ - (sizes.cumsum() - sizes), sizes)
        keys[to] = hashes[order]
        places[to] = (np.flatnonzero(is_start) + block.first)[order]
        next_ += sizes
    borders = _column(folder, "borders", total + 1, np.uint32)
    num_grams = 0
    for stop, size in zip(counts.cumsum().tolist(), counts.tolist(), strict=True):
        first = stop - size
        hashes = keys[first:stop]
        if size and not (hashes == hashes[0]).all():  # one n-gram may be everywhere
            order = np.argsort(hashes, kind="stable")
            hashes, places[first:stop] = hashes[order], places[first:stop][order]
        begins = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]) != 0)
        if not _are_told_apart(tokens, places[first:stop], begins, n):
            return False
        # Never beyond `stop`: what is not sorted yet stays.
        keys[num_grams : num_grams + begins.size] = hashes[begins]
        borders[num_grams : num_grams + begins.size] = begins + first
        num_grams += begins.size
    borders[num_grams] = total
    np.save(_file(folder, "size"), np.array([num_grams]))
    _write_buckets(folder, keys[:num_grams])
    return True


def _write_buckets(folder: Path, keys: UInt64Array) -> None:
    number = 1 << max(1, keys.size.bit_length() - _BUCKET_BITS)
    buckets = _column(folder, "buckets", number + 1, np.uint32)
    for first in range(0, number, AT_ONCE):
        begins = np.arange(first, min(first + AT_ONCE, number), dtype=np.uint64)
        buckets[first : first + begins.size] = keys.searchsorted(begins << _bucket_shift(buckets.size))
    buckets[number] = keys.size


def _bucket_shift(size: int) -> np.uint64:
    """Return by how many bits a hash is shifted to be the number of its bucket."""
    return np.uint64(65 - size.bit_length())


def _are_told_apart(
    tokens: NDArray[np.unsignedinteger[Any]], places: NDArray[np.uint32], begins: Int64Array, n: int
) -> bool:
    """Tell whether all n-grams of one hash are the same: each is that before it, but at `begins`."""
    is_same = np.ones(places.size, dtype=bool)
    is_same[begins] = False
    for first in range(1, places.size, AT_ONCE):
        its = np.flatnonzero(is_same[first : first + AT_ONCE]) + first
        one, other = places[its - 1].astype(np.int64), places[its].astype(np.int64)
        if any(not np.array_equal(tokens[one + each], tokens[other + each]) for each in range(n)):
            return False
    return True


def _write_filter(
    folder: Path, tokens: NDArray[np.unsignedinteger[Any]], text_ends: Int64Array, n: int, odd: UInt64Array
) -> None:
    """Write which seeds there are. Of a text that is shorter than n they would only cost."""
    length, lengths = seed_tokens(n, tokens.dtype), np.diff(text_ends, prepend=0)
    num_seeds = int((lengths[lengths >= n] - length + 1).sum())
    bits = max(16, (num_seeds * _BITS_PER_SEED - 1).bit_length())
    marked = _column(folder, "filter", 1 << (bits - 3), np.uint8)
    for block in _blocks(tokens, text_ends, n):
        seeds = block.hashed(length, odd, (block.left >= length) & (block.length >= n))
        for probe in _PROBES:
            byte, bit = _bit(seeds, probe, np.uint64(64 - bits))
            np.bitwise_or.at(marked, byte, np.left_shift(np.uint8(1), bit))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _column(folder: Path, name: str, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return a file of a folder as an array of zeros; raises OSError if there is no room for it."""
    path = _file(folder, name)
    made: NDArray[Any] = open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    with path.open("r+b") as file:  # a page that finds no room when it is written ends the process
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return made


def _hashed(tokens: NDArray[np.integer], n: int, odd: UInt64Array, stride: int = 1) -> UInt64Array:
    """Return hashes of the n-grams that begin at every `stride`-th token."""
    number = max(0, (tokens.size - n) // stride + 1)
    column = np.empty(number, dtype=np.uint64)
    hashes = np.zeros(number, dtype=np.uint64)
    for offset in range(n if number else 0):
        column[:] = tokens[offset : offset + (number - 1) * stride + 1 : stride]
        np.multiply(column, odd[offset], out=column)
        np.add(hashes, column, out=hashes)
    return hashes


def _bit(hashes: UInt64Array, probe: int, shift: np.uint64) -> tuple[Int64Array, NDArray[np.uint8]]:
    """Return which bit of the filter a hash has: its byte, and the bit in it."""
    mixed = hashes * np.uint64(probe)
    mixed >>= shift
    bit = mixed.astype(np.uint8)
    bit &= np.uint8(7)
    mixed >>= np.uint64(3)
    return mixed.view(np.int64), bit
