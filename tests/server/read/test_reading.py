"""Readings: any piece equals the same part of the whole, and the hash is that of the bytes sent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusChanged, InvalidParameter
from corpus_server.pieces import Pieces
from corpus_server.plan import Plan
from corpus_server.read import reading as reading_module
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.gather import Gatherer, Selection
from corpus_server.read.reading import (
    RangeReading,
    Reading,
    WindowReading,
    hash_arrays,
    num_bytes,
    read_arrays,
    read_pieces,
)
from corpus_server.work import Budget
from tests.conftest import ServedCorpus
from tests.corpora import open_corpus, some_tokens, write_raw
from tests.reference import batch, one_source

ROWS, LENGTH = 12, 33
PLAN = one_source("mixed", LENGTH - 1, 3 * ROWS, seed=7)


@pytest.fixture(scope="module")
def opened(corpora: dict[str, ServedCorpus]) -> Iterator[tuple[Corpus, Gatherer]]:
    """The corpus of mixed types: uint16, empty, uint32, uint16."""
    with open_corpus(corpora["mixed"].path, name="mixed") as corpus:
        yield corpus, Gatherer(corpus.shards)


@pytest.fixture(scope="module")
def bound(corpora: dict[str, ServedCorpus]) -> Iterator[BoundPlan]:
    with Catalog.open([CorpusSpec(name="mixed", path=corpora["mixed"].path)]) as catalog:
        yield catalog.bind(Plan.from_json(PLAN), Budget())


def whole(reading: Reading) -> np.ndarray:
    arrays = [np.empty(0, reading.dtype), *(array.reshape(-1) for array in read_arrays(reading))]
    return np.concatenate(arrays).reshape(reading.shape)


@pytest.mark.parametrize("most_rows", [1, 5, 12, 30, 4096], ids="groups-of-{}".format)
@pytest.mark.parametrize("rank", [0, 2])
def test_windows_are_the_rows_of_a_rank_however_many_are_located_at_once(
    bound: BoundPlan,
    corpora: dict[str, ServedCorpus],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    most_rows: int,
) -> None:
    """Groups of part of a step, of one and of several; 5 does not divide the rows."""
    monkeypatch.setattr(reading_module, "MAX_LOCATED_ROWS", most_rows)
    reading = WindowReading(bound, Budget(), step=4, count=3, rank=rank, rows=ROWS)
    expected = np.stack(
        [batch(PLAN, corpora["mixed"].shards, step)[0][rank * ROWS : (rank + 1) * ROWS] for step in (4, 5, 6)]
    )
    assert (reading.shape, reading.dtype.name) == ((3, ROWS, LENGTH), "uint32")
    assert num_bytes(reading) == 3 * ROWS * LENGTH * 4
    assert np.array_equal(whole(reading), expected)
    single = [reading.read(row, 1) for row in (35, 0, 13, 12, 11, 35)]
    assert np.array_equal(np.concatenate(single), expected.reshape(-1, LENGTH)[[35, 0, 13, 12, 11, 35]])
    shards = corpora["mixed"].shards
    rows = []
    for pieces, borders in reading.pieces():
        assert borders.tolist() == list(range(len(pieces) + 1))
        rows += [shards[shard][start : start + length].tolist() for shard, start, length in pieces.tolist()]
    assert rows == expected.reshape(-1, LENGTH).tolist()


def test_the_rows_that_were_located_last_are_kept(bound: BoundPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[range] = []
    locate = bound.sampler.pieces

    def counted(step: int, rows: range, **more: int) -> Pieces:
        asked.append(rows)
        return locate(step, rows, **more)

    monkeypatch.setattr(bound.sampler, "pieces", counted)
    monkeypatch.setattr(reading_module, "MAX_LOCATED_ROWS", 5)
    reading = WindowReading(bound, Budget(), step=0, count=1, rank=1, rows=ROWS)
    assert asked == []  # the size is known before anything is located
    for row in (0, 4, 2, 5, 9, 10, 11):
        reading.read(row, 1)
    assert asked == [range(12, 17), range(17, 22), range(22, 24)]


@given(data=st.data())
@settings(max_examples=80)
def test_any_range_is_the_slice_of_all_tokens(
    opened: tuple[Corpus, Gatherer], corpora: dict[str, ServedCorpus], data: st.DataObject
) -> None:
    """Borders of shards (700, 700, 1601) are preferred starts and stops."""
    corpus, gatherer = opened
    place = st.integers(0, corpus.num_tokens) | st.sampled_from([0, 699, 700, 701, 1600, 1601, 1934])
    start, stop = sorted((data.draw(place), data.draw(place)))
    tokens = whole(RangeReading(corpus, gatherer, start=start, stop=stop))
    assert (tokens.shape, tokens.dtype) == ((stop - start,), np.dtype("uint32"))
    assert (tokens == corpora["mixed"].tokens[start:stop]).all()


@pytest.mark.parametrize("kind", ["windows", "range"])
@pytest.mark.parametrize("piece_bytes", [1, 132, 133, 1000, 2**20])
def test_pieces_of_any_size_are_the_whole(
    opened: tuple[Corpus, Gatherer],
    bound: BoundPlan,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(reading_module, "PIECE_BYTES", piece_bytes)
    corpus, gatherer = opened
    reading: Reading = RangeReading(corpus, gatherer, start=600, stop=1700)
    if kind == "windows":
        reading = WindowReading(bound, Budget(), step=1, count=2, rank=0, rows=ROWS)
    expected = whole(reading).tobytes()
    sizes = [len(piece) for piece in read_pieces(reading)]
    unit_bytes = reading.unit_tokens * 4
    assert all(size == max(1, piece_bytes // unit_bytes) * unit_bytes for size in sizes[:-1])
    assert b"".join(bytes(piece) for piece in read_pieces(reading)) == expected
    assert b"".join(array.tobytes() for array in read_arrays(reading)) == expected
    digest = xxhash.xxh3_64(b"prefix")
    budget = Budget()
    hash_arrays(digest, budget, reading)
    assert budget.num_bytes == sum(sizes)
    assert digest.digest() == xxhash.xxh3_64(b"prefix" + expected).digest()


@pytest.mark.parametrize(
    "take",
    [
        lambda reading: sum(map(len, read_pieces(reading))),
        lambda reading: hash_arrays(xxhash.xxh3_64(), Budget(), reading),
    ],
    ids=["sent", "hashed"],
)
def test_a_piece_is_let_go_before_the_next_one_is_read(
    opened: tuple[Corpus, Gatherer],
    monkeypatch: pytest.MonkeyPatch,
    take: Callable[[Reading], object],
) -> None:
    """Together they would take twice the memory, and twice the cache."""
    monkeypatch.setattr(reading_module, "PIECE_BYTES", 1000)
    arrays: list[weakref.ref[np.ndarray]] = []

    class Noted(RangeReading):
        def read(self, first: int, num_units: int) -> np.ndarray:
            assert not any(array() is not None for array in arrays)
            array = super().read(first, num_units).copy()
            arrays.append(weakref.ref(array))
            return array

    take(Noted(*opened, start=0, stop=1000))
    assert len(arrays) == 4


def test_the_widest_type_of_signed_and_unsigned_holds_both(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.array([-1, 5], "int32"))
    np.save(tmp_path / "1.npy", np.array([65535, 7], "uint16"))
    with open_corpus(tmp_path, name="c") as corpus:
        reading = RangeReading(corpus, Gatherer(corpus.shards), start=0, stop=4)
        assert (corpus.dtype.name, whole(reading).tolist()) == ("int32", [-1, 5, 65535, 7])


def test_rows_of_a_shard_that_has_changed_are_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no guard, touching a page that is gone would end the process."""
    path = write_raw(tmp_path / "mixed.bin", some_tokens(4000))
    monkeypatch.setattr(Selection, "read", lambda *_: pytest.fail("it was touched"))
    with Catalog.open([CorpusSpec(name="mixed", path=path)]) as catalog:
        reading = WindowReading(
            catalog.bind(Plan.from_json(PLAN), Budget()), Budget(), step=0, count=1, rank=0, rows=ROWS
        )
        os.truncate(path, 4096)
        with pytest.raises(CorpusChanged, match="4096 now"):
            reading.read(0, 1)


def test_a_range_that_ends_outside_the_corpus_is_refused_before_anything_is_read(
    opened: tuple[Corpus, Gatherer],
) -> None:
    corpus, gatherer = opened
    with pytest.raises(InvalidParameter):
        RangeReading(corpus, gatherer, start=0, stop=corpus.num_tokens + 1)
