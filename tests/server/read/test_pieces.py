"""Rows that are put together from pieces, read from a cold disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.errors import CorpusChanged
from corpus_server.plan import Plan, Stage
from corpus_server.read import gather
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.gather import PieceSelection
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


def select(bound: BoundPlan, *pieces: np.ndarray) -> PieceSelection:
    return bound.gatherer.select_pieces(pieces, bound.dtype)  # type: ignore[arg-type]


def test_once_a_piece_came_from_disk_the_rest_are_asked_for_at_once(
    paths: list[Path], bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        gather, "read_ahead", lambda at, sizes: asked.extend(zip(at.tolist(), sizes.tolist(), strict=True))
    )
    all_pieces, borders = scattered_pieces(60)
    for path in paths:
        drop(path)
    selection = select(bound, all_pieces, borders)
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


@pytest.mark.parametrize("part", [slice(0, 0), slice(5, 5), slice(4, 5), slice(0, 5), slice(3, None)])
def test_any_rows_can_be_read(bound: BoundPlan, part: slice) -> None:
    all_pieces, borders = scattered_pieces(5)
    tokens = [some_tokens(NUM_TOKENS, seed=number) for number in range(2)]
    rows = [
        np.concatenate([tokens[number][at : at + size] for number, at, size in all_pieces[row : row + 2]])
        for row in range(0, 10, 2)
    ]
    found = select(bound, all_pieces, borders)
    if rows[part]:
        assert np.array_equal(found.read(part), rows[part])


def test_a_change_during_the_copy_is_found_after_it(
    paths: list[Path], bound: BoundPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the rows of the changed shard are refused."""
    all_pieces, borders = scattered_pieces(2)
    all_pieces[1:, 0] = 0, 1, 1  # each row lies in one shard
    selection = select(bound, all_pieces, borders)
    selection.check_unchanged(slice(0, 2))
    monkeypatch.setattr(gather, "num_major_faults", lambda: paths[1].write_bytes(bytes(2 * NUM_TOKENS)))
    selection.read(slice(0, 1))
    with pytest.raises(CorpusChanged, match=r"1\.bin: written to since it was opened"):
        selection.read(slice(1, 2))
    with pytest.raises(CorpusChanged, match=r"1\.bin"):
        selection.check_unchanged(slice(0, 2))
