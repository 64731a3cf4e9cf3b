"""A keyed permutation of [0, n) with an exact inverse, vectorised over uint64 arrays.

The domain is a grid of `height x width >= n` cells. A Feistel network permutes the grid: each round adds
a keyed hash of one coordinate to the other coordinate, modulo that side, so that each round can be
subtracted again. A value that lands on a cell outside [0, n) is permuted again until it lands inside
("cycle walking"). The grid exceeds n by less than one row, so this concerns about one value in sqrt(n).

Sources: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), for the generalised
Feistel network and cycle walking; Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators" (2014), for the mixing function (splitmix64, Stafford's variant 13).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import UInt64Array

MAX_SIZE = 2**63
"""Largest n: coordinates stay below 2^32, so that no sum in this file overflows 64 bits."""

NUM_ROUNDS = 8
"""Luby and Rackoff prove four rounds strong on large domains; eight also serve small domains."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# Arrays without dimensions: NumPy would make one of a scalar in each call, at half the cost of the call.
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


def hashed_number(key: int | UInt64Array, numbers: UInt64Array) -> UInt64Array:
    """Return 64 bits that follow from a key, or one for each number, and `(k,) uint64` numbers."""
    return mix64(np.asarray(key, dtype=np.uint64) + (numbers + np.uint64(1)) * np.uint64(_GOLDEN))


class Grid(NamedTuple):
    """The smallest near-square grid of at least n cells: arrays `()` for one domain [0, n), `(k,)` for k."""

    size: UInt64Array  # n
    height: UInt64Array
    width: UInt64Array
    flat: bool  # whether all coordinates are below 2^30

    @classmethod
    def over(cls, sizes: UInt64Array | Sequence[int] | int) -> Grid:
        """Return the grid of one domain, or those of several, each of size 1 or more."""
        size = np.array(sizes, dtype=np.uint64)
        largest = int(size.max(initial=1))
        if largest <= 2**52:  # a double is exact, and so is the whole part of its root
            height = np.sqrt(size - np.uint64(1)).astype(np.uint64) + np.uint64(1)
        else:
            heights = [isqrt(each - 1) + 1 for each in size.ravel().tolist()]
            height = np.array(heights, dtype=np.uint64).reshape(size.shape)
        width = np.asarray((size - np.uint64(1)) // height + np.uint64(1))
        return cls(size, np.asarray(height), width, flat=largest <= 2**60)

    def take(self, which: NDArray[np.intp] | int) -> Grid:
        """Return the grids of the domains of numbers, `(k,)` or one; a grid of one domain serves all."""
        if not self.size.ndim:
            return self
        size, height, width = (np.asarray(each[which]) for each in self[:3])
        return Grid(size, height, width, self.flat)


def stream_key(purpose: str, seed: int, source: str) -> int:
    """Return the 64-bit key of one series of decisions.

    Args:
        purpose: what is decided, like an order's name or `mixture`.
        seed: of the plan.
        source: what tells series of one purpose apart, like a source's name.
    """
    # The 1 is no version of the arithmetic: version 2 has the same keys.
    text = f"corpus-server/1/{purpose}/{seed}/{source}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def round_keys(key: int | UInt64Array, epochs: UInt64Array) -> UInt64Array:
    """Return the round keys of `(e,)` epochs, with one key from `stream_key` or e: `(NUM_ROUNDS, e)`.

    With one key for equal epochs, as most steps have, `(NUM_ROUNDS, 1)`.
    """
    if not np.ndim(key) and is_one(epochs):
        return _epoch_keys(int(key), int(epochs[0]))
    return _round_keys(key, epochs)


def _round_keys(key: int | UInt64Array, epochs: UInt64Array) -> UInt64Array:
    rounds = np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64)[:, None]
    per_epoch = hashed_number(key, epochs)
    keys = mix64(per_epoch[None, :] + rounds * np.uint64(_GOLDEN))
    keys ^= keys >> _30  # see `_hash`
    return keys


@lru_cache(maxsize=1024)
def _epoch_keys(key: int, epoch: int) -> UInt64Array:
    # Kept, because most steps lie in one epoch: without it, 64 rows take 1.2 times as long.
    keys = _round_keys(key, np.array([epoch], dtype=np.uint64))
    keys.setflags(write=False)  # the cache shares the array
    return keys


def is_one(values: NDArray[np.integer]) -> bool:
    """Tell whether there are values and all are the same."""
    return values.size > 0 and bool((values == values[0]).all())


