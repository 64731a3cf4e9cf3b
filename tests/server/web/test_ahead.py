"""Answers made ahead: only for those who go step by step, the right ones, and within a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from corpus_server.corpus import Corpus
from corpus_server.gather import Gatherer
from corpus_server.reading import Windows
from corpus_server.settings import CorpusSpec, Settings
from corpus_server.web import ahead
from corpus_server.web.ahead import Ahead, Stream
from corpus_server.web.answers import Answering
from tests.corpora import some_tokens, write_raw

ROWS, LENGTH, STEPS = 4, 33, 300
TOKENS = some_tokens(STEPS * ROWS * LENGTH)


class Streams:
    """Streams over a corpus that is read from its start to its end; notes what was asked for."""

    def __init__(self, path: Path) -> None:
        self.asked: list[tuple[int, int]] = []
        self._corpus = Corpus.open(path, name="a")
        self._gatherer = Gatherer(self._corpus.shards)
        answering = Answering(Settings(corpora=(CorpusSpec(name="a", path=path),), state_dir=path.parent))
        self.ahead, self.close = Ahead(answering), answering.close

    def stream(self, key: str = "a", count: int = 1) -> Stream:
        def windows(step: int, number: int) -> Windows | None:
            self.asked.append((step, number))
            if step + number > STEPS:
                return None

            def locate(first: int, steps: int, row: int, rows: int) -> np.ndarray:
                starts = LENGTH * (ROWS * (step + first) + np.arange(steps * ROWS)).reshape(steps, ROWS)
                starts = starts[:, row : row + rows]
                return np.stack([np.zeros_like(starts), starts], axis=-1)

            return Windows(
                gatherer=self._gatherer,
                locate=locate,
                count=number,
                rows=ROWS,
                length=LENGTH,
                dtype=self._corpus.dtype,
            )

        size = count * ROWS * LENGTH * 2
        return Stream(key=key, count=count, num_bytes=size, checksum="tail", windows=windows)

    def body(self, key: str, step: int) -> bytes | None:
        """What is kept of a step, waited for a while."""
        for _ in range(200):
            if (delivery := self.ahead.take(key, step)) is not None:
                return b"".join(map(bytes, delivery.take()))
            time.sleep(1e-3)
        return None


@pytest.fixture
def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Streams whose runs hold 5 answers of a step each."""
    monkeypatch.setattr(ahead, "RUN_BYTES", 5 * ROWS * LENGTH * 2)
    found = Streams(write_raw(tmp_path / "a.bin", TOKENS))
    yield found
    found.close()


def answer(step: int, count: int = 1) -> bytes:
    body = TOKENS[step * ROWS * LENGTH : (step + count) * ROWS * LENGTH].tobytes()
    return body + xxhash.xxh3_64_digest(body)


@pytest.mark.parametrize("count", [1, 2])
def test_from_the_second_step_on_the_next_run_is_always_there(streams: Streams, count: int) -> None:
    stream = streams.stream(count=count)
    streams.ahead.follow(stream, 0)
    assert streams.asked == []
    for step in range(count, 100 * count, count):
        streams.ahead.follow(stream, step)
        assert streams.body("a", step + count) == answer(step + count, count)
    run = 5 // count * count  # steps of a run
    assert streams.asked == [(first, run) for first in range(2 * count, streams.asked[-1][0] + 1, run)]


def test_clients_at_many_places_make_nothing_and_take_nothing_away(streams: Streams) -> None:
    stream = streams.stream()
    for step in (10, 11):
        streams.ahead.follow(stream, step)
    for place in (50, 90, 51, 130, 91):
        streams.ahead.follow(stream, place)
    assert streams.asked == [(12, 5)]
    assert streams.body("a", 12) == answer(12)
    assert asyncio.run(streams.ahead.await_begun("a", 50)) is None


def test_a_client_that_jumps_is_followed_again(streams: Streams) -> None:
    stream = streams.stream()
    for step in (0, 1, 2, 200, 201):
        streams.ahead.follow(stream, step)
    assert streams.body("a", 202) == answer(202)
    assert streams.ahead.take("a", 3) is None


def test_the_last_steps_come_one_by_one_and_then_nothing(streams: Streams) -> None:
    stream = streams.stream()
    for step in range(STEPS - 4, STEPS):
        streams.ahead.follow(stream, step)
        assert streams.body("a", step + 1) == (answer(step + 1) if STEPS - 4 < step < STEPS - 1 else None)


def test_streams_share_a_bound_and_the_one_idle_for_longest_gives_way(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "MAX_BYTES", 20 * ROWS * LENGTH * 2)
    keys = "abcdefghijkl"
    for key in keys:
        for step in (0, 1):
            streams.ahead.follow(streams.stream(key), step)
    assert [streams.body(key, 2) == answer(2) for key in keys[1:]] == [True] * 11
    assert streams.ahead.take("a", 2) is None
