"""Requests that wait for shards: who goes on when one has come, and who has waited long enough."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import cast

import pytest

from corpus_server.errors import CorpusChanged, CorpusServerError, NotStaged
from corpus_server.readers.waiting import WaitingRequests
from corpus_server.stores import StagedFile

A, B, C = (cast("StagedFile", name) for name in "abc")


@pytest.fixture
def waiting() -> WaitingRequests:
    return WaitingRequests()


def add(waiting: WaitingRequests, files: str, missing: str, deadline: float = 10.0) -> Future[None]:
    return waiting.add(cast("set[StagedFile]", set(files)), cast("set[StagedFile]", set(missing)), deadline)


def test_a_request_goes_on_when_the_last_of_its_shards_has_come(waiting: WaitingRequests) -> None:
    both, one, other = add(waiting, "abc", "ab"), add(waiting, "a", "a"), add(waiting, "bc", "c")
    assert waiting.files() == {A, B, C}
    assert sorted(waiting.missing()) == ["a", "b", "c"]
    waiting.finish(A, None)
    assert [each.done() for each in (both, one, other)] == [False, True, False]
    assert (one.result(0), waiting.missing()) == (None, [B, C])
    waiting.finish(C, None)
    assert (waiting.files(), waiting.missing(), other.result(0)) == ({A, B, C}, [B], None)
    waiting.finish(B, None)
    assert (waiting.files(), waiting.missing(), both.result(0)) == (set(), [], None)


def test_those_of_the_oldest_request_come_first_and_each_once(waiting: WaitingRequests) -> None:
    for missing in ("c", "a", "c", "b", "a"):
        add(waiting, "abc", missing)
    assert waiting.missing() == [C, A, B]


def test_a_failure_ends_all_requests_that_wait_for_the_shard(waiting: WaitingRequests) -> None:
    failed = [add(waiting, "ab", "ab"), add(waiting, "a", "a")]
    other = add(waiting, "b", "b")
    error = CorpusChanged("a was replaced")
    waiting.finish(A, error)
    assert [each.exception(0) for each in failed] == [error, error]
    assert (waiting.files(), waiting.missing(), other.done()) == ({B}, [B], False)


def test_a_shard_that_nobody_waits_for_changes_nothing(waiting: WaitingRequests) -> None:
    request = add(waiting, "ab", "b")
    waiting.finish(A, CorpusChanged("a was replaced"))
    waiting.finish(C, None)
    assert (request.done(), waiting.files(), waiting.missing()) == (False, {A, B}, [B])


def test_a_request_ends_at_its_deadline_with_the_error_for_what_it_misses(waiting: WaitingRequests) -> None:
    late, latest, first = (
        add(waiting, "abc", "ab", 5.0),
        add(waiting, "c", "c", 7.0),
        add(waiting, "a", "a", 3.0),
    )
    errors: list[CorpusServerError] = []

    def error(missing: Collection[StagedFile]) -> CorpusServerError:
        errors.append(NotStaged("".join(sorted(map(str, missing))), retry_after_seconds=1))
        return errors[-1]

    assert waiting.first_deadline() == 3.0
    waiting.expire(2.9, error)
    assert (waiting.first_deadline(), errors) == (3.0, [])
    waiting.expire(3.0, error)
    assert (waiting.first_deadline(), first.exception(0)) == (5.0, errors[0])
    waiting.expire(6.9, error)
    assert (waiting.first_deadline(), late.exception(0), latest.done()) == (7.0, errors[1], False)
    waiting.expire(8.0, error)
    assert (waiting.first_deadline(), latest.exception(0)) == (float("inf"), errors[2])
    assert [each.detail for each in errors] == ["a", "ab", "c"]
    assert waiting.files() == set()
