"""Sets of integers as sorted half-open ranges: skipped steps, excluded windows.

The integers inside and those outside are numbered from 0 each:

    ranges        [2, 4)  [7, 8)
    integer    0  1  2  3  4  5  6  7  8  9 ...
    inside           0  1           2
    outside    0  1        2  3  4     5  6 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import orjson
from numpy.typing import NDArray

from corpus_server.errors import InvalidPlan
from corpus_server.pieces import UInt64Array

MAX_VALUE = 2**63 - 1


class Ranges:
    """An immutable set of integers in [0, 2^63). Look-ups are vectorised and take O(log ranges) each.

    Overlapping and touching ranges are merged, so that equal sets have equal ranges.

    Args:
        bounds: `(k, 2)` integers: start, stop of each range, `0 <= start <= stop <= 2^63 - 1`.

    Attributes:
        starts, stops: `(r,) uint64`, sorted, each range non-empty, neighbours apart.
        total: integers inside.
    """

    def __init__(self, bounds: NDArray[np.integer] | Sequence[Sequence[int]] = ()) -> None:
        given = np.asarray(bounds, dtype=np.uint64).reshape(-1, 2)
        self.starts, self.stops = _merged(given[:, 0].copy(), given[:, 1].copy())
        # _inside_before[i]: integers in the ranges before range i; one entry more than ranges.
        self._inside_before: UInt64Array = np.cumsum(np.append(np.uint64(0), self.stops - self.starts))
        self._outside_before = self.starts - self._inside_before[:-1]
        self.total = int(self._inside_before[-1])

    def __reduce__(self) -> tuple[type[Ranges], tuple[UInt64Array]]:
        return Ranges, (self.bounds,)  # the other arrays are made of it

    @property
    def bounds(self) -> UInt64Array:
        """`(r, 2) uint64`: start, stop of each range."""
        return np.stack((self.starts, self.stops), axis=1)

    @property
    def num_bytes(self) -> int:
        """Memory of the four arrays."""
        return 4 * self.starts.nbytes

    def __bool__(self) -> bool:
        return self.total > 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and np.array_equal(self.bounds, other.bounds)

    def __hash__(self) -> int:
        return hash(self.bounds.tobytes())

    def to_json(self) -> list[list[int]]:
        """Return `[[start, stop], ...]`."""
        pairs: list[list[int]] = self.bounds.tolist()
        return pairs

    def to_json_text(self) -> str:
        """Return `to_json` as text, `[[1,2],[5,9]]`, without making lists: a million ranges take 20 ms."""
        return orjson.dumps(self.bounds, option=orjson.OPT_SERIALIZE_NUMPY).decode()

    def union(self, other: Ranges) -> Ranges:
        """Return the integers in either."""
        if not self or not other:
            return self or other
        return Ranges(np.concatenate((self.bounds, other.bounds)))

    def within(self, start: int, stop: int) -> Ranges:
        """Return the integers inside that lie in [start, stop)."""
        return Ranges(self.bounds.clip(np.uint64(start), np.uint64(stop)))

    def contains(self, values: UInt64Array) -> NDArray[np.bool_]:
        """Return for each value whether it is inside."""
        if not self:
            return np.zeros(values.shape, dtype=bool)
        before = np.searchsorted(self.starts, values, side="right")
        return (before > 0) & (values < self.stops[before - 1])

    def num_inside_below(self, values: UInt64Array) -> UInt64Array:
        """Return for each value how many integers below it are inside."""
        before = np.searchsorted(self.starts, values, side="right")
        if not self:
            return np.zeros(values.shape, dtype=np.uint64)
        last = np.maximum(before, 1) - 1
        within = np.minimum(values, self.stops[last]) - self.starts[last]
        return np.where(before > 0, self._inside_before[last] + within, np.uint64(0))

    def num_outside_below(self, values: UInt64Array) -> UInt64Array:
        """Return for each value how many integers below it are outside."""
        return values - self.num_inside_below(values)

    def outside_before(self, value: int) -> int:
        """Return how many integers below one value are outside."""
        return int(self.num_outside_below(np.array([value], dtype=np.uint64))[0])

    def nth_inside(self, numbers: UInt64Array) -> UInt64Array:
        """Return the integers inside that have these numbers, each below `total`."""
        at = np.searchsorted(self._inside_before, numbers, side="right") - 1
        inside: UInt64Array = self.starts[at] + (numbers - self._inside_before[at])
        return inside

    def nth_outside(self, numbers: UInt64Array) -> UInt64Array:
        """Return the integers outside that have these numbers."""
        return numbers + self._inside_before[np.searchsorted(self._outside_before, numbers, side="right")]


def ranges_from_json(what: str, value: object, *, limit: int = MAX_VALUE) -> Ranges:
    """Check a parsed JSON list of `[start, stop]` pairs.

    Raises:
        InvalidPlan: naming the field and the first pair that is none.
    """
    if not isinstance(value, list):
        raise InvalidPlan.expected(what, "a list of [start, stop] pairs", value)
    for pair in value:  # a million take 0.2 s
        # A bool is an int to isinstance.
        is_pair = type(pair) is list and len(pair) == 2 and type(pair[0]) is type(pair[1]) is int
        if not is_pair or not 0 <= pair[0] < pair[1] <= limit:
            accepted = f"pairs [start, stop] of integers with 0 <= start < stop <= {limit}"
            raise InvalidPlan.expected(what, accepted, pair)
    bounds = np.fromiter(chain.from_iterable(value), dtype=np.uint64, count=2 * len(value))
    return Ranges(bounds.reshape(-1, 2))


def _merged(starts: UInt64Array, stops: UInt64Array) -> tuple[UInt64Array, UInt64Array]:
    """Return ranges sorted, none empty, none touching another."""
    if (starts < stops).all() and (starts[1:] > stops[:-1]).all():
        return starts, stops
    order = np.flatnonzero(starts < stops)
    order = order[np.argsort(starts[order], kind="stable")]
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    apart = np.ones(len(starts), dtype=bool)
    apart[1:] = starts[1:] > reach[:-1]
    first = np.flatnonzero(apart)
    return starts[first], reach[np.append(first[1:], len(starts)) - 1] if len(starts) else reach
