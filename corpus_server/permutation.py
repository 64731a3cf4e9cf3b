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

_Stir = Callable[[UInt64Array, np.uint64, np.uint64, UInt64Array], UInt64Array]
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


def round_keys(key: int, epochs: UInt64Array) -> UInt64Array:
    """Return the round keys of some epochs of a stream.

    Args:
        key: from `stream_key`.
        epochs: `(e,) uint64`.

    Returns:
        `(NUM_ROUNDS, e) uint64`.
    """
    rounds = np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64)[:, None]
    per_epoch = mix64(np.uint64(key) + (epochs + np.uint64(1)) * np.uint64(_GOLDEN))
    return mix64(per_epoch[None, :] + rounds * np.uint64(_GOLDEN))


def permute(positions: UInt64Array, size: int, keys: UInt64Array) -> UInt64Array:
    """Map positions of [0, size) one to one onto [0, size).

    Args:
        positions: `(k,) uint64`, each below `size`.
        size: n, in [1, MAX_SIZE].
        keys: `(NUM_ROUNDS, k)` or `(NUM_ROUNDS, 1) uint64` from `round_keys`.

    Returns:
        `(k,) uint64`, fresh memory.
    """
    return _walk(_forward, positions, size, keys)


def invert(values: UInt64Array, size: int, keys: UInt64Array) -> UInt64Array:
    """Undo `permute`: `invert(permute(p, n, k), n, k) == p`."""
    return _walk(_backward, values, size, keys)


def uniform(key: int, counters: UInt64Array, bound: int) -> UInt64Array:
    """Draw from [0, bound), every value equally likely, as a function of (key, counter) alone.

    Args:
        key: from `stream_key`.
        counters: `(k,) uint64`.
        bound: in [1, MAX_SIZE].

    Returns:
        `(k,) uint64`.
    """
    # Draws at or above the largest multiple of bound would favour small values: draw those again.
    limit = np.uint64((2**64 // bound) * bound - 1)
    state = mix64(np.uint64(key) + (counters + np.uint64(1)) * np.uint64(_GOLDEN))
    draws = mix64(state + np.uint64(_GOLDEN))
    attempt = 1
    while (redraw := draws > limit).any():
        attempt += 1
        draws[redraw] = mix64(state[redraw] + np.uint64(attempt * _GOLDEN & _MASK))
    draws %= np.uint64(bound)
    return draws


def _grid(size: int) -> tuple[np.uint64, np.uint64]:
    """Return (height, width) of the smallest near-square grid of at least `size` cells."""
    height = isqrt(size - 1) + 1
    return np.uint64(height), np.uint64(-(-size // height))


def _walk(stir: _Stir, values: UInt64Array, size: int, keys: UInt64Array) -> UInt64Array:
    height, width = _grid(size)
    cells = stir(values, height, width, keys)
    outside = np.flatnonzero(cells >= np.uint64(size))
    while outside.size:
        walked = stir(cells[outside], height, width, keys if keys.shape[1] == 1 else keys[:, outside])
        cells[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return cells


def _forward(values: UInt64Array, height: np.uint64, width: np.uint64, keys: UInt64Array) -> UInt64Array:
    row, column = np.divmod(values, width)
    for even, odd in zip(keys[0::2], keys[1::2], strict=True):
        row = _hash(column, even, plus=row) % height
        column = _hash(row, odd, plus=column) % width
    return row * width + column


def _backward(values: UInt64Array, height: np.uint64, width: np.uint64, keys: UInt64Array) -> UInt64Array:
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
