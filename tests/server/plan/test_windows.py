"""Windows: as many as the definition says, each where the definition says."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows.rows import Sources
from corpus_server.plan.rows.windows import WindowRows
from corpus_server.plan.windows import Windows
from corpus_server.work import Budget


def rows_of(shard_tokens: list[int], seq_len: int, stride: int) -> WindowRows:
    """Return the windows of one source."""
    windows = Windows([shard_tokens], seq_len=seq_len, stride=stride)
    return WindowRows(sources=Sources(("a",), windows, 0))


def located(rows: WindowRows, numbers: np.ndarray) -> np.ndarray:
    """Return shard and start token of windows."""
    return rows.pieces(0, numbers, np.zeros_like(numbers)).places[:, :2]


def listed(shard_tokens: list[int], seq_len: int, stride: int) -> list[list[int]]:
    """Every (shard, start) that leaves room for seq_len + 1 tokens, in order."""
    return [
        [shard, start]
        for shard, num_tokens in enumerate(shard_tokens)
        for start in range(0, num_tokens, stride)
        if start + seq_len + 1 <= num_tokens
    ]


@given(
    shard_tokens=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    seq_len=st.integers(1, 20),
    stride=st.integers(1, 25),
)
def test_every_window_is_where_listing_them_finds_it(
    shard_tokens: list[int], seq_len: int, stride: int
) -> None:
    rows = rows_of(shard_tokens, seq_len, stride)
    expected = listed(shard_tokens, seq_len, stride)
    assert rows.num_rows.tolist() == [len(expected)]
    found = located(rows, np.arange(len(expected), dtype="uint64"))
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_the_worked_instance_of_the_module() -> None:
    rows = rows_of([10, 7], seq_len=3, stride=3)
    assert located(rows, np.arange(5, dtype="uint64")).tolist() == [[0, 0], [0, 3], [0, 6], [1, 0], [1, 3]]


def test_starts_beyond_64_bit_products_of_32_bit_numbers() -> None:
    """A thousand shards of 2^50 tokens: neither sample ids nor starts lose a bit."""
    rows = rows_of([2**50] * 1000, seq_len=7, stride=7)
    per_shard = (2**50 - 8) // 7 + 1
    ids = np.array([per_shard * 999 - 1, per_shard * 999, per_shard * 1000 - 1], "uint64")
    assert located(rows, ids).tolist() == [[998, (per_shard - 1) * 7], [999, 0], [999, (per_shard - 1) * 7]]


@given(
    shard_tokens=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    seq_len=st.integers(1, 20),
    stride=st.integers(1, 25),
    data=st.data(),
)
def test_extents_hold_the_windows_and_no_more(
    shard_tokens: list[int], seq_len: int, stride: int, data: st.DataObject
) -> None:
    """In every shard from its first window's first token to its last one's last."""
    rows = rows_of(shard_tokens, seq_len, stride)
    windows = listed(shard_tokens, seq_len, stride)
    if not windows:
        return
    start = data.draw(st.integers(0, len(windows) - 1))
    stop = data.draw(st.integers(start + 1, len(windows)))
    starts: dict[int, list[int]] = {}
    for shard, first in windows[start:stop]:
        starts.setdefault(shard, []).append(first)
    expected = [(shard, its[0], its[-1] + seq_len + 1) for shard, its in starts.items()]
    assert rows.extents(start, stop) == expected


@given(
    shard_tokens=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    seq_len=st.integers(1, 20),
    stride=st.integers(1, 25),
    data=st.data(),
)
def test_the_windows_that_touch_a_range_are_those_that_hold_a_token_of_it(
    shard_tokens: list[int], seq_len: int, stride: int, data: st.DataObject
) -> None:
    """Against looking at each window; where none does, the range of windows is empty."""
    rows = rows_of(shard_tokens, seq_len, stride)
    firsts = [0, *accumulate(shard_tokens)]
    assert rows.sources.windows.shard_token.tolist() == firsts
    windows = [firsts[shard] + start for shard, start in listed(shard_tokens, seq_len, stride)]
    if not firsts[-1]:
        return
    start = data.draw(st.integers(0, firsts[-1] - 1))
    stop = data.draw(st.integers(start + 1, firsts[-1]))
    ((low, high),) = rows.within(0, Ranges([[start, stop]]), Budget()).tolist()
    held = [number for number, at in enumerate(windows) if at < stop and start <= at + seq_len]
    assert list(range(low, high)) == held
    assert low <= high
