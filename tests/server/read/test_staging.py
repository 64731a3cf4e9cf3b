from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from corpus_server.errors import CorpusChanged, NotStaged
from corpus_server.read.staging import Stager
from corpus_server.stores import Cache, StagedFile
from tests.server.read.test_prefetch import wait_until


class Failing:
    """A shard whose object was replaced in its store."""

    size_bytes = 1
    is_cached = False

    def __init__(self, name: str) -> None:
        self.name = name

    def attach(self) -> bool:
        return False

    def detach(self) -> bool:
        return True

    def touch(self) -> None:
        pass

    def stage(self, *arguments: object, urgent: bool, on_bytes: Callable[[int], object]) -> None:
        raise CorpusChanged(f"{self.name} was replaced")


@pytest.fixture
def stager(tmp_path: Path) -> Iterator[Stager]:
    with Stager(Cache(tmp_path, 1000)) as stager:
        yield stager


def test_each_failure_in_a_row_doubles_the_time_until_the_next_try(stager: Stager) -> None:
    file, error = cast("StagedFile", Failing("a")), CorpusChanged("a was replaced")
    for seconds in (1, 2, 4, 8, 16, 30, 30):
        began = time.monotonic()
        stager._finished(file, error, is_busy=False, is_new=False)
        ended = time.monotonic()
        assert began + seconds <= stager._failures[file].retry_at <= ended + seconds


def test_a_request_for_shards_that_have_just_failed_is_told_why(stager: Stager) -> None:
    """Planning ahead may have tried them before the request waits for them."""
    files = [cast("StagedFile", Failing(name)) for name in "ab"]
    for wanted in ([files[0]], [files[1]], files):
        future = stager.want(wanted, time.monotonic() + 60)
        assert future is not None
        with pytest.raises(CorpusChanged):
            future.result(20)


@pytest.mark.parametrize(
    ("size_bytes", "seconds"), [(10, 1), (100_000_000, 1), (100_000_001, 2), (10**9, 10), (10**12, 60)]
)
def test_who_waited_long_enough_is_told_when_to_come_back(
    stager: Stager, size_bytes: int, seconds: int
) -> None:
    """As long as the bytes take at 100 MB/s, until some have come; never more than a minute."""
    file = Failing("a")
    file.size_bytes = size_bytes
    error = stager._too_late([cast("StagedFile", file)])
    assert isinstance(error, NotStaged)
    assert error.retry_after_seconds == seconds
    assert f"{size_bytes} bytes are on their way, at 100 MB/s" in error.detail


def test_who_waited_long_enough_is_told_the_rate_of_what_comes(stager: Stager) -> None:
    """Of all shards that are under way; a failure that is known is told instead."""
    wanted, other = (cast("StagedFile", Failing(name)) for name in "ab")
    other.size_bytes = wanted.size_bytes = 30_000_000  # type: ignore[misc]
    stager._running.add(other)
    stager._received = (100_000_000, time.monotonic() - 10)
    error = stager._too_late([wanted])
    assert "1 shards of this answer (a ...) are being staged: 60000000 bytes" in error.detail
    assert 6 <= error.retry_after_seconds < 20  # a loaded machine looks later
    stager._running.clear()
    failed = CorpusChanged("a was replaced")
    stager._finished(wanted, failed, is_busy=False, is_new=False)
    assert stager._too_late([wanted]) is failed


class Staged(Failing):
    """A shard that comes from its store at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.num_staged = 0

    def stage(self, *arguments: object, urgent: bool, on_bytes: Callable[[int], object]) -> None:
        self.num_staged += 1

    def sync(self) -> None:
        pass


def test_a_shard_that_has_come_is_not_fetched_again_while_it_is_planned(stager: Stager) -> None:
    file = Staged("a")
    stager._planned._num_ranks[cast("StagedFile", file)] = 1
    for _ in range(20):
        with stager._changed:
            stager._start_staging()
        wait_until(lambda: file.num_staged > 0 and not stager._running)
    assert file.num_staged == 1


def test_with_nothing_to_do_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks when something has changed, and once a second: not for as long as a core is free."""
    turns: list[float] = []
    turn = Stager._turn

    def counted(stager: Stager) -> None:
        turns.append(time.monotonic())
        turn(stager)

    monkeypatch.setattr(Stager, "_turn", counted)
    with Stager(Cache(tmp_path, 1000)):
        wait_until(lambda: len(turns) >= 3)
        assert turns[-1] - turns[0] > 0.5
