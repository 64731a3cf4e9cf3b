from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from corpus_server.errors import CorpusChanged
from corpus_server.read.staging import Stager
from corpus_server.stores import Cache, StagedFile


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
