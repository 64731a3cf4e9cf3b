"""When plans read extents next, compared with a look at each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.next_use import NextUse
from corpus_server.stores import Extent
from corpus_server.work import Budget
from tests.corpora import some_tokens
from tests.stores import WebServer

TOKENS = {"a": 60_000, "b": 20_000}
ROWS, STEPS = 32, (0, 100, 460, 1000)
BLOCK, GROUP = 512, 2  # windows of 4 tokens: a block has one extent of 4,096 bytes


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    pytest.importorskip("obstore")
    with WebServer(
        {f"/{name}.bin": some_tokens(count).tobytes() for name, count in TOKENS.items()}
    ) as server:
        specs = [CorpusSpec.parse(f"{name}={server.url}/{name}.bin") for name in TOKENS]
        cache = Path(tmp_path_factory.mktemp("cache"))
        with Catalog.open(specs, cache_dir=cache, extent_bytes=4096) as opened:
            yield opened


def bind(catalog: Catalog, order: object, weights: dict[str, float]) -> BoundPlan:
    stages = (Stage(global_batch_size=ROWS, mixture=weights),)
    return catalog.bind(Plan(seq_len=4, seed=3, order=order, stages=stages), Budget())  # type: ignore[arg-type]


def readings(bound: BoundPlan, num_steps: int) -> list[tuple[int, Extent]]:
    """Return which steps read which extents, in the order of the steps."""
    pieces = bound.sampler.pieces(0, range(ROWS), count=num_steps).places
    which, numbers, extents = bound.staged[0].numbered(pieces)
    pairs = np.unique(np.stack([which // ROWS, numbers]), axis=1)
    return [(step, extents[number]) for step, number in pairs.T.tolist()]


@pytest.mark.parametrize("weights", [{"a": 1.0}, {"a": 0.75, "b": 0.25}], ids=["one", "two"])
@pytest.mark.parametrize("name", ["sequential", "bounded"])
def test_they_are_those_of_the_steps_to_come(catalog: Catalog, name: str, weights: dict[str, float]) -> None:
    """Within a group, which is read at random; farther ones are farther, which is what matters."""
    bounded = {"shuffle": {"block_windows": BLOCK, "group_blocks": GROUP}}
    bound = bind(catalog, bounded if name == "bounded" else name, weights)
    read = readings(bound, STEPS[-1] + 2000)  # more than two epochs after the last
    for step in STEPS:
        expected: dict[Extent, int] = {}
        for later, extent in read:
            if later >= step:
                expected.setdefault(extent, later - step)
        extents = [each for each in expected if each != each.file.extents[-1]]
        found = NextUse(bound).steps_until(step, [each.part.key for each in extents])
        group_steps = BLOCK * GROUP / ROWS / min(weights.values()) + 1
        beyond = np.array([expected[each] for each in extents])
        far = beyond > 2 * group_steps  # those that are being read are planned, and no question
        assert far.sum() > 5
        assert (np.abs(found - beyond)[far] <= 2 * group_steps).all()


def test_of_what_no_plan_reads_nothing_is_known(catalog: Catalog) -> None:
    bound = bind(catalog, "sequential", {"a": 1.0})
    keys = [f"{'0' * 40}/0-4096", catalog.corpora["b"].shards[0].file.extents[0].part.key]  # type: ignore[attr-defined]
    assert NextUse(bound).steps_until(5, keys).tolist() == [np.inf, np.inf]
    random = bind(catalog, "random", {"a": 1.0})
    keys = [catalog.corpora["a"].shards[0].file.extents[0].part.key]  # type: ignore[attr-defined]
    assert NextUse(random).steps_until(5, keys).tolist() == [np.inf]
