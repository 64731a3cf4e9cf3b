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
from collections.abc import Callable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

MAX_SIZE = 2**63
"""Largest n; coordinates then stay below 2^32 and no sum below overflows 64 bits."""

NUM_ROUNDS = 8
"""Luby and Rackoff prove four rounds strong on large domains; twice as many also serve small ones."""

_Stir = Callable[[UInt64Array, UInt64Array, UInt64Array, UInt64Array], UInt64Array]
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_8, _27, _30 = np.uint64(8), np.uint64(27), np.uint64(30)


def mix64(values: UInt64Array) -> UInt64Array:
    """Hash uint64 values to uint64 values, one to one."""
    mixed = values ^ (values >> _30)
    mixed *= _MIX_1
    mixed ^= mixed >> _27
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return mixed


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
    return mix64(per_epoch[None, :] + rounds * np.uint64(_GOLDEN))


def permute(positions: UInt64Array, size: int | UInt64Array, keys: UInt64Array) -> UInt64Array:
    """Map positions of [0, size) one to one onto [0, size).

    Args:
        positions: `(k,) uint64`, each below its `size`.
        size: n, in [1, MAX_SIZE], one for all or `(k,) uint64`.
        keys: `(NUM_ROUNDS, k)` or `(NUM_ROUNDS, 1) uint64` from `round_keys`.

    Returns:
        `(k,) uint64`, fresh memory.
    """
    return _walk(_forward, positions, size, keys)


def invert(values: UInt64Array, size: int | UInt64Array, keys: UInt64Array) -> UInt64Array:
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


def _grid(size: int | UInt64Array) -> tuple[UInt64Array, UInt64Array]:
    """Return (height, width) of the smallest near-square grids of at least `size` cells."""
    if isinstance(size, int):
        height = isqrt(size - 1) + 1
        return np.array(height, dtype=np.uint64), np.array(-(-size // height), dtype=np.uint64)
    # There are as many sizes as sources: exact integer roots cost nothing.
    sizes, which = np.unique(size, return_inverse=True)
    heights, widths = zip(*(_grid(each) for each in sizes.tolist()), strict=True)
    return np.array(heights)[which], np.array(widths)[which]


def _walk(stir: _Stir, values: UInt64Array, size: int | UInt64Array, keys: UInt64Array) -> UInt64Array:
    if not values.size:
        return values.copy()
    height, width = _grid(size)
    sizes = np.asarray(size, dtype=np.uint64)
    cells = stir(values, height, width, keys)
    outside = np.flatnonzero(cells >= sizes)
    while outside.size:
        walked = stir(
            cells[outside],
            height if height.ndim == 0 else height[outside],
            width if width.ndim == 0 else width[outside],
            keys if keys.shape[1] == 1 else keys[:, outside],
        )
        cells[outside] = walked
        outside = outside[walked >= (sizes if sizes.ndim == 0 else sizes[outside])]
    return cells


def _forward(values: UInt64Array, height: UInt64Array, width: UInt64Array, keys: UInt64Array) -> UInt64Array:
    row, column = np.divmod(values, width)
    for even, odd in zip(keys[0::2], keys[1::2], strict=True):
        row = _hash(column, even, plus=row) % height
        column = _hash(row, odd, plus=column) % width
    return row * width + column


def _backward(values: UInt64Array, height: UInt64Array, width: UInt64Array, keys: UInt64Array) -> UInt64Array:
    row, column = np.divmod(values, width)
    for even, odd in zip(keys[-2::-2], keys[-1::-2], strict=True):
        column = (column + (width - _hash(row, odd) % width)) % width
        row = (row + (height - _hash(column, even) % height)) % height
    return row * width + column


def _hash(values: UInt64Array, key: UInt64Array, plus: UInt64Array | None = None) -> UInt64Array:
    """Return a keyed hash of 56 bits, plus values below 2^32: the sum cannot overflow.

    It is `mix64(values ^ key)` without its last step, whose upper bits are as good: fewer passes over
    the array, in place, because for the few hundred rows of a step each pass costs a call and no more.
    """
    hashed = values ^ key
    shifted = hashed >> _30
    hashed ^= shifted
    hashed *= _MIX_1
    np.right_shift(hashed, _27, out=shifted)
    hashed ^= shifted
    hashed *= _MIX_2
    hashed >>= _8
    if plus is not None:
        hashed += plus
    return hashed
