"""A plan over open corpora: what it says of itself, and whose tokens a step holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidPlan
from corpus_server.plan import ROWS, Plan
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.description import describe
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_npy, write_raw

STAGES: list[dict[str, Any]] = [
    {"from_step": 0, "global_batch_size": 8, "mixture": {"a": 3, "b": 1}},
    {"from_step": 5, "global_batch_size": 4, "mixture": {"b": 1}, "exclude": {"b": [[0, 50]]}},
]
PLAN = Plan.from_json({"seq_len": 10, "seed": 1, "stages": STAGES, "skip_steps": [[1, 3]]})


def plan_of(stage: dict[str, Any]) -> Plan:
    return Plan.from_json({"seq_len": 10, "seed": 1, "stages": [{**stage, "from_step": 0}]})


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    folder = tmp_path_factory.mktemp("bound")
    (folder / "a").mkdir()
    write_raw(folder / "a" / "0.bin", some_tokens(501))
    write_raw(folder / "a" / "1.bin", some_tokens(301))
    write_npy(folder / "b.npy", some_tokens(201, dtype="uint32"), dtype="uint32")
    specs = [CorpusSpec(name="a", path=folder / "a", eot=7), CorpusSpec(name="b", path=folder / "b.npy")]
    with Catalog.open(specs) as opened:
        yield opened


@pytest.fixture(scope="module")
def bound(catalog: Catalog) -> BoundPlan:
    return catalog.bind(PLAN, Budget())


def test_a_plan_describes_its_sources_stages_and_shards(bound: BoundPlan) -> None:
    fingerprints = bound.plan.fingerprints
    shards = np.concatenate([bound.sampler.locate(step)[0][:, 0] for step in range(3)])
    before_skips = bound.sampler.timeline.stages[1].positions.tolist()
    assert sum(before_skips) == 5 * 8
    assert all(
        at >= rows for at, rows in zip(before_skips, ((shards < 2).sum(), (shards == 2).sum()), strict=True)
    )
    raw = {"format": "raw", "dtype": "uint16", "data_offset": 0, "corpus": "a"}
    # All tokens of so small corpora are sampled.
    largest = {
        name: max(int(shard.tokens.max()) for its, shard in bound.shards if its == name) for name in "ab"
    }
    described = {
        "sources": {
            "a": {
                "num_windows": 80,
                "steps_per_epoch": 80 / 6,
                "fingerprint": fingerprints["a"],
                "eot": 7,
                "eot_first": False,
                "num_masks": 0,
                "tokenizer_identity": None,
                "vocab_size": None,
                "largest_id": largest["a"],
            },
            "b": {
                "num_windows": 20,
                "steps_per_epoch": 20 / 4,
                "fingerprint": fingerprints["b"],
                "eot": None,
                "eot_first": False,
                "num_masks": 0,
                "tokenizer_identity": None,
                "vocab_size": None,
                "largest_id": largest["b"],
            },
        },
        "num_stages": 2,
        "stages": [
            {
                "from_step": 0,
                "first_step": 0,
                "global_batch_size": 8,
                "seq_len": 10,
                "weights_65536": {"a": 49152, "b": 16384},
                "positions": {"a": 0, "b": 0},
                "excluded_windows": {},
            },
            {
                "from_step": 5,
                "first_step": 3,
                "global_batch_size": 4,
                "seq_len": 10,
                "weights_65536": {"b": 65536},
                "positions": dict(zip("ab", before_skips, strict=True)),
                "excluded_windows": {"a": 0, "b": 5},
            },
        ],
        "warnings": [
            "the tokenizers of the plan's corpora could not be compared: that of a, b is not known; serve "
            "NAME=PATH,tokenizer=FILE to say it"
        ],
        "num_steps": None,
        "dtype": "uint32",
        "loss_mask_dtype": "uint8",
        "order_repeats": False,
        "fills_ends": False,
        "indices": "windows",
        "shards": [
            {**raw, "name": "0.bin", "file": "0.bin", "num_tokens": 501, "size_bytes": 1002},
            {**raw, "name": "1.bin", "file": "1.bin", "num_tokens": 301, "size_bytes": 602},
            {
                "corpus": "b",
                "name": "b.npy",
                "file": "b.npy",
                "format": "npy",
                "dtype": "uint32",
                "data_offset": 128,
                "num_tokens": 201,
                "size_bytes": 932,
            },
        ],
    }
    assert describe(bound) == described


def test_a_bound_plan_holds_the_shards_of_its_sources_only(catalog: Catalog) -> None:
    bound = catalog.bind(plan_of(STAGES[1]), Budget())
    assert [(name, shard.name) for name, shard in bound.shards] == [("b", "b.npy")]
    assert (list(bound.corpora), bound.is_staged, bound.dtype) == (["b"], False, np.dtype("uint32"))


def test_the_memory_of_a_plan_grows_with_its_stages(catalog: Catalog, bound: BoundPlan) -> None:
    alone = catalog.bind(plan_of(STAGES[0]), Budget())
    assert 9_500 < alone.num_bytes < bound.num_bytes < 13_000


def test_rows_that_end_with_end_of_text_need_its_id(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows fill their ends, also those that follow from no table: nothing stands in for the id."""
    monkeypatch.setattr(ROWS.kinds[0], "fills_ends", True)
    with pytest.raises(InvalidPlan, match="rows windows: corpus 'b' has no known end-of-text id") as caught:
        catalog.bind(PLAN, Budget())
    assert caught.value.remedy == "name it: corpus-server serve b=PATH,eot=ID"
    known = catalog.bind(plan_of({"global_batch_size": 2, "mixture": {"a": 1}}), Budget())
    assert known.pieces(0, range(2)).places.tolist() == known.sampler.pieces(0, range(2)).places.tolist()


def test_plans_over_the_same_corpora_share_their_shards_and_windows(catalog: Catalog) -> None:
    seeds = [Plan.from_json({"seq_len": 10, "seed": seed, "stages": STAGES}) for seed in range(2)]
    one, other = (catalog.bind(each, Budget()) for each in seeds)
    assert one.gatherer is other.gatherer
    assert one.sampler.windows is other.sampler.windows
    longer = catalog.bind(Plan.from_json({"seq_len": 11, "stages": STAGES}), Budget())
    assert longer.gatherer is one.gatherer
    assert longer.sampler.windows is not one.sampler.windows
    assert catalog.bind(plan_of(STAGES[1]), Budget()).gatherer is not one.gatherer


def test_all_steps_of_a_stage_hold_tokens_of_the_same_source(bound: BoundPlan) -> None:
    first, second = (bound.source_of(step) for step in (0, 3))
    assert bound.source_of(2) is first
    assert (first.plan_id, first.names, first.shares.tolist()) == (bound.plan.id, ("a", "b"), [0.75, 0.25])
    assert (second.plan_id, second.names, second.shares.tolist()) == (bound.plan.id, ("b",), [1.0])
