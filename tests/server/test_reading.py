"""Readings: any piece equals the same part of the whole, and the hash is that of the bytes sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus import Corpus
from corpus_server.gather import Gatherer
from corpus_server.reading import (
    Reading,
    TokenRange,
    Windows,
    checksum,
    num_bytes,
    pieces,
    read_all,
    read_piece,
)
from tests.conftest import ServedCorpus


@pytest.fixture(scope="module")
def opened(corpora: dict[str, ServedCorpus]) -> Iterator[tuple[Corpus, Gatherer]]:
    """The corpus of mixed types: uint16, empty, uint32, uint16."""
    with Corpus.open(corpora["mixed"].path, name="mixed") as corpus:
        yield corpus, Gatherer(corpus.shards)


def windows(opened: tuple[Corpus, Gatherer]) -> Windows:
    corpus, gatherer = opened
    locations = np.array([[[0, k], [2, 10 * k], [3, 7 * k]] for k in range(5)], np.int64)
    return Windows(
        gatherer=gatherer,
        locate=lambda step, steps, row, rows: locations[step : step + steps, row : row + rows],
        count=5,
        rows=3,
        length=33,
        dtype=corpus.dtype,
    )


def whole_range(opened: tuple[Corpus, Gatherer]) -> TokenRange:
    corpus, gatherer = opened
    return TokenRange(corpus=corpus, gatherer=gatherer, start=0, stop=corpus.num_tokens)


def test_a_batch_has_the_shape_of_its_rows(
    opened: tuple[Corpus, Gatherer], corpora: dict[str, ServedCorpus]
) -> None:
    reading = windows(opened)
    tokens = read_all(reading)
    assert (reading.shape, reading.dtype.name, num_bytes(reading)) == ((5, 3, 33), "uint32", 5 * 3 * 33 * 4)
    shards = corpora["mixed"].shards
    expected = [[shards[s][a : a + 33].tolist() for s, a in step] for step in reading.locations().tolist()]
    assert tokens.tolist() == expected


def test_windows_are_located_when_they_are_read_a_few_at_a_time(
    opened: tuple[Corpus, Gatherer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are checked without it; groups are of whole steps or within one, and the last one is kept."""
    corpus, gatherer = opened
    asked: list[tuple[int, int, int, int]] = []
    places = np.array([[[0, 3 + k], [2, 1 + k]] for k in range(5)], np.int64)

    def locate(step: int, steps: int, row: int, rows: int) -> np.ndarray:
        asked.append((step, steps, row, rows))
        return places[step : step + steps, row : row + rows]

    monkeypatch.setattr("corpus_server.reading.MAX_LOCATED_ROWS", 5)
    reading = Windows(gatherer=gatherer, locate=locate, count=5, rows=2, length=9, dtype=corpus.dtype)
    assert (num_bytes(reading), len(pieces(reading, 40))) == (360, 10)
    assert asked == []
    whole = read_all(reading).reshape(10, 9)
    assert asked == [(0, 2, 0, 2), (2, 2, 0, 2), (4, 1, 0, 2)]
    assert (np.concatenate([reading.read(row, 1) for row in range(10)]) == whole).all()
    assert asked[3:] == asked[:3]
    assert (reading.read(3, 4) == whole[3:7]).all()
    num_asked = len(asked)
    reading.read(6, 1)
    assert len(asked) == num_asked
    reading.forget()
    assert (reading.read(6, 1) == whole[6]).all()
    assert len(asked) == num_asked + 1
    monkeypatch.setattr("corpus_server.reading.MAX_LOCATED_ROWS", 1)
    small = Windows(gatherer=gatherer, locate=locate, count=5, rows=2, length=9, dtype=corpus.dtype)
    assert (read_all(small).reshape(10, 9) == whole).all()
    assert asked[-10:] == [(step, 1, row, 1) for step in range(5) for row in range(2)]


@given(data=st.data())
@settings(max_examples=80)
def test_any_range_is_the_slice_of_all_tokens(
    opened: tuple[Corpus, Gatherer], corpora: dict[str, ServedCorpus], data: st.DataObject
) -> None:
    """Borders of shards (700, 700, 1601) are preferred starts and stops."""
    corpus, gatherer = opened
    place = st.integers(0, corpus.num_tokens) | st.sampled_from([0, 699, 700, 701, 1600, 1601, 1934])
    start, stop = sorted((data.draw(place), data.draw(place)))
    reading = TokenRange(corpus=corpus, gatherer=gatherer, start=start, stop=stop)
    tokens = read_all(reading)
    assert (tokens.shape, tokens.dtype) == ((stop - start,), np.dtype("uint32"))
    assert (tokens == corpora["mixed"].tokens[start:stop]).all()


@given(kind=st.sampled_from([windows, whole_range]), units=st.integers(1, 3000), spare=st.integers(0, 3))
@settings(max_examples=60)
def test_pieces_of_any_size_are_the_whole(
    opened: tuple[Corpus, Gatherer], kind: object, units: int, spare: int
) -> None:
    reading: Reading = kind(opened)  # type: ignore[operator]
    piece_bytes = units * reading.unit_tokens * 4 + spare
    whole = read_all(reading).tobytes()
    parts = list(pieces(reading, piece_bytes))
    assert [first for first, _ in parts] == list(range(0, reading.num_units, units))
    assert sum(count for _, count in parts) == reading.num_units
    assert b"".join(bytes(read_piece(reading, part)) for part in parts) == whole
    assert checksum(reading, piece_bytes, b"prefix").digest() == xxhash.xxh3_64(b"prefix" + whole).digest()


def test_nothing_has_no_pieces(opened: tuple[Corpus, Gatherer]) -> None:
    corpus, gatherer = opened
    nothing = TokenRange(corpus=corpus, gatherer=gatherer, start=5, stop=5)
    assert list(pieces(nothing, 100)) == []
    assert read_all(nothing).shape == (0,)
    digest = checksum(nothing, 8)
    assert digest.digest() == xxhash.xxh3_64(b"").digest()


def test_the_widest_type_of_signed_and_unsigned_holds_both(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.array([-1, 5], "int32"))
    np.save(tmp_path / "1.npy", np.array([65535, 7], "uint16"))
    with Corpus.open(tmp_path, name="c") as corpus:
        reading = TokenRange(corpus=corpus, gatherer=Gatherer(corpus.shards), start=0, stop=4)
        assert (corpus.dtype.name, read_all(reading).tolist()) == ("int32", [-1, 5, 65535, 7])
