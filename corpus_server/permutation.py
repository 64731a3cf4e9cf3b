"""A keyed permutation of [0, n) with an exact inverse, vectorised over uint64 arrays.

The domain is laid out on a grid of `height x width >= n` cells and stirred by a Feistel network
over that grid: a round adds a keyed hash of one coordinate to the other, modulo its side, so every
round can be subtracted again. Cells at n or beyond are walked on ("cycle walking") until they fall
inside; as the grid exceeds n by less than one row, that touches about one value in sqrt(n).

Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), for the generalised
Feistel network and cycle walking; Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators" (2014), for the mixing function (splitmix64, Stafford's variant 13).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

MAX_SIZE = 2**63
"""Largest n; coordinates then stay below 2^32 and no sum below overflows 64 bits."""

NUM_ROUNDS = 8
"""Luby and Rackoff prove four rounds strong on large domains; twice as many also serve small ones."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_FLAT_SIZE = 2**60
"""Up to here coordinates stay below 2^30."""
_MANY = 512
"""Values from which on a pass over them costs more than its call."""
# Arrays without dimensions: of a scalar NumPy makes one in every call, which costs half a call more.
_MIX_1, _MIX_2, _8, _27, _30, _31 = (
    np.array(number, dtype=np.uint64) for number in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 8, 27, 30, 31)
)


def mix64(values: UInt64Array) -> UInt64Array:
    """Hash uint64 values to uint64 values, one to one."""
    mixed = values ^ (values >> _30)
    mixed *= _MIX_1
    mixed ^= mixed >> _27
    mixed *= _MIX_2
    mixed ^= mixed >> _31
    return mixed


class Grid(NamedTuple):
    """Of one domain [0, n), or of several, the smallest near-square grid of at least n cells.

    Args:
        size: n: `() uint64` of one domain, `(k,) uint64` of several.
        height, width: of the grid, likewise.
        flat: whether all coordinates are below 2^30.
    """

    size: UInt64Array
    height: UInt64Array
    width: UInt64Array
    flat: bool

    @classmethod
    def over(cls, sizes: Sequence[int]) -> Grid:
        """Return the grids of several domains."""
        grids = [_grid(size) for size in sizes]
        return cls(
            size=np.array([grid.size for grid in grids], dtype=np.uint64),
            height=np.array([grid.height for grid in grids], dtype=np.uint64),
            width=np.array([grid.width for grid in grids], dtype=np.uint64),
            flat=all(grid.flat for grid in grids),
        )

    def take(self, which: NDArray[np.intp]) -> Grid:
        """Return the grid of one domain as it is, of several those of these numbers: `(k,)`."""
        if not self.size.ndim:
            return self
        return Grid(self.size[which], self.height[which], self.width[which], self.flat)


_Stir = Callable[[UInt64Array, Grid, Sequence[UInt64Array]], UInt64Array]


def stream_key(purpose: str, seed: int, source: str) -> int:
    """Return the 64-bit key of one stream of decisions: (what for, plan seed, source name)."""
    text = f"corpus-server/1/{purpose}/{seed}/{source}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def round_keys(key: int | UInt64Array, epochs: UInt64Array) -> UInt64Array:
    """Return the round keys of some epochs of a stream.

    Args:
        key: from `stream_key`, one for all or `(e,) uint64`.
        epochs: `(e,) uint64`.

    Returns:
        `(NUM_ROUNDS, e) uint64`.
    """
    rounds = np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64)[:, None]
    per_epoch = mix64(np.asarray(key, dtype=np.uint64) + (epochs + np.uint64(1)) * np.uint64(_GOLDEN))
    keys = mix64(per_epoch[None, :] + rounds * np.uint64(_GOLDEN))
    keys ^= keys >> _30  # see `_hash`
    return keys


def permute(positions: UInt64Array, size: int | Grid, keys: UInt64Array) -> UInt64Array:
    """Map positions of [0, size) one to one onto [0, size).

    Args:
        positions: `(k,) uint64`, each below its `size`.
        size: n, in [1, MAX_SIZE], for all, or the grid of one n for each.
        keys: `(NUM_ROUNDS, k)` or `(NUM_ROUNDS, 1) uint64` from `round_keys`.

    Returns:
        `(k,) uint64`, fresh memory.
    """
    return _walk(_forward, positions, size, keys)


