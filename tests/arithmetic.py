"""The plan's building blocks in plain integers, under the names that tests use; and chi-square.

The arithmetic is that of `tests/second.py`, which was written from docs/arithmetic.md alone.
"""

from __future__ import annotations

import math

import numpy as np

from tests import second

GOLDEN = second.GOLDEN
TWO64 = 2**64

shuffled, unshuffled, drawn, stream = second.permute, second.invert, second.draw, second.key


def splitmix(state: int, number: int) -> int:
    """The `number`-th output, from 1 on, of splitmix64 started at `state`."""
    return second.mix((state + number * GOLDEN) % TWO64)


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
