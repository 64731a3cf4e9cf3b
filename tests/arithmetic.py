"""The plan's building blocks once more, in plain integers: hash, permutation, draws; and chi-square.

Written from the documents and not from the code: the network is Black and Rogaway's generalised
Feistel over a grid of height x width cells with cycle walking, the mixing function is splitmix64's.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

ROUNDS = 8
GOLDEN = 0x9E3779B97F4A7C15
TWO64 = 2**64


def mix(value: int) -> int:
    """Splitmix64's output function."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % TWO64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % TWO64
    return value ^ (value >> 31)


def round_hash(value: int) -> int:
    """The upper 56 bits of splitmix64's output before its last xor-shift."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % TWO64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % TWO64
    return value >> 8


def sides(size: int) -> tuple[int, int]:
    """Height and width of the smallest grid, as square as can be, that holds `size` cells."""
    height = math.isqrt(size)
    if height * height < size:
        height += 1
    return height, (size + height - 1) // height


def splitmix(state: int, number: int) -> int:
    """The `number`-th output, from 1 on, of splitmix64 started at `state`."""
    return mix((state + number * GOLDEN) % TWO64)


def stream(purpose: str, seed: int, source: str) -> int:
    """Key of a stream in version 1: the first 8 bytes of a SHA-256, little-endian."""
    digest = hashlib.sha256(f"corpus-server/1/{purpose}/{seed}/{source}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


@lru_cache(1000)
def epoch_keys(key: int, epoch: int) -> list[int]:
    """The round keys of one epoch of a stream."""
    state = splitmix(key, epoch + 1)
    return [splitmix(state, number) for number in range(1, ROUNDS + 1)]


def shuffled(position: int, size: int, key: int, epoch: int) -> int:
    """Where the keyed permutation of one epoch sends a position of [0, size)."""
    height, width = sides(size)
    keys = epoch_keys(key, epoch)
    cell = position
    while True:
        row, column = divmod(cell, width)
        for number in range(0, ROUNDS, 2):
            row = (row + round_hash(column ^ keys[number])) % height
            column = (column + round_hash(row ^ keys[number + 1])) % width
        cell = row * width + column
        if cell < size:
            return cell


def all_shuffled(size: int, key: int, epoch: int) -> list[int]:
    """Where the permutation sends every position: `shuffled`, with each hash computed once."""
    height, width = sides(size)
    keys = epoch_keys(key, epoch)
    of_columns = [[round_hash(column ^ key) for column in range(width)] for key in keys[0::2]]
    of_rows = [[round_hash(row ^ key) for row in range(height)] for key in keys[1::2]]
    rounds = list(zip(of_columns, of_rows, strict=True))
    found = []
    for cell in range(size):
        while True:
            row, column = divmod(cell, width)
            for of_column, of_row in rounds:
                row = (row + of_column[column]) % height
                column = (column + of_row[row]) % width
            cell = row * width + column
            if cell < size:
                break
        found.append(cell)
    return found


def unshuffled(value: int, size: int, key: int, epoch: int) -> int:
    """The position that `shuffled` sends to a value: the rounds backwards, each subtracted."""
    height, width = sides(size)
    keys = epoch_keys(key, epoch)
    cell = value
    while True:
        row, column = divmod(cell, width)
        for number in range(ROUNDS - 2, -1, -2):
            column = (column - round_hash(row ^ keys[number + 1])) % width
            row = (row - round_hash(column ^ keys[number])) % height
        cell = row * width + column
        if cell < size:
            return cell


def drawn(counter: int, bound: int, key: int) -> int:
    """An unbiased draw from [0, bound) by counter: splitmix64 outputs, too large ones skipped."""
    state = splitmix(key, counter + 1)
    number = 1
    while (value := splitmix(state, number)) >= TWO64 - TWO64 % bound:
        number += 1
    return value % bound


def chi_square_p_value(observed: np.ndarray) -> float:
    """Return the p-value of counts under equal probabilities.

    By Wilson and Hilferty's approximation (PNAS 17, 1931): the cube root of chi-square over its
    degrees of freedom k is nearly normal with mean 1 - 2/(9k) and variance 2/(9k).
    """
    expected = observed.sum() / observed.size
    freedom = observed.size - 1
    chi_square = float(((observed - expected) ** 2).sum() / expected)
    variance = 2 / (9 * freedom)
    normal = ((chi_square / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    return 0.5 * math.erfc(normal / math.sqrt(2))
