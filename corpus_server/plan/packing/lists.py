"""Ascending lists of numbers in two bytes a number, searched all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array

NarrowArray = NDArray[np.uint32 | np.int64]

_MOST_PARTS: Final = 16
"""Of a list: above that, its splits would take more memory than the bytes that they save."""


class Lists(NamedTuple):
    """Lists of ascending numbers, each below a common bound.

    A number is kept in its low 16 bits. The splits of its list say where the other bits change. Where the
    bound is above 2^20, all 32 bits are kept, and there are no splits.

    Attributes:
        low: `(n,) uint16` or `uint32`, list after list.
        first: `(lists + 1,)`, where each list begins in `low`; then n.
        splits: `(lists, parts - 1) uint16` or `uint32`, how many numbers of each list are below 2^16,
            2 * 2^16 ...
    """

    low: NDArray[np.uint16 | np.uint32]
    first: NarrowArray
    splits: NDArray[np.uint16 | np.uint32]

    @classmethod
    def of(cls, numbers: NarrowArray, owners: NarrowArray, num_lists: int, bound: int) -> Lists:
        """Return lists of numbers.

        Args:
            numbers: `(n,)`, each below `bound`.
            owners: `(n,)`, the list of each; `num_lists` for numbers that are left out.
        """
        parts = -(-bound // (1 << 16))
        is_short = parts <= _MOST_PARTS
        # One sort of plain numbers takes a third of the time of an argsort with what follows from it.
        bits = max(bound.bit_length(), 16)
        of_keys: Any = np.uint32 if (num_lists + 1) << bits <= 1 << 32 else np.uint64
        keys = owners.astype(of_keys, copy=False) << bits
        keys |= numbers.astype(of_keys, copy=False)
        keys.sort()
        begins = np.arange(num_lists + 1, dtype=of_keys)[:, None] << bits
        borders = (np.arange(max(parts, 1) if is_short else 1) << 16).astype(of_keys)
        places = keys.searchsorted(begins + borders)
        first = places[:, 0]
        low: Any = keys[: first[-1]]
        low = low.astype(np.uint16) if is_short else (low & ((1 << bits) - 1)).astype(np.uint32)
        splits = places[:-1, 1:] - places[:-1, :1]
        of_splits: Any = np.uint16 if splits.max(initial=0) < 1 << 16 else np.uint32
        return cls(low, narrow(first), splits.astype(of_splits))

    @classmethod
    def join(cls, parts: Sequence[Lists]) -> Lists:
        """Return the lists of several, one after the other; all have the same bound."""
        low: NDArray[np.uint16 | np.uint32] = np.concatenate([each.low for each in parts])
        splits: NDArray[np.uint16 | np.uint32] = np.concatenate([each.splits for each in parts])
        return cls(low, firsts(*(np.diff(each.first) for each in parts)), splits)

    def at(self, lists: Int64Array, places: Int64Array) -> Int64Array:
        """Return the numbers at places of lists: `(k,)`."""
        found: Int64Array = self.low[self.first[lists] + places].astype(np.int64)
        if self.splits.shape[1]:
            # A split a row: sums of a few numbers each, `splits[lists]`, take five times as long.
            parts = (self.splits.T.take(lists, axis=1) <= places).sum(axis=0, dtype=np.uint8)
            found += parts.astype(np.int64) << 16
        return found

    def places(self, lists: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return how many numbers of its list are below each number: `(k,)`."""
        sizes = self.sizes(lists)
        return bisect(lambda places, k: self.at(lists[k], places) < numbers[k], np.zeros_like(sizes), sizes)

    def sizes(self, lists: Int64Array) -> Int64Array:
        """Return how many numbers each list has: `(k,)`."""
        sizes: Int64Array = (self.first[lists + 1] - self.first[lists]).astype(np.int64)
        return sizes


def narrow(numbers: Int64Array) -> NarrowArray:
    """Return the numbers in 32 bits where they fit."""
    return numbers.astype(np.uint32) if numbers.max(initial=0) < 1 << 32 else numbers


def firsts(*counts: NDArray[np.integer]) -> NarrowArray:
    """Return the sums before each count, and of all: `(n + 1,)`."""
    return narrow(np.concatenate([np.zeros(1, np.int64), *counts]).cumsum())


def bisect(
    is_below: Callable[[Int64Array, NDArray[np.intp]], NDArray[np.bool_]], low: Int64Array, high: Int64Array
) -> Int64Array:
    """Return for each k the first place of [low[k], high[k]) that is not below what is sought, or `high[k]`.

    Args:
        is_below: whether `(m,)` places of the searches `(m,)` are; true places come before false ones.
    """
    low, high = low.copy(), high.copy()
    open_ = np.flatnonzero(low < high)
    while open_.size:
        middle = (low[open_] + high[open_]) >> 1
        below = is_below(middle, open_)
        low[open_[below]] = middle[below] + 1
        high[open_[~below]] = middle[~below]
        open_ = open_[low[open_] < high[open_]]
    return low
