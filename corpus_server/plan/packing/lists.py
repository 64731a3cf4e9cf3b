"""Ascending lists of numbers in two bytes a number, searched all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
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
        splits: `(lists, parts - 1) uint32`, how many numbers of each list are below 2^16, 2 * 2^16 ...
    """

    low: NDArray[np.uint16 | np.uint32]
    first: NarrowArray
    splits: NDArray[np.uint32]

    @classmethod
    def of(cls, numbers: Sequence[Int64Array], sizes: Sequence[Int64Array], bound: int) -> Lists:
        """Return lists made in several steps: the numbers, and the length of each list."""
        parts = -(-bound // (1 << 16))
        is_short = parts <= _MOST_PARTS
        size = np.concatenate([np.zeros(1, np.int64), *sizes])
        splits = np.zeros((len(size) - 1, max(parts, 1) - 1 if is_short else 0), dtype=np.uint32)
        done = 0
        for its_numbers, its_sizes in zip(numbers, sizes, strict=True):
            owners = np.repeat(np.arange(its_sizes.size), its_sizes)
            for part in range(splits.shape[1]):
                below = owners[its_numbers < (part + 1) << 16]
                splits[done : done + its_sizes.size, part] = np.bincount(below, minlength=its_sizes.size)
            done += its_sizes.size
        dtype = np.uint16 if is_short else np.uint32
        low = [each.astype(dtype) for each in numbers]  # without the upper bits
        return cls(np.concatenate([np.zeros(0, dtype), *low]), narrow(size.cumsum()), splits)

    def at(self, lists: Int64Array, places: Int64Array) -> Int64Array:
        """Return the numbers at places of lists: `(k,)`."""
        found: Int64Array = self.low[self.first[lists] + places].astype(np.int64)
        if self.splits.shape[1]:
            found += (self.splits[lists] <= places[:, None]).sum(axis=1) << 16
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