def permute_block(keys: UInt64Array, stop: int) -> NDArray[np.uint16]:
    """Return `permute` of the first positions of [0, 65536); one column of round keys for all."""
    # The grid is 256 x 256, so that a round's hash has 256 values: a look-up in a table of bytes, and byte
    # sums that wrap at 256 by themselves. All 65,536 take 0.35 ms, with `permute` 4.8 ms.
    tables = _hash(np.arange(256, dtype=np.uint64), keys, _grid(1 << 16)).astype(np.uint8)
    positions = np.arange(stop, dtype=np.uint16)
    row, column = (positions >> np.uint16(8)).astype(np.uint8), positions.astype(np.uint8)
    for even, odd in zip(tables[0::2], tables[1::2], strict=True):
        row += np.frombuffer(column.tobytes().translate(even.tobytes()), dtype=np.uint8)
        column += np.frombuffer(row.tobytes().translate(odd.tobytes()), dtype=np.uint8)
    return row.astype(np.uint16) << np.uint16(8) | column


def permute(
    positions: UInt64Array, size: int | Grid, keys: UInt64Array, *, inverse: bool = False
) -> UInt64Array:
    """Map positions of [0, size) one to one onto [0, size): `(k,) uint64`, fresh memory.

    Args:
        positions: `(k,) uint64`, each below its `size`.
        size: n in [1, MAX_SIZE] for all positions, or a grid with one n for each.
        keys: `(NUM_ROUNDS, k)` or `(NUM_ROUNDS, 1) uint64` from `round_keys`.
        inverse: see `invert`.
    """
    if not positions.size:
        return positions.copy()
    one_pass = _backward if inverse else _forward
    grid = _grid(size) if isinstance(size, int) else size
    rounds = list(keys[:, 0] if keys.shape[1] == 1 else keys)
    cells = one_pass(positions, grid, rounds)
    (outside,) = (cells >= grid.size).nonzero()
    while outside.size:
        its = grid.take(outside)
        walked = one_pass(cells[outside], its, rounds if keys.shape[1] == 1 else list(keys[:, outside]))
        cells[outside] = walked
        outside = outside[walked >= its.size]
    return cells


def invert(values: UInt64Array, size: int | Grid, keys: UInt64Array) -> UInt64Array:
    """Undo `permute`: `invert(permute(p, n, k), n, k) == p`."""
    return permute(values, size, keys, inverse=True)


def uniform(key: int | UInt64Array, counters: UInt64Array, bound: int | UInt64Array) -> UInt64Array:
    """Draw from [0, bound), every value equally likely, as a function of (key, counter) alone.

    The counters are `(k,) uint64`; the `stream_key` and the bound, in [1, MAX_SIZE], are one for all
    counters, or `(k,) uint64`.
    """
    # Draws at or above the largest multiple of the bound would favour small values, so draw those again.
    bounds = np.broadcast_to(np.asarray(bound, dtype=np.uint64), counters.shape)
    state = hashed_number(key, counters)
    draws = mix64(state + np.uint64(_GOLDEN))
    attempt = 1
    # No limit lies further below 2^64 than the largest bound, and so hardly a draw is compared with its own.
    least = _MASK - int(bounds.max(initial=1)) + 1
    while (draws >= least).any():
        limits = np.uint64(_MASK) - (np.uint64(_MASK) % bounds + np.uint64(1)) % bounds
        if not (redraw := draws > limits).any():
            break
        attempt += 1
        draws[redraw] = mix64(state[redraw] + np.uint64(attempt * _GOLDEN & _MASK))
    draws %= bounds
    return draws


_grid = lru_cache(maxsize=1024)(Grid.over)


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
        column += grid.width - _hash(row, odd, grid) % grid.width
        column %= grid.width
        row += grid.height - _hash(column, even, grid) % grid.height
        row %= grid.height
    row *= grid.width
    row += column
    return row


def _reduce(values: UInt64Array, size: UInt64Array) -> None:
    """Replace values by their remainders."""
    if size.ndim:
        values %= size
    else:  # NumPy divides by one number with vector instructions, and takes remainders without
        values -= values // size * size


def _hash(values: UInt64Array, key: UInt64Array, grid: Grid) -> UInt64Array:
    """Return a keyed hash of 56 bits, to which a value below 2^32 can be added without overflow.

    This is `mix64(values ^ key)` without its last step; the upper bits are as good without it. The first
    step, x ^ (x >> 30), distributes over the xor: `round_keys` applies it to the key, and it leaves values
    below 2^30 unchanged. Each pass that is saved matters: for a step's few hundred rows a pass costs a call.
    """
    hashed = (values if grid.flat else values ^ (values >> _30)) ^ key
    hashed *= _MIX_1
    hashed ^= hashed >> _27
    hashed *= _MIX_2
    hashed >>= _8
    return hashed
