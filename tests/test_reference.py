"""The yardsticks themselves, against published values."""

from __future__ import annotations

import numpy as np
import pytest

from tests.arithmetic import chi_square_p_value, splitmix


def test_splitmix_gives_its_published_outputs() -> None:
    assert [splitmix(1234567, n) for n in (1, 2)] == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize(
    ("freedom", "critical", "p_value"),
    [(5, 11.070, 0.05), (10, 23.209, 0.01), (49, 85.351, 0.001), (99, 134.642, 0.01)],
)
def test_p_values_agree_with_the_tables(freedom: int, critical: float, p_value: float) -> None:
    """Critical values as printed in tables of the chi-square distribution."""
    observed = np.full(freedom + 1, 1000.0)
    deviation = (critical * 1000 / 2) ** 0.5
    observed[0] += deviation
    observed[1] -= deviation
    assert chi_square_p_value(observed) == pytest.approx(p_value, rel=0.05)


def test_an_uneven_distribution_is_found() -> None:
    assert chi_square_p_value(np.array([1200, 1000, 1000, 1000, 800])) < 1e-4