def invert(values: UInt64Array, size: int | Grid, keys: UInt64Array) -> UInt64Array:
    """Undo `permute`: `invert(permute(p, n, k), n, k) == p`."""
    return _walk(_backward, values, size, keys)


def uniform(key: int | UInt64Array, counters: UInt64Array, bound: int | UInt64Array) -> UInt64Array:
    """Draw from [0, bound), every value equally likely, as a function of (key, counter) alone.

    Args:
        key: from `stream_key`, one for all or `(k,) uint64`.
        counters: `(k,) uint64`.
        bound: in [1, MAX_SIZE], one for all or `(k,) uint64`.

    Returns:
        `(k,) uint64`.
    """
    # Draws at or above the largest multiple of bound would favour small values: draw those again.
    bounds = np.broadcast_to(np.asarray(bound, dtype=np.uint64), counters.shape)
    limits = np.uint64(_MASK) - (np.uint64(_MASK) % bounds + np.uint64(1)) % bounds
    state = mix64(np.asarray(key, dtype=np.uint64) + (counters + np.uint64(1)) * np.uint64(_GOLDEN))
    draws = mix64(state + np.uint64(_GOLDEN))
    attempt = 1
    while (redraw := draws > limits).any():
        attempt += 1
        draws[redraw] = mix64(state[redraw] + np.uint64(attempt * _GOLDEN & _MASK))
    draws %= bounds
    return draws


@lru_cache(maxsize=1024)
def _grid(size: int) -> Grid:
    height = isqrt(size - 1) + 1
    return Grid(
        size=np.array(size, dtype=np.uint64),
        height=np.array(height, dtype=np.uint64),
        width=np.array(-(-size // height), dtype=np.uint64),
        flat=size <= _FLAT_SIZE,
    )


def _walk(stir: _Stir, values: UInt64Array, size: int | Grid, keys: UInt64Array) -> UInt64Array:
    if not values.size:
        return values.copy()
    grid = _grid(size) if isinstance(size, int) else size
    rounds = list(keys[:, 0] if keys.shape[1] == 1 else keys)
    cells = stir(values, grid, rounds)
    (outside,) = (cells >= grid.size).nonzero()
    while outside.size:
        its = grid.take(outside)
        walked = stir(cells[outside], its, [key[outside] if key.ndim else key for key in rounds])
        cells[outside] = walked
        outside = outside[walked >= its.size]
    return cells


def _forward(values: UInt64Array, grid: Grid, keys: Sequence[UInt64Array]) -> UInt64Array:
    row, column = np.divmod(values, grid.width)
    for even, odd in zip(keys[0::2], keys[1::2], strict=True):
        row += _hash(column, even, grid)
        _reduce(row, grid.height)
        column += _hash(row, odd, grid)
        _reduce(column, grid.width)
    row *= grid.width
    row += column
    return row


def _backward(values: UInt64Array, grid: Grid, keys: Sequence[UInt64Array]) -> UInt64Array:
    row, column = np.divmod(values, grid.width)
    for even, odd in zip(keys[-2::-2], keys[-1::-2], strict=True):
        column += grid.width - _reduce(_hash(row, odd, grid), grid.width)
        _reduce(column, grid.width)
        row += grid.height - _reduce(_hash(column, even, grid), grid.height)
        _reduce(row, grid.height)
    row *= grid.width
    row += column
    return row


def _reduce(values: UInt64Array, side: UInt64Array) -> UInt64Array:
    """Bring values below a side, in place."""
    # NumPy divides many values by one number a vector at a time, but takes remainders one by one.
    if side.ndim or values.size < _MANY:
        values %= side
    else:
        values -= values // side * side
    return values


def _hash(values: UInt64Array, key: UInt64Array, grid: Grid) -> UInt64Array:
    """Return a keyed hash of 56 bits: a value below 2^32 can be added without overflow.

    It is `mix64(values ^ key)` without its last step, whose upper bits are as good. The first step,
    x ^ (x >> 30), can be taken of key and values apart: `round_keys` has taken it of the key, and it
    leaves values below 2^30 as they are. Few passes over the array, for the few hundred rows of a step
    each costs a call and no more.
    """
    hashed = (values if grid.flat else values ^ (values >> _30)) ^ key
    hashed *= _MIX_1
    hashed ^= hashed >> _27
    hashed *= _MIX_2
    hashed >>= _8
    return hashed
