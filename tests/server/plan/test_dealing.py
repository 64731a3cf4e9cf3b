"""Rows dealt to ranks by their costs: as the page of the arithmetic says, slowly; steps that are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.plan.dealing import DealtSteps, deal


def slow(costs: list[int], num_ranks: int) -> list[list[int]]:
    """The rows of each rank, by the words of docs/arithmetic.md."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < len(costs) // num_ranks]
        ranks[min(free, key=lambda rank: (sum(costs[its] for its in ranks[rank]), rank))].append(row)
    return [sorted(rows) for rows in ranks]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_rows_are_dealt_as_the_page_says(num_ranks: int, rows: int, data: st.DataObject) -> None:
    largest = data.draw(st.sampled_from([1, 5, 2**40]))
    size = num_ranks * rows
    costs = data.draw(st.lists(st.integers(1, largest), min_size=size, max_size=size))
    assert deal(np.array(costs), num_ranks).reshape(num_ranks, rows).tolist() == slow(costs, num_ranks)


@pytest.mark.parametrize(("num_ranks", "rows"), [(8, 8), (64, 8)])
def test_ranks_cost_nearly_the_same(num_ranks: int, rows: int) -> None:
    """Of rows whose costs differ twentyfold, as those of lognormal documents do."""
    costs = np.random.default_rng(0).integers(10_000, 200_000, num_ranks * rows)
    sums = costs[deal(costs, num_ranks).astype(int)].reshape(num_ranks, rows).sum(axis=1)
    before = costs.reshape(num_ranks, rows).sum(axis=1)
    assert np.ptp(sums) / sums.mean() < 0.03 < 0.3 < np.ptp(before) / before.mean()


def test_steps_are_dealt_once_while_they_are_kept() -> None:
    kept, dealt = DealtSteps(), list[int]()

    def rows(step: int) -> list[int]:
        def costs() -> np.ndarray:
            dealt.append(step)
            return np.arange(2**15) + step

        return kept.rows(step, 2, costs).tolist()

    first = rows(0)
    assert [rows(step) for step in (1, 2, 3, 0)][-1] == first
    assert dealt == [0, 1, 2, 3]
    assert rows(4)  # there is room for four; 1 was not asked for the longest time
    assert (rows(0), dealt) == (first, [0, 1, 2, 3, 4])
    rows(1)
    assert dealt == [0, 1, 2, 3, 4, 1]
