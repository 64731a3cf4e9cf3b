"""Which orders a cache can keep up with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CacheTooSmall
from corpus_server.plan import BoundedShuffle, Order, Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.working_set import check_working_set
from tests.corpora import some_tokens
from tests.stores import WebServer

pytest.importorskip("obstore")

SIZES = (2000, 4000, 6000)  # bytes of three sources; 99, 199 and 299 windows


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    files = {f"/{size}.bin": some_tokens(size // 2).tobytes() for size in SIZES}
    with WebServer(files) as server:
        specs = [CorpusSpec.parse(f"c{size}={server.url}/{size}.bin") for size in SIZES]
        with Catalog.open(specs, cache_dir=tmp_path_factory.mktemp("cache")) as opened:
            yield opened


def bound(catalog: Catalog, order: Order | BoundedShuffle, *sizes: int) -> BoundPlan:
    mixture = {f"c{size}": 1 / len(sizes) for size in sizes}
    return catalog.bind(Plan(seq_len=10, order=order, stages=(Stage(global_batch_size=4, mixture=mixture),)))


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


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_unbounded_orders_need_every_shard(catalog: Catalog, order: Order) -> None:
    assert needed(bound(catalog, order, *SIZES)) == sum(SIZES)


def test_a_corpus_of_one_shard_needs_it(catalog: Catalog) -> None:
    assert needed(bound(catalog, "sequential", 4000)) == 4000
    assert needed(bound(catalog, BoundedShuffle(block_windows=10, group_blocks=3), 4000)) == 4000


def test_the_arithmetic_is_told(catalog: Catalog) -> None:
    with pytest.raises(CacheTooSmall) as caught:
        check_working_set(bound(catalog, "shuffle", *SIZES), 6000)
    assert "6,000 bytes" in caught.value.detail
    assert "12,000 bytes" in caught.value.detail
    assert "block_windows" in str(caught.value.remedy)


def test_local_shards_need_no_cache(tmp_path: Path) -> None:
    (tmp_path / "web.bin").write_bytes(bytes(4000))
    with Catalog.open([CorpusSpec.parse(f"web={tmp_path}/web.bin")]) as local:
        plan = Plan(seq_len=10, stages=(Stage(global_batch_size=4, mixture={"web": 1.0}),))
        check_working_set(local.bind(plan), 0)
