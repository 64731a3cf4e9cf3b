"""Rows that are put together from pieces, read from a cold disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.plan import Plan, Stage
from corpus_server.read import pieces
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.pieces import PieceSelection
from tests.corpora import some_tokens, spec, write_raw
from tests.pages import drop

NUM_TOKENS, LENGTH = 1_000_000, 600


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "web"
    folder.mkdir()
    return [write_raw(folder / f"{n}.bin", some_tokens(NUM_TOKENS, seed=n)) for n in range(2)]


@pytest.fixture
def bound(paths: list[Path]) -> Iterator[BoundPlan]:
    with Catalog.open([spec(paths[0].parent, "web")]) as catalog:
        stage = Stage(global_batch_size=1, mixture={"web": 1.0})
        yield catalog.bind(Plan(seq_len=LENGTH, stages=(stage,)))


def scattered_pieces(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two pieces for each row, of 400 and 200 tokens of the two shards, and the rows' borders."""
    starts = np.random.default_rng(0).permutation(NUM_TOKENS // 5000)[: 2 * num_rows] * 5000
    shards = np.arange(2 * num_rows) % 2
    return np.stack((shards, starts, 400 - 200 * shards), axis=1), np.arange(0, 2 * num_rows + 1, 2)


def test_once_a_piece_came_from_disk_the_rest_are_asked_for_at_once(
    paths: list[Path], bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        pieces, "read_ahead", lambda at, sizes: asked.extend(zip(at.tolist(), sizes.tolist(), strict=True))
    )
    all_pieces, borders = scattered_pieces(60)
    for path in paths:
        drop(path)
    selection = PieceSelection(bound, all_pieces, borders)
    first = selection.read(slice(0, 20))
    assert bound.gatherer.cold
    assert bound.gatherer.num_faults >= 40  # reading ahead goes on after such a request
    assert asked == []
    rest = [selection.read(slice(20, 40)), selection.read(slice(40, 60))]
    addresses = [shard.address for _, shard in bound.shards]
    assert asked == [
        (addresses[number] + 2 * at, 2 * count) for number, at, count in all_pieces[40:].tolist()
    ]
    tokens = [some_tokens(NUM_TOKENS, seed=number) for number in range(2)]
    expected = [tokens[number][at : at + count] for number, at, count in all_pieces.tolist()]
    assert (np.concatenate([first, *rest]).reshape(-1) == np.concatenate(expected)).all()


def test_what_is_resident_is_not_asked_for(
    paths: list[Path], bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "read_ahead", lambda *_: pytest.fail("the page cache holds everything"))
    for path in paths:
        path.read_bytes()
    bound.gatherer.cold = True
    PieceSelection(bound, *scattered_pieces(60)).read(slice(0, 60))
    assert not bound.gatherer.cold
