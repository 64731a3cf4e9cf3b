"""What a cache must hold at a time for a plan over corpora in object stores."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import CacheTooSmall
from corpus_server.plan import BoundedShuffle, Order
from corpus_server.plan.orders.order import ExtentSizes, WorkingSet
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.stores import Extents, ShardExtents


def check_working_set(bound: BoundPlan, cache_bytes: int) -> None:
    """Raise CacheTooSmall if the cache holds less than a plan's order needs at a time (`Order.working_set`).

    Such a cache would have to fetch whole extents for single windows.
    """
    order = bound.plan.order
    sizes = [
        _sizes(bound, number, staged) for number in range(len(bound.plan.sources)) for staged in bound.staged
    ]
    working_sets = _working_sets(order, sizes)
    needed = _total(working_sets)
    if needed <= cache_bytes:
        return
    _, reads, remedy = working_sets[0]
    if not reads:
        why, remedy = _random_access(bound, sizes, cache_bytes)
    else:
        why, remedy = f"{reads} {needed:,} bytes", f"{remedy}, or a larger --cache-bytes"
        if not bound.sampler.is_window:
            why += ", where shards count as a whole: a row may lie anywhere in its shard"
    raise CacheTooSmall(
        f"the cache holds {cache_bytes:,} bytes, and with order {order} {why}",
        parameter="plan",
        received=f"{needed} bytes",
        accepted=f"at most {cache_bytes} bytes",
        remedy=remedy,
    )


def _working_sets(order: Order, sizes: list[ExtentSizes]) -> list[WorkingSet]:
    return [order.working_set(each) for each in sizes]


def _total(working_sets: list[WorkingSet]) -> int:
    return sum(each.num_bytes for each in working_sets)


def _extents(bound: BoundPlan, numbers: NDArray[np.intp], staged: Extents) -> ShardExtents:
    """See `Extents.of_shards`."""
    num_tokens = [bound.shards[number][1].num_tokens for number in numbers.tolist()]
    return staged.of_shards(numbers, np.array(num_tokens, dtype=np.int64))


def _sizes(bound: BoundPlan, source: int, staged: Extents) -> ExtentSizes:
    """Return the extents of a source, of its tokens or of its loss masks, and which rows read them.

    Where documents are mixed, or a view leaves some out, a row may lie anywhere in its shard: then the
    extents of a shard count as one. Those of shards on this machine have no bytes.
    """
    sampler, numbers = bound.sampler, np.flatnonzero(bound.source_of_shard == source)
    assert sampler.rows.shard_row is not None  # a plan of others is not bound to staged corpora
    first_row = sampler.rows.shard_row.astype(np.int64)
    rows = np.diff(first_row)[numbers]
    which, first_bytes, num_bytes, itemsizes, within = _extents(bound, numbers, staged)
    starts = np.concatenate(([0], rows.cumsum()))
    if not sampler.is_window:
        total = np.bincount(which, weights=num_bytes, minlength=len(numbers)).astype(np.int64)
        return ExtentSizes(total, starts[:-1], starts[1:])
    windows = sampler.windows
    low, high = (np.zeros_like(which), rows[which]) if within is None else within
    begins = (first_bytes // itemsizes - windows.seq_len - 1) // windows.stride + 1
    ends = -(-first_bytes // (itemsizes * windows.stride))  # rows that begin before the extent
    is_last = np.append((which[1:] != which[:-1]) | (low[1:] != low[:-1]), True)
    ends = np.where(is_last, high, np.append(ends[1:], 0))
    begins, ends = (starts[which] + np.clip(each, low, high) for each in (begins, ends))
    return ExtentSizes(num_bytes, begins, ends)


def _random_access(bound: BoundPlan, sizes: list[ExtentSizes], cache_bytes: int) -> tuple[str, str]:
    """Return what an order costs that reads windows anywhere, and an order that does not."""
    total = sum(int(each.num_bytes.sum()) for each in sizes)
    num_extents = sum(staged.num_extents for staged in bound.staged)
    sampler, placed = bound.sampler, bound.sampler.timeline.stages[0]
    rows, what = placed.global_batch_size, "windows" if sampler.is_window else "pieces"
    touched = min(num_extents, placed.step_windows if sampler.is_window else rows * sampler.rows.row_pieces)
    new = touched * (1 - cache_bytes / total)
    order = json.dumps(_fitting(bound, sizes, cache_bytes).to_json())
    used = rows * (placed.seq_len + 1) * bound.token_bytes
    return (
        f"each step of {rows} rows reads {what} anywhere in {num_extents} extents, which have {total:,} "
        f"bytes together, so it touches at most {touched} of them; about {new:.0f} of those are not in the "
        f"cache: each step would fetch {new * total / num_extents:,.0f} bytes and use {used:,}",
        f'bounded shuffle, for example "order": {order}, or a larger --cache-bytes',
    )


def _fitting(bound: BoundPlan, sizes: list[ExtentSizes], cache_bytes: int) -> BoundedShuffle:
    """Return a bounded shuffle that fits the cache: of blocks of a shard, or of a part of one."""
    assert bound.sampler.rows.shard_row is not None
    shard = max(1, int(np.median(np.diff(bound.sampler.rows.shard_row.astype(np.int64)))))
    block = shard
    while block:
        needed = _total(_working_sets(BoundedShuffle(block_windows=block, group_blocks=1), sizes))
        if needed <= cache_bytes:
            return BoundedShuffle(block_windows=block, group_blocks=max(1, cache_bytes // max(1, needed)))
        block //= 2
    return BoundedShuffle(block_windows=shard, group_blocks=1)
