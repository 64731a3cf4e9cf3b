"""Loss masks of rows: those of the tokens, whichever shards have a mask and whatever the rows are made of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.catalog import Catalog
from corpus_server.errors import CorpusChanged, FingerprintMismatch
from corpus_server.pieces import Pieces
from corpus_server.plan import Plan
from corpus_server.read import gather
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.description import describe
from corpus_server.read.reading import WindowReading, read_arrays
from corpus_server.work import Budget
from tests.corpora import some_tokens, spec, write_llmc, write_megatron, write_raw
from tests.plans import PLAIN_ORDERS, bounded

SEQ_LEN = 16
SIZES = {"some": (500, 0, 300, 700), "bare": (400, 90), "all": (600,)}
MASKED = {("some", 0), ("some", 3), ("all", 0)}
MEGATRON: dict[str, Any] = {"megatron": {"num_samples": 60}}
ORDERS: list[Any] = [*PLAIN_ORDERS, bounded(7, 2), MEGATRON]


def mask_of(name: str, number: int) -> np.ndarray:
    size, seed = SIZES[name][number], 7 + number
    if (name, number) not in MASKED:
        return np.ones(size, np.uint8)
    return np.random.default_rng(seed).integers(0, 2, size, dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    for name, sizes in SIZES.items():
        (folder / name).mkdir()
        for number, size in enumerate(sizes):
            tokens = some_tokens(size, seed=number)
            if name == "some":
                path = write_llmc(folder / name / f"{number}.bin", tokens)
            else:  # documents, for Megatron's order
                lengths = np.array_split(tokens, 20)
                path = write_megatron(folder / name / str(number), [each.tolist() for each in lengths])
            if (name, number) in MASKED:
                np.save(path.with_name(f"{path.name}.mask.npy"), mask_of(name, number).astype(bool))
    return folder


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Iterator[Catalog]:
    with Catalog.open([spec(folder / name, name) for name in SIZES]) as opened:
        yield opened


def bind(catalog: Catalog, order: Any, *names: str, **fields: Any) -> BoundPlan:
    mixture = {name: 1 / len(names) for name in names}
    if order == MEGATRON:
        order = {"megatron": {"num_samples": 60, "blend": names, "weights": list(mixture.values())}}
    stages = [{"global_batch_size": 12, "mixture": mixture}]
    return catalog.bind(
        Plan.from_json({"seq_len": SEQ_LEN, "order": order, "stages": stages, **fields}), Budget()
    )


@pytest.mark.parametrize("order", ORDERS, ids=str)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_each_row_has_the_mask_of_its_tokens(catalog: Catalog, order: Any, data: st.DataObject) -> None:
    names = [["all"], ["bare"], ["all", "bare"]]
    if order != MEGATRON:  # it needs documents
        names += [["some"], ["bare", "some"]]
    bound = bind(catalog, order, *data.draw(st.sampled_from(names)), seed=data.draw(st.integers(0, 9)))
    part = {
        "step": data.draw(st.integers(0, 2)),
        "count": data.draw(st.integers(1, 2)),
        "rank": data.draw(st.integers(0, 1)),
        "rows": 6,
    }
    reading = WindowReading(bound, Budget(), **part).masks()
    found = np.concatenate([each.copy() for each in read_arrays(reading)]).reshape(-1, SEQ_LEN + 1)
    assert (reading.shape, reading.dtype) == ((part["count"], 6, SEQ_LEN + 1), np.uint8)
    assert found.dtype == np.uint8
    shards = [(name, number) for name in bound.plan.sources for number in range(len(SIZES[name]))]
    groups = WindowReading(bound, Budget(), **part).pieces()
    pieces = [pieces[a:b] for pieces, borders in groups for a, b in pairwise(borders.tolist())]
    for row, own in zip(found, pieces, strict=True):
        expected = [mask_of(*shards[shard])[start : start + size] for shard, start, size in own.tolist()]
        assert row.tolist() == np.concatenate(expected).tolist()


def test_a_plan_says_which_sources_have_masks(catalog: Catalog) -> None:
    bound = bind(catalog, "shuffle", "some", "bare")
    described = describe(bound)
    assert bound.has_masks
    assert {name: each["num_masks"] for name, each in described["sources"].items()} == {"some": 2, "bare": 0}
    assert [shard.get("loss_mask", {}).get("file") for shard in described["shards"]] == [
        *(None, None),  # sources come in the order of their names
        *("0.bin.mask.npy", None, None, "3.bin.mask.npy"),
    ]
    assert not bind(catalog, "shuffle", "bare").has_masks


def test_the_end_of_a_row_that_no_piece_fills_is_masked(catalog: Catalog) -> None:
    bound = bind(catalog, "shuffle", "some", "bare")  # shards 0 and 1 are those of `bare`
    places = np.array([[2, 3, 9], [0, 395, 5], [5, 10, 17], [1, 2, 12]])
    pieces = Pieces(places, np.array([0, 2, 3, 4]))
    rows = bound.masks.select(pieces.ended(17, 50_000), np.dtype(bool))
    some = mask_of("some", 0), mask_of("some", 3)
    assert rows.read(slice(0, 3)).astype(int).tolist() == [
        [*some[0][3:12], *[1] * 5, *[0] * 3],
        [*some[1][10:27]],
        [*[1] * 12, *[0] * 5],
    ]


def test_masks_are_read_ahead_with_their_tokens_and_nothing_where_there_is_none(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        gather, "read_ahead", lambda at, sizes: asked.extend(zip(at.tolist(), sizes.tolist(), strict=True))
    )
    bound = bind(catalog, "shuffle", "some")
    bound.read_ahead(np.array([[0, 5], [2, 10]]), 17)
    shards = [shard for _, shard in bound.shards]
    assert shards[0].mask is not None
    tokens = [(shards[0].address + 10, 34), (shards[2].address + 20, 34)]
    assert sorted(asked) == sorted([*tokens, (shards[0].mask.address + 5, 17)])
    assert (bound.token_bytes, bind(catalog, "shuffle", "bare").token_bytes) == (3, 2)


def test_a_mask_that_changes_is_never_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(9000))
    mask = path.with_name("a.bin.mask.npy")
    mask.write_bytes(bytes([1]) * 9000)
    with Catalog.open([spec(tmp_path, "c")]) as catalog:
        bound = bind(catalog, "sequential", "c")
        part = {"step": 40, "count": 1, "rank": 0, "rows": 12}
        before = WindowReading(bound, Budget(), **part, masks=True)
        assert before.read(0, 6).all()
        mask.write_bytes(bytes(9000))
        with pytest.raises(CorpusChanged, match=r"a\.bin\.mask\.npy: written to since"):
            before.read(6, 6)
        os.truncate(mask, 4096)
        with pytest.raises(CorpusChanged, match=r"a\.bin\.mask\.npy: "):
            WindowReading(bound, Budget(), **part, masks=True).read(6, 6)
        assert len(WindowReading(bound, Budget(), **part).read(0, 12)) == 12  # the tokens are what they were


def test_a_plan_made_without_masks_is_answered_by_the_corpus_without_them(folder: Path) -> None:
    path = folder / "some"
    with Catalog.open([spec(path, "some", mask=False)]) as before:
        old = bind(before, "shuffle", "some").plan
    with Catalog.open([spec(path, "some")]) as now:
        assert bind(now, "shuffle", "some").plan.id != old.id
        with pytest.raises(FingerprintMismatch) as caught:
            now.bind(old, Budget())
        assert "mask=no" in str(caught.value.remedy)
    both = [spec(path, "bare", mask=False), spec(path, "some", earlier=("bare",))]
    with Catalog.open(both) as catalog:
        assert not catalog.bind(old, Budget()).has_masks
        assert bind(catalog, "shuffle", "some").has_masks
