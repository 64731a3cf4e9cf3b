"""Sets of integers as sorted half-open ranges: skipped steps, excluded windows.

With `covered` the integers inside and `gaps` those outside, numbered from 0 each:

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

UInt64Array = NDArray[np.uint64]

MAX_VALUE = 2**63 - 1


class Ranges:
    """An immutable set of integers in [0, 2^63); look-ups are vectorised, O(log ranges) each.

    Overlapping and touching ranges are merged, so equal sets have equal ranges.

    Args:
        bounds: `(k, 2)` integers: start, stop of each range, `0 <= start <= stop <= 2^63 - 1`.

    Attributes:
        starts, stops: `(r,) uint64`, sorted, each range non-empty, neighbours apart.
        total: integers inside.
    """

    def __init__(self, bounds: NDArray[np.integer] | Sequence[Sequence[int]] = ()) -> None:
        given = np.asarray(bounds, dtype=np.uint64).reshape(-1, 2)
        self.starts, self.stops = _merged(given[:, 0].copy(), given[:, 1].copy())
        lengths = self.stops - self.starts
        # _inside_before[i]: integers inside the ranges before range i; one entry more than ranges.
        self._inside_before = np.concatenate((np.zeros(1, np.uint64), np.cumsum(lengths, dtype=np.uint64)))
        self._outside_before = self.starts - self._inside_before[:-1]
        self.total = int(self._inside_before[-1])

    def __bool__(self) -> bool:
        return self.total > 0

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ranges)
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.stops, other.stops)
        )

    def __hash__(self) -> int:
        return hash((self.starts.tobytes(), self.stops.tobytes()))

    def __repr__(self) -> str:
        shown = self.to_json()[:4]
        return f"Ranges({shown}{'...' if len(self.starts) > len(shown) else ''})"

    def to_json(self) -> list[list[int]]:
        """Return `[[start, stop], ...]`."""
        pairs: list[list[int]] = np.stack((self.starts, self.stops), axis=1).tolist()
        return pairs

    def to_json_text(self) -> str:
        """Return `to_json` as text, `[[1,2],[5,9]]`, straight from the arrays: a million take 20 ms."""
        pairs = np.stack((self.starts, self.stops), axis=1)
        return orjson.dumps(pairs, option=orjson.OPT_SERIALIZE_NUMPY).decode()

    def union(self, other: Ranges) -> Ranges:
        """Return the integers in either."""
        if not self or not other:
            return self or other
        both = [np.stack((each.starts, each.stops), axis=1) for each in (self, other)]
        return Ranges(np.concatenate(both))

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
        below: UInt64Array = np.where(before > 0, self._inside_before[last] + within, np.uint64(0))
        return below

    def num_outside_below(self, values: UInt64Array) -> UInt64Array:
        """Return for each value how many integers below it are outside."""
        outside: UInt64Array = values - self.num_inside_below(values)
        return outside

    def nth_inside(self, numbers: UInt64Array) -> UInt64Array:
        """Return the integers inside of these numbers, each below `total`."""
        at = np.searchsorted(self._inside_before, numbers, side="right") - 1
        inside: UInt64Array = self.starts[at] + (numbers - self._inside_before[at])
        return inside

    def nth_outside(self, numbers: UInt64Array) -> UInt64Array:
        """Return the integers outside of these numbers."""
        return numbers + self._inside_before[np.searchsorted(self._outside_before, numbers, side="right")]


def ranges_from_json(what: str, value: object, *, limit: int = MAX_VALUE) -> Ranges:
    """Check a parsed JSON list of `[start, stop]` pairs.

    Raises:
        InvalidPlan: naming the field and the first pair that is none.
    """
    if not isinstance(value, list):
        raise InvalidPlan(f"{what} must be a list of [start, stop] pairs, got {value!r}", parameter=what)
    if not value:
        return Ranges()
    bounds = _as_pairs(value)
    if bounds is None:
        pair: object = next(each for each in value if not _is_pair(each))
    else:
        wrong = np.flatnonzero((bounds[:, 0] < 0) | (bounds[:, 0] >= bounds[:, 1]) | (bounds[:, 1] > limit))
        if not wrong.size:
            return Ranges(bounds)
        pair = value[int(wrong[0])]
    raise InvalidPlan(
        f"{what} must hold pairs [start, stop] of integers with 0 <= start < stop <= {limit}, got {pair!r}",
        parameter=what,
        received=pair,
        accepted=f"0 <= start < stop <= {limit}",
    )


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


def _as_pairs(value: list[object]) -> NDArray[np.int64] | None:
    """Return a list of pairs of integers as an array, or None if it is none; a million take 0.2 s."""
    if set(map(type, value)) != {list} or set(map(len, value)) != {2}:  # type: ignore[arg-type]
        return None
    flat: list[object] = list(chain.from_iterable(value))  # type: ignore[arg-type]
    if set(map(type, flat)) != {int}:
        return None
    try:
        return np.array(flat, dtype=np.int64).reshape(-1, 2)
    except OverflowError:
        return None


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) and abs(each) < 2**63 for each in value)
    )
