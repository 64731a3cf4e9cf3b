"""Whether a cache can hold the shards that a plan's order needs at a time.

    order             shards that must be there
    sequential        the one that is read, and the next
    bounded shuffle   those of the group that is read, and of the next
    shuffle, random   all: every step reads windows of shards anywhere

A cache that holds less would have to fetch whole shards for single windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import CacheTooSmall
from corpus_server.plan import BoundedShuffle
from corpus_server.read.bound_plan import BoundPlan

_Bytes = NDArray[np.int64]


def check_working_set(bound: BoundPlan, cache_bytes: int) -> None:
    """Refuse a plan that cannot keep up with this cache, and say why.

    Raises:
        CacheTooSmall: with the arithmetic.
    """
    needed = sum(_needed_bytes(bound, source) for source in range(len(bound.plan.sources)))
    if needed <= cache_bytes:
        return
    order, rows = bound.plan.order, bound.plan.stages[0].global_batch_size
    sizes = [file.size_bytes for file in bound.staged if file is not None]
    total, num_shards = sum(sizes), len(sizes)
    if isinstance(order, BoundedShuffle):
        why = f"two groups of {order.group_blocks} blocks touch shards of {needed:,} bytes together"
        remedy = "fewer group_blocks, block_windows of a shard's windows, or a larger --cache-bytes"
    elif order == "sequential":
        why = f"two shards after one another have up to {needed:,} bytes"
        remedy = "a larger --cache-bytes, or smaller shards"
    else:
        new = min(num_shards, rows) * (1 - cache_bytes / total)
        why = (
            f"each step of {rows} rows reads windows of up to {min(num_shards, rows)} of {num_shards} "
            f"shards at random, {total:,} bytes together: about {new:.0f} of them, "
            f"{new * total / num_shards:,.0f} bytes, would have to be fetched for every step"
        )
        remedy = (
            f'bounded shuffle, for example "order": {{"shuffle": {{"block_windows": {_shard_windows(bound)}, '
            f'"group_blocks": {_fitting_blocks(cache_bytes, max(sizes))}}}}}, or a larger --cache-bytes'
        )
    raise CacheTooSmall(
        f"the cache holds {cache_bytes:,} bytes, and with order {order} {why}",
        parameter="plan",
        received=f"{needed} bytes",
        accepted=f"at most {cache_bytes} bytes",
        remedy=remedy,
    )


def _needed_bytes(bound: BoundPlan, source: int) -> int:
    """Return the most bytes of shards that a source needs at a time."""
    name, order = bound.plan.sources[source], bound.plan.order
    of_source = [number for number, (its, _) in enumerate(bound.shards) if its == name]
    files = [bound.staged[number] for number in of_source]
    sizes = np.array([0 if file is None else file.size_bytes for file in files], dtype=np.int64)
    total = int(sizes.sum())
    if order == "sequential":
        return min(total, int((sizes[:-1] + sizes[1:]).max(initial=0))) or total
    if not isinstance(order, BoundedShuffle):
        return total
    first_window = bound.sampler.windows.first_window.astype(np.int64)
    ends = first_window[[each + 1 for each in of_source]] - first_window[of_source[0]]
    starts = np.arange(0, int(ends[-1]), order.block_windows)
    stops = np.minimum(starts + order.block_windows, ends[-1])
    # A block reads every shard from the one of its first window to the one of its last.
    before = np.concatenate(([0], np.cumsum(sizes)))
    low, high = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, stops, side="left")
    blocks: _Bytes = np.sort(before[high + 1] - before[low])
    return min(total, 2 * int(blocks[-order.group_blocks :].sum()))


def _shard_windows(bound: BoundPlan) -> int:
    windows = np.diff(bound.sampler.windows.first_window.astype(np.int64))
    return max(1, int(np.median(windows)))


def _fitting_blocks(cache_bytes: int, shard_bytes: int) -> int:
    """Return how many blocks of a shard's size make a group: each may lie across two shards."""
    return max(1, cache_bytes // (4 * shard_bytes))
