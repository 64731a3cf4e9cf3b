"""Sets of integers as sorted ranges, against Python's sets."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from corpus_server.plan.ranges import MAX_VALUE, Ranges, ranges_from_json

END = 60  # larger than any integer of the ranges drawn
Bounds = list[list[int]]

bounds_lists = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 6)).map(lambda pair: [pair[0], sum(pair)]), max_size=6
)


def integers(bounds: Bounds) -> set[int]:
    return {value for start, stop in bounds for value in range(start, stop)}


def spelled(inside: set[int]) -> Bounds:
    """Return the fewest ranges of a set, in order."""
    edges = [value for value in range(END) if (value in inside) != (value - 1 in inside)]
    return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


@given(bounds=bounds_lists)
@example(bounds=[])
@example(bounds=[[3, 3]])
@example(bounds=[[0, 2], [2, 4]])
@example(bounds=[[0, 2], [3, 4]])
@example(bounds=[[5, 9], [0, 2]])
@example(bounds=[[0, 9], [2, 4], [5, 6], [9, 10]])
def test_ranges_are_the_set_of_their_integers(bounds: Bounds) -> None:
    """Each integer is counted, numbered and found again, inside and outside."""
    inside, ranges = integers(bounds), Ranges(bounds)
    outside = set(range(END)) - inside
    assert ranges.to_json() == ranges.bounds.tolist() == spelled(inside)
    assert (ranges.starts.tolist(), ranges.stops.tolist()) == tuple(
        [pair[end] for pair in spelled(inside)] for end in (0, 1)
    )
    assert ranges.to_json_text() == json.dumps(spelled(inside), separators=(",", ":"))
    assert (ranges.total, bool(ranges)) == (len(inside), bool(inside))
    every = np.arange(END, dtype=np.uint64)
    below = [sum(value < end for value in inside) for end in range(END)]
    assert ranges.contains(every).tolist() == [value in inside for value in range(END)]
    assert ranges.num_inside_below(every).tolist() == below
    above = [value - number for value, number in enumerate(below)]
    assert ranges.num_outside_below(every).tolist() == above
    assert [ranges.outside_before(value) for value in range(END)] == above
    assert ranges.nth_inside(every[: len(inside)]).tolist() == sorted(inside)
    assert ranges.nth_outside(every[: len(outside)]).tolist() == sorted(outside)


@given(bounds_lists, bounds_lists)
def test_sets_are_joined_and_compared(one: Bounds, other: Bounds) -> None:
    first, second = Ranges(one), Ranges(other)
    assert first.union(second) == Ranges(spelled(integers(one) | integers(other)))
    assert (first == second) == (integers(one) == integers(other))
    assert hash(first) == hash(Ranges(spelled(integers(one))))
    assert first != one


@given(bounds_lists, st.integers(0, END), st.integers(0, END))
def test_a_part_of_a_set_is_what_lies_in_it(bounds: Bounds, start: int, stop: int) -> None:
    start, stop = sorted((start, stop))
    assert Ranges(bounds).within(start, stop).to_json() == spelled(integers(bounds) & set(range(start, stop)))


def test_integers_may_be_as_large_as_63_bits_allow() -> None:
    bounds = [[0, 1], [2**53, 2**53 + 1], [2**62, 2**63 - 3], [2**63 - 2, 2**63 - 1]]
    ranges = ranges_from_json("here", bounds)
    assert ranges.to_json() == bounds
    inside = [0, 2**53, 2**62, 2**63 - 4, 2**63 - 2]
    numbers = [0, 1, 2, 2**63 - 4 - 2**62 + 2, ranges.total - 1]
    assert ranges.nth_inside(np.array(numbers, np.uint64)).tolist() == inside
    assert ranges.num_inside_below(np.array(inside, np.uint64)).tolist() == numbers
    assert ranges.total == sum(stop - start for start, stop in bounds)
    assert ranges.outside_before(2**63 - 1) == 2**63 - 1 - ranges.total


def test_a_set_does_not_follow_the_array_that_it_was_made_of() -> None:
    bounds = np.array([[1, 2], [5, 9]], dtype=np.uint64)
    ranges = Ranges(bounds)
    bounds[:] = 0
    assert ranges.to_json() == [[1, 2], [5, 9]]
    assert ranges.num_bytes == 4 * 2 * 8


PAIRS = "pairs [start, stop] of integers with 0 <= start < stop <= {}"


@pytest.mark.parametrize(
    ("value", "limit", "accepted", "received"),
    [
        pytest.param({"0": 1}, 9, "a list of [start, stop] pairs", {"0": 1}, id="object"),
        pytest.param("ab", 9, "a list of [start, stop] pairs", "ab", id="text"),
        pytest.param(((0, 1),), 9, "a list of [start, stop] pairs", ((0, 1),), id="tuple"),
        *(
            pytest.param([[0, 1], pair], 9, PAIRS.format(9), pair, id=str(pair))
            for pair in (
                *(3, "ab", (0, 1), [], [0], [1, 2, 3], [0, 1.0], [0.0, 1], [False, 1], [0, True]),
                *(["0", "1"], [-1, 1], [5, 5], [9, 5], [8, 10], [10, 11]),
            )
        ),
        pytest.param([[0, 2**63]], None, PAIRS.format(2**63 - 1), [0, 2**63], id="63 bits"),
    ],
)
def test_what_is_no_pair_is_refused(
    value: object, limit: int | None, accepted: str, received: object
) -> None:
    options: dict[str, Any] = {} if limit is None else {"limit": limit}
    with pytest.raises(InvalidPlan) as caught:
        ranges_from_json("here", value, **options)
    assert caught.value.detail == f"here must be {accepted}, got {received!r}"
    assert (caught.value.parameter, caught.value.accepted) == ("here", accepted)
    assert caught.value.received == received


@pytest.mark.parametrize("value", [[], [[0, 1]], [[0, 9]], [[8, 9], [0, 1]]], ids=str)
def test_pairs_up_to_the_limit_are_taken(value: Bounds) -> None:
    assert ranges_from_json("here", value, limit=9).to_json() == sorted(value)
    assert ranges_from_json("here", [[0, MAX_VALUE]]).total == MAX_VALUE == 2**63 - 1
    assert all(one < other for one, other in pairwise(ranges_from_json("here", value).starts.tolist()))
