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
        gatherer=gatherer, locate=lambda: locations, count=5, rows=3, length=33, dtype=corpus.dtype
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
    expected = [[shards[s][a : a + 33].tolist() for s, a in step] for step in reading.locations.tolist()]
    assert tokens.tolist() == expected


def test_windows_are_located_once_and_not_before_they_are_read(opened: tuple[Corpus, Gatherer]) -> None:
    """Sizes are checked without it, and two passes over an answer locate once."""
    corpus, gatherer = opened
    calls = []

    def locate() -> np.ndarray:
        calls.append(None)
        return np.array([[[0, 3], [2, 1]]], np.int64)

    reading = Windows(gatherer=gatherer, locate=locate, count=1, rows=2, length=9, dtype=corpus.dtype)
    assert (num_bytes(reading), len(list(pieces(reading, 40)))) == (72, 2)
    assert calls == []
    assert (read_all(reading) == read_all(reading)).all()
    assert len(calls) == 1


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
def test_pieces_through_any_buffer_are_the_whole(
    opened: tuple[Corpus, Gatherer], kind: object, units: int, spare: int
) -> None:
    reading: Reading = kind(opened)  # type: ignore[operator]
    buffer = np.empty(units * reading.unit_tokens * 4 + spare, np.uint8)
    whole = read_all(reading).tobytes()
    parts = list(pieces(reading, buffer.nbytes))
    assert [first for first, _ in parts] == list(range(0, reading.num_units, units))
    assert sum(count for _, count in parts) == reading.num_units
    assert b"".join(bytes(read_piece(reading, part, buffer)) for part in parts) == whole
    assert checksum(reading, buffer, b"prefix").digest() == xxhash.xxh3_64(b"prefix" + whole).digest()
    last = parts[-1][1] * reading.unit_tokens * 4
    assert bytes(buffer[:last]) == whole[-last:]


def test_nothing_has_no_pieces(opened: tuple[Corpus, Gatherer]) -> None:
    corpus, gatherer = opened
    nothing = TokenRange(corpus=corpus, gatherer=gatherer, start=5, stop=5)
    assert list(pieces(nothing, 100)) == []
    assert read_all(nothing).shape == (0,)
    digest = checksum(nothing, np.empty(8, np.uint8))
    assert digest.digest() == xxhash.xxh3_64(b"").digest()


def test_the_widest_type_of_signed_and_unsigned_holds_both(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.array([-1, 5], "int32"))
    np.save(tmp_path / "1.npy", np.array([65535, 7], "uint16"))
    with Corpus.open(tmp_path, name="c") as corpus:
        reading = TokenRange(corpus=corpus, gatherer=Gatherer(corpus.shards), start=0, stop=4)
        assert (corpus.dtype.name, read_all(reading).tolist()) == ("int32", [-1, 5, 65535, 7])
