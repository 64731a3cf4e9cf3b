"""Which orders a cache can keep up with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.shards import Shard
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CacheTooSmall
from corpus_server.plan import ORDERS, BoundedShuffle, Order, Plan, Stage
from corpus_server.plan.orders.order import ExtentSizes, WorkingSet, all_extents, neighbouring_extents
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.working_set import check_working_set
from corpus_server.stores import Cache, Extents, StagedFile
from corpus_server.stores.objects import Store, StoreObject
from corpus_server.work import Budget
from tests.plans import PLAIN_ORDERS


def needed(plan: BoundPlan) -> int:
    """Return the smallest cache that is accepted."""
    low, high = 0, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        try:
            check_working_set(plan, middle)
            high = middle
        except CacheTooSmall:
            low = middle
    return high


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    """Two corpora of several shards."""
    folder = tmp_path_factory.mktemp("several")
    for name, shards in SHARD_TOKENS.items():
        (folder / name).mkdir()
        for number, num_tokens in enumerate(shards):
            (folder / name / f"{number}.bin").write_bytes(bytes(2 * num_tokens))
    with Catalog.open([CorpusSpec(name=name, path=folder / name) for name in SHARD_TOKENS]) as opened:
        yield opened


SHARD_TOKENS = {  # of rows of 10 tokens the shards have these windows:
    "a": (251, 31, 5, 61, 401, 11),  # 25, 3, 0, 6, 40, 1
    "b": (71, 151, 131),  # 7, 15, 13
}


class Staged(NamedTuple):
    """A shard as if it lay in an object store."""

    file: StagedFile
    data_offset: int
    num_tokens: int
    dtype: np.dtype[np.uint16]


def staged(shard: Shard, cache: Cache) -> Staged:
    """Return a shard as if it lay in an object store, where nobody asks for it."""
    what = StoreObject(url=shard.name, path=shard.name, size_bytes=shard.size_bytes, etag="1", modified="")
    return Staged(
        StagedFile(shard.path, cast("Store", None), what, cache), 0, shard.num_tokens, np.dtype(np.uint16)
    )


def bound_as_staged(
    several: Catalog, order: Order | BoundedShuffle, *names: str, extent_bytes: int = 4096
) -> BoundPlan:
    """Bind a plan of local shards; return it as if they lay in an object store."""
    mixture = dict.fromkeys(names, 1 / len(names))
    stages = tuple(
        Stage(from_step=step, global_batch_size=rows, mixture=mixture) for step, rows in ((0, 4), (9, 2))
    )
    plan = several.bind(Plan(seq_len=10, order=order, stages=stages), Budget())
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), 0, extent_bytes)
    shards = [staged(shard, cache) for _, shard in plan.shards]
    plan.staged = (Extents(shards), Extents([None] * len(shards)))
    return plan


def having(working_set: Callable[..., WorkingSet]) -> list[str]:
    """Return the orders that are spelled by their names and need this of a cache."""
    return [each.name for each in ORDERS if each.name in PLAIN_ORDERS and each.working_set is working_set]


@pytest.mark.parametrize("order", having(all_extents))
def test_orders_that_read_anywhere_need_every_shard(several: Catalog, order: Order) -> None:
    every = 2 * sum(SHARD_TOKENS["a"] + SHARD_TOKENS["b"])
    assert needed(bound_as_staged(several, order, "a", "b")) == every


@pytest.mark.parametrize("order", having(neighbouring_extents))
@pytest.mark.parametrize(
    ("names", "pairs"), [(["a"], 2 * (61 + 401)), (["b"], 2 * (151 + 131)), (["a", "b"], 2 * (462 + 282))]
)
def test_one_after_another_the_largest_two_neighbours_of_each_source_are_needed(
    several: Catalog, order: Order, names: list[str], pairs: int
) -> None:
    assert needed(bound_as_staged(several, order, *names)) == pairs


def group_bytes(name: str, block_windows: int, group_blocks: int, extent_bytes: int) -> int:
    """Return the bytes of extents that the two largest groups touch, window by window."""
    sizes: list[int] = []
    windows: list[tuple[int, int]] = []  # the first and the last extent of each
    for tokens in SHARD_TOKENS[name]:
        first = len(sizes)
        sizes += [min(extent_bytes, 2 * tokens - start) for start in range(0, 2 * tokens, extent_bytes)]
        for start in range(0, 10 * ((tokens - 1) // 10), 10):
            begin, end = 2 * start, 2 * (start + 11)
            windows.append((first + begin // extent_bytes, first + (end - 1) // extent_bytes))
    blocks = [windows[at : at + block_windows] for at in range(0, len(windows), block_windows)]
    touched = sorted((sum(sizes[each[0][0] : each[-1][1] + 1]) for each in blocks), reverse=True)
    return min(sum(sizes), 2 * sum(touched[:group_blocks]))


@pytest.mark.parametrize("extent_bytes", [4096, 200, 64, 20, 16])
@pytest.mark.parametrize("names", [["a"], ["b"], ["a", "b"]], ids="-".join)
@pytest.mark.parametrize("block_windows", [1, 3, 7, 25, 100])
@pytest.mark.parametrize("group_blocks", [1, 2, 5])
def test_a_bounded_shuffle_needs_the_extents_of_two_groups(
    several: Catalog, names: list[str], block_windows: int, group_blocks: int, extent_bytes: int
) -> None:
    order = BoundedShuffle(block_windows=block_windows, group_blocks=group_blocks)
    expected = sum(group_bytes(name, block_windows, group_blocks, extent_bytes) for name in names)
    assert needed(bound_as_staged(several, order, *names, extent_bytes=extent_bytes)) == expected


def test_a_working_set_is_found_without_a_look_at_each_block() -> None:
    """Blocks of one window over 10^12: an array of them would take terabytes."""
    sizes, ends = np.array([10**12, 2 * 10**12, 10]), np.array([4 * 10**11, 10**12 - 1, 10**12])
    order = BoundedShuffle(block_windows=1, group_blocks=2**16)
    extents = ExtentSizes(sizes, np.concatenate(([0], ends[:-1])), ends)
    assert order.working_set(extents).num_bytes == sizes.sum()


@pytest.mark.parametrize(
    ("names", "order", "cache_bytes", "needed_bytes", "detail", "remedy"),
    [
        (
            "b",
            "random",
            500,
            706,
            "the cache holds 500 bytes, and with order random each step of 4 rows reads windows anywhere in "
            "3 extents, which have 706 bytes together, so it touches at most 3 of them; about 1 of those are "
            "not in the cache: each step would fetch 206 bytes and use 88",
            'bounded shuffle, for example "order": {"shuffle": {"block_windows": 121, "group_blocks": 1}}, '
            "or a larger --cache-bytes",
        ),
        (
            "ab",
            "shuffle",
            1000,
            2226,
            "the cache holds 1,000 bytes, and with order shuffle each step of 4 rows reads windows anywhere "
            "in 9 extents, which have 2,226 bytes together, so it touches at most 4 of them; about 2 of "
            "those are not in the cache: each step would fetch 545 bytes and use 88",
            'bounded shuffle, for example "order": {"shuffle": {"block_windows": 7, "group_blocks": 1}}, '
            "or a larger --cache-bytes",
        ),
        (
            "ab",
            "sequential",
            1000,
            1488,
            "the cache holds 1,000 bytes, and with order sequential two neighbouring extents of each source "
            "are needed at a time, up to 1,488 bytes",
            "fewer corpora, or a larger --cache-bytes",
        ),
        (
            "b",
            BoundedShuffle(block_windows=3, group_blocks=1),
            700,
            706,
            "the cache holds 700 bytes, and with order {order} two groups of 1 blocks touch together "
            "extents of 706 bytes",
            "fewer group_blocks, block_windows of a shard's windows, or a larger --cache-bytes",
        ),
    ],
    ids=["random", "two corpora", "sequential", "bounded shuffle"],
)
def test_the_refusal_tells_the_arithmetic_and_the_way_out(
    several: Catalog,
    names: str,
    order: Order | BoundedShuffle,
    cache_bytes: int,
    needed_bytes: int,
    detail: str,
    remedy: str,
) -> None:
    with pytest.raises(CacheTooSmall) as caught:
        check_working_set(bound_as_staged(several, order, *names), cache_bytes)
    error = caught.value
    assert error.detail == (detail if isinstance(order, str) else detail.format(order=order))
    assert (error.parameter, error.remedy) == ("plan", remedy)
    assert (error.received, error.accepted) == (f"{needed_bytes} bytes", f"at most {cache_bytes} bytes")


def test_local_shards_need_no_cache(tmp_path: Path) -> None:
    (tmp_path / "web.bin").write_bytes(bytes(4000))
    with Catalog.open([CorpusSpec.parse(f"web={tmp_path}/web.bin")]) as local:
        plan = Plan(seq_len=10, stages=(Stage(global_batch_size=4, mixture={"web": 1.0}),))
        check_working_set(local.bind(plan, Budget()), 0)
