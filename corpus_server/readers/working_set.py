"""Whether a cache can hold the shards that a plan's order needs at a time, see `Order.working_set`.

A cache that holds less would have to fetch whole shards for single windows.
"""

from __future__ import annotations

import json

import numpy as np

from corpus_server.errors import CacheTooSmall
from corpus_server.plan import BoundedShuffle
from corpus_server.plan.orders.order import ShardSizes
from corpus_server.read.bound_plan import BoundPlan


def check_working_set(bound: BoundPlan, cache_bytes: int) -> None:
    """Refuse a plan that cannot keep up with this cache, and say why.

    Raises:
        CacheTooSmall: with the arithmetic.
    """
    order, plan = bound.plan.order, bound.plan
    working_sets = [order.working_set(_sizes(bound, name)) for name in plan.sources]
    needed = sum(each.num_bytes for each in working_sets)
    if needed <= cache_bytes:
        return
    _, reads, remedy = working_sets[0]
    if reads:
        why, remedy = f"{reads} {needed:,} bytes", f"{remedy}, or a larger --cache-bytes"
    else:
        why, remedy = _random_access(bound, cache_bytes)
    raise CacheTooSmall(
        f"the cache holds {cache_bytes:,} bytes, and with order {order} {why}",
        parameter="plan",
        received=f"{needed} bytes",
        accepted=f"at most {cache_bytes} bytes",
        remedy=remedy,
    )


def _sizes(bound: BoundPlan, name: str) -> ShardSizes:
    numbers = [number for number, (its, _) in enumerate(bound.shards) if its == name]
    files = [bound.staged[number] for number in numbers]
    num_bytes = np.array([0 if file is None else file.size_bytes for file in files], dtype=np.int64)
    first_window = bound.sampler.windows.shard_window.astype(np.int64)
    return ShardSizes(num_bytes, first_window[np.array(numbers) + 1] - first_window[numbers[0]])


def _random_access(bound: BoundPlan, cache_bytes: int) -> tuple[str, str]:
    """Return what an order costs that reads windows of shards anywhere, and an order that does not."""
    sizes = [file.size_bytes for file in bound.staged if file is not None]
    total, num_shards, rows = sum(sizes), len(sizes), bound.plan.stages[0].global_batch_size
    touched = min(num_shards, rows)
    new = touched * (1 - cache_bytes / total)
    windows = np.diff(bound.sampler.windows.shard_window.astype(np.int64))
    better = BoundedShuffle(
        block_windows=max(1, int(np.median(windows))),
        group_blocks=max(1, cache_bytes // (4 * max(sizes))),  # each block may lie across two shards
    )
    return (
        f"each step of {rows} rows reads windows of up to {touched} of {num_shards} "
        f"shards at random, {total:,} bytes together: about {new:.0f} of them, "
        f"{new * total / num_shards:,.0f} bytes, would have to be fetched for every step",
        f'bounded shuffle, for example "order": {json.dumps(better.to_json())}, or a larger --cache-bytes',
    )
