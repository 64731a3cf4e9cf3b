"""Bounded shuffles: every window once per epoch, read from two groups of blocks at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.plan import Plan, Sampler
from tests.arithmetic import chi_square_p_value
from tests.plans import bounded
from tests.reference import one_source
from tests.second import Groups

sizes = {
    "num_windows": st.integers(1, 90),
    "block_windows": st.integers(1, 12),
    "group_blocks": st.integers(1, 5),
    "seed": st.integers(0, 99),
}


def make(num_windows: int, block_windows: int, group_blocks: int, seed: int = 0, **stage: Any) -> Sampler:
    """One source whose window k is token k, `num_windows` rows a step."""
    order = bounded(block_windows, group_blocks)
    document = one_source("web", 1, num_windows, seed=seed, order=order)
    document["stages"][0].update(stage)
    return Sampler(Plan.from_json(document), {"web": [num_windows + 1]})


def epoch(sampler: Sampler, number: int) -> list[int]:
    """The windows of an epoch in order."""
    return [int(window) for window in sampler.locate(number)[0, :, 1]]


@given(**sizes)
def test_every_window_comes_once_in_every_epoch(
    num_windows: int, block_windows: int, group_blocks: int, seed: int
) -> None:
    sampler = make(num_windows, block_windows, group_blocks, seed)
    for number in (0, 1, 7, 2**40):
        assert sorted(epoch(sampler, number)) == list(range(num_windows))


@given(**sizes)
def test_the_inverse_finds_every_position(
    num_windows: int, block_windows: int, group_blocks: int, seed: int
) -> None:
    sampler = make(num_windows, block_windows, group_blocks, seed)
    positions = np.arange(5 * num_windows, 8 * num_windows, dtype=np.uint64)
    windows, epochs = sampler.laid[0].rows_at(0, positions)
    assert (sampler.laid[0].positions_of(0, windows, epochs) == positions).all()


@given(**sizes)
def test_a_group_is_read_to_its_end_before_the_next_one(
    num_windows: int, block_windows: int, group_blocks: int, seed: int
) -> None:
    """So rows that come near each other need two groups at most, whichever block is the short one."""
    sampler = make(num_windows, block_windows, group_blocks, seed)
    for number in range(3):
        left = epoch(sampler, number)
        while left:
            blocks: set[int] = set()
            while left and len(blocks | {left[0] // block_windows}) <= group_blocks:
                blocks.add(left.pop(0) // block_windows)
            assert not blocks & {window // block_windows for window in left}
            assert not left or len(blocks) == group_blocks


@settings(max_examples=60)
@given(**sizes, start=st.integers(0, 80), length=st.integers(1, 20))
def test_a_substitute_comes_from_the_group_of_the_window_that_it_replaces(
    num_windows: int, block_windows: int, group_blocks: int, seed: int, start: int, length: int
) -> None:
    """If any of the group is left; groups of this size are shorter than the reach."""
    start = min(start, num_windows - 1)
    stop = min(start + length, num_windows)
    if stop - start > num_windows - 3:
        return
    block_windows, group_blocks = min(block_windows, 8), min(group_blocks, 4)
    plain = make(num_windows, block_windows, group_blocks, seed)
    denying = make(num_windows, block_windows, group_blocks, seed, exclude={"web": [[start, stop]]})
    before, after = epoch(plain, 1), epoch(denying, 1)
    order = {"block_windows": block_windows, "group_blocks": group_blocks}
    groups = Groups(num_windows, order, seed, "web", 1)
    for position, (then, now) in enumerate(zip(before, after, strict=True)):
        group = groups.group_at(position)
        windows = {groups.laid(group, index) for index in range(groups.size(group))}
        denied = set(range(max(0, start - 1), stop))
        if then not in denied:
            assert now == then
        elif windows - denied:
            assert now in windows - denied


def test_any_epoch_costs_the_same_and_blocks_come_in_another_order() -> None:
    sampler = make(1000, 10, 4)
    first = [tuple(window // 10 for window in epoch(sampler, number)[:40]) for number in (0, 1, 10**9)]
    assert len({frozenset(blocks) for blocks in first}) == 3


def test_rows_of_a_group_are_evenly_distributed() -> None:
    """Over 300 epochs, the block that comes first and the place in it are those of fair dice."""
    sampler = make(64, 8, 4)
    first = np.array([epoch(sampler, number)[0] for number in range(300)])
    assert chi_square_p_value(np.bincount(first // 8, minlength=8)) > 1e-4
    assert chi_square_p_value(np.bincount(first % 8, minlength=8)) > 1e-4


@settings(max_examples=40)
@given(**sizes)
def test_groups_are_numbered_through_epochs_and_hold_the_blocks_of_their_rows(
    num_windows: int, block_windows: int, group_blocks: int, seed: int
) -> None:
    """In the order in which they come; the last block ends with the source."""
    sampler = make(num_windows, block_windows, group_blocks, seed)
    num_groups = math.ceil(math.ceil(num_windows / block_windows) / group_blocks)
    of_rows: dict[int, list[int]] = {}
    for position, window in enumerate(epoch(sampler, 2) + epoch(sampler, 3), 2 * num_windows):
        of_rows.setdefault(sampler.order.group_at(0, position), []).append(window)
    assert list(of_rows) == list(range(2 * num_groups, 4 * num_groups))
    for number, windows in of_rows.items():
        ranges = sampler.order.group_rows(0, number).tolist()
        for start, stop in ranges:
            assert (start % block_windows, stop) == (0, min(start + block_windows, num_windows))
        assert sampler.group_extents(0, number) == [(0, start, stop + 1) for start, stop in ranges]
        assert sorted(windows) == sorted(window for each in ranges for window in range(*each))
