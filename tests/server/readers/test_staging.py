"""Extents of object stores come before they are read: those that requests wait for, then those planned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from corpus_server.errors import (
    CacheFull,
    CorpusChanged,
    CorpusServerError,
    NotStaged,
)
from corpus_server.readers import Registry, Stager, staging
from corpus_server.stores import Cache
from tests.server.readers.fakes import FakeExtent, FakePlan, extents
from tests.serving import wait_until

pytest.importorskip("obstore")


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def stager(tmp_path: Path, registry: Registry) -> Iterator[Stager]:
    with Stager(registry, Cache(tmp_path, 1000)) as stager:
        yield stager


def want(stager: Stager, *shards: FakeExtent, seconds: float = 60.0) -> Future[None]:
    future = stager.want(extents(*shards), time.monotonic() + seconds)
    assert future is not None
    return future


def test_a_request_goes_on_when_all_its_shards_have_come(tmp_path: Path) -> None:
    received: list[int] = []
    with Stager(Registry(), Cache(tmp_path, 1000), on_bytes=received.append) as stager:
        here, other, missing = (FakeExtent(name) for name in "abc")
        here.is_cached = True
        missing.may_go_on.clear()
        future, only_other = want(stager, here, other, missing), want(stager, other)
        assert only_other.result(20) is None
        wait_until(lambda: missing.num_fetched == 1)
        assert not future.done()
        missing.may_go_on.set()
        assert future.result(20) is None
        assert (here.num_fetched, other.urgent, missing.urgent) == (0, [True], [True])
        assert (stager.num_staged, received) == (2, [7, 7])


def test_a_copy_that_was_written_to_is_thrown_away_and_fetched_anew(stager: Stager) -> None:
    shard = FakeExtent()
    shard.is_cached = shard.is_changed = True
    assert want(stager, shard).result(20) is None
    assert (shard.num_discarded, shard.num_fetched) == (1, 1)


@pytest.mark.parametrize("failure", [BlockingIOError(), CacheFull("no room")], ids=["elsewhere", "no-room"])
def test_requests_wait_while_another_process_fetches_or_there_is_no_room(
    stager: Stager, failure: Exception
) -> None:
    shard = FakeExtent("a", failure, failure)
    first = want(stager, shard)
    wait_until(lambda: shard.num_fetched)
    second = want(stager, shard)  # as the first one does
    assert (first.result(20), second.result(20)) == (None, None)
    assert shard.num_fetched == 3


def test_what_is_planned_seldom_looks_for_room_in_a_full_cache(stager: Stager, registry: Registry) -> None:
    """Each look reads all of the cache's folder: all planned extents tried it ten times a second each."""
    planned = [FakeExtent(name, *[CacheFull("no room")] * 20) for name in "abcdefghijklmn"]
    FakePlan(*planned).ask(registry)

    def num_looks() -> int:
        return sum(each.num_fetched for each in planned)

    wait_until(lambda: num_looks() > 12)  # those that were begun together, and the first one after them
    time.sleep(0.5)
    assert num_looks() < 18
    urgent = FakeExtent("urgent")
    assert want(stager, urgent).result(20) is None
    for each in planned:
        each.failures.clear()
    wait_until(lambda: all(each.is_cached for each in planned))


def test_a_request_that_has_waited_for_room_is_told_so(stager: Stager) -> None:
    with pytest.raises(CacheFull, match="no room"):
        want(stager, FakeExtent("a", *[CacheFull("no room")] * 1000), seconds=0.5).result(20)


@pytest.mark.parametrize(
    ("size_bytes", "seconds"), [(10, 1), (100_000_000, 1), (100_000_001, 2), (10**9, 10), (10**12, 60)]
)
def test_a_request_that_has_waited_long_enough_is_told_when_to_come_again(
    stager: Stager, size_bytes: int, seconds: int
) -> None:
    """As long as the bytes take at 100 MB/s, until some have come; never more than a minute."""
    shards = [FakeExtent(name, size_bytes=size_bytes // 2) for name in "ab"]
    for each in shards:
        each.may_go_on.clear()
    with pytest.raises(NotStaged) as refused:
        want(stager, *shards, seconds=0.05).result(20)
    for each in shards:
        each.may_go_on.set()
    num_bytes = size_bytes // 2 * 2
    assert refused.value.detail == (
        f"2 extents of this response (a, b ...) must be staged first: {num_bytes} bytes are on their way, at "
        f"100 MB/s about {num_bytes / 1e8:.0f} s"
    )
    assert abs(refused.value.retry_after_seconds - seconds) <= size_bytes % 2


@pytest.mark.parametrize(
    "failure",
    [
        ZeroDivisionError("no bytes"),
        RuntimeError("can't start new thread"),
        MemoryError("no memory"),
        SystemExit("at once"),
    ],
)
def test_an_unforeseen_error_is_logged_and_ends_in_an_answered_request(
    stager: Stager, failure: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The shard is tried again for the next request."""
    shard = FakeExtent("a", failure)
    with pytest.raises(CorpusServerError, match=f"staging a failed: {failure}"):
        want(stager, shard).result(20)
    assert caplog.text.count(type(failure).__name__ + ": ") == 1
    time.sleep(1.1)
    assert want(stager, shard).result(20) is None


def test_requests_end_where_no_thread_can_be_started_and_are_answered_when_there_is_one(
    stager: Stager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    shards = [FakeExtent(name) for name in "abcdef"]
    with monkeypatch.context() as patched:
        patched.setattr(stager._extents, "submit", fail)
        for each in shards:
            with pytest.raises(CorpusServerError, match="can't start new thread"):
                want(stager, each).result(20)
    time.sleep(1.1)
    for each in shards:
        assert want(stager, each).result(20) is None
    assert caplog.text.count("Traceback") == len(shards)


@pytest.mark.parametrize("failure", [MemoryError, RuntimeError, SystemExit])
def test_requests_are_answered_while_planning_fails_which_is_logged_once(
    stager: Stager, registry: Registry, failure: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """The rank is planned for again after a rest."""
    broken, times = FakePlan(FakeExtent("next")), list[float]()

    def fail(*_: object, **__: object) -> None:
        times.append(time.monotonic())
        raise failure("nothing is left")

    pieces, broken.pieces = broken.pieces, fail  # type: ignore[method-assign,assignment]
    broken.ask(registry)
    wait_until(lambda: "nothing is left" in caplog.text)
    never = FakeExtent("never")
    never.may_go_on.clear()
    with pytest.raises(NotStaged):
        want(stager, never, seconds=0.1).result(20)
    assert want(stager, FakeExtent("b")).result(20) is None
    never.may_go_on.set()
    assert len(times) == 1
    broken.pieces = pieces  # type: ignore[method-assign]
    (rank,) = stager._planned._ranks
    rank.rests_until = 0.0
    wait_until(lambda: broken.read[0].num_fetched == 1)


def test_the_stagers_thread_survives_any_error_and_requests_do_not_wait_for_ever(
    stager: Stager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same error again and again, as of a disk that is gone, is logged once."""
    failures: list[BaseException] = [MemoryError("no memory"), MemoryError("no memory"), SystemExit("now")]
    next_rank = stager._planned.next_rank

    def fail(now: float) -> object:
        if failures:
            raise failures.pop()
        return next_rank(now)

    monkeypatch.setattr(stager._planned, "next_rank", fail)
    assert want(stager, FakeExtent()).result(20) is None
    wait_until(lambda: not failures)
    assert want(stager, FakeExtent()).result(20) is None
    assert caplog.text.count("staging failed") == 2


def test_a_request_for_shards_that_have_just_failed_is_told_why(stager: Stager) -> None:
    """Planning ahead may have tried them before the request waits for them."""
    shards = [FakeExtent(name, CorpusChanged(f"{name} was replaced")) for name in "ab"]
    for wanted in (shards[:1], shards[1:], shards):
        with pytest.raises(CorpusChanged):
            want(stager, *wanted).result(20)
    assert [shard.num_fetched for shard in shards] == [1, 1]


def test_what_requests_wait_for_comes_before_what_is_planned(stager: Stager, registry: Registry) -> None:
    """And twelve at a time, those of the oldest request first."""
    planned, waited = [FakeExtent(f"planned-{n:02}") for n in range(14)], [FakeExtent("b"), FakeExtent("a")]
    for each in (*planned, *waited):
        each.may_go_on.clear()
    FakePlan(*planned).ask(registry)
    wait_until(lambda: sum(each.num_fetched for each in planned) == 12)
    assert [each.urgent for each in planned] == [[False]] * 12 + [[]] * 2
    futures = [want(stager, each) for each in waited]
    assert waited[0].num_fetched == 0
    planned[0].may_go_on.set()
    wait_until(lambda: waited[0].num_fetched == 1)
    assert (waited[0].urgent, waited[1].num_fetched, planned[12].num_fetched) == ([True], 0, 0)
    for each in (*planned, *waited):
        each.may_go_on.set()
    assert [each.result(20) for each in futures] == [None, None]
    wait_until(lambda: all(each.is_cached for each in planned))
    assert [each.num_fetched for each in planned] == [1] * 14


def test_what_is_planned_is_kept_written_out_and_fetched_again_if_it_was_removed(
    stager: Stager, registry: Registry
) -> None:
    """It is written out only when nothing is fetched, or after five seconds."""
    shard, slow = FakeExtent(), FakeExtent("slow")
    slow.may_go_on.clear()
    FakePlan(shard, slow).ask(registry)
    wait_until(lambda: shard.num_touched)
    assert (shard.num_fetched, shard.num_synced) == (1, 0)
    slow.may_go_on.set()
    wait_until(lambda: shard.num_synced == slow.num_synced == 1)
    shard.is_cached = False  # by another process
    wait_until(lambda: shard.num_fetched == 2)


def test_what_nobody_reads_or_plans_for_is_unmapped(
    stager: Stager, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds after it was asked for: a response may be under way; sooner to make room for a request."""
    idle, planned = FakeExtent("a"), FakeExtent("b")
    for each in (idle, planned):
        each.is_cached = True
    FakePlan(planned).ask(registry)
    began = time.monotonic()
    assert stager.want(extents(idle, planned), time.monotonic() + 60) is None
    wait_until(lambda: idle.num_detached)
    assert time.monotonic() - began >= 2
    assert stager.want(extents(idle, planned), time.monotonic() + 60) is None
    assert want(stager, FakeExtent("urgent")).result(20) is None
    assert (idle.num_detached, planned.num_detached) == (2, 0)
    real = time.monotonic
    monkeypatch.setattr(staging.time, "monotonic", lambda: real() + 61)  # the rank is silent
    wait_until(lambda: planned.num_detached and planned.num_released)


def test_what_a_response_mapped_anew_is_let_go_in_the_end(tmp_path: Path) -> None:
    cache, extent = Cache(tmp_path, 1000), FakeExtent()
    with Stager(Registry(), cache):
        cache.on_attached(extent)
        wait_until(lambda: extent.num_detached)


def test_closing_ends_its_threads_and_the_requests_that_wait(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    stager = Stager(Registry(), Cache(tmp_path, 1000))
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("stager", True)  # a cache's disk that hangs keeps no process
    shard = FakeExtent("a", *[BlockingIOError()] * 1000)
    future = want(stager, shard)
    wait_until(lambda: shard.num_fetched > 0)
    for _ in range(2):
        stager.close()
    requests: list[Callable[[], object]] = [future.result, lambda: want(stager, shard)]  # before and after
    for result in requests:
        with pytest.raises(NotStaged, match="the server is shutting down"):
            result()
    assert set(threading.enumerate()) <= before


def test_without_stores_there_is_nothing_to_do(registry: Registry) -> None:
    before = set(threading.enumerate())
    with Stager(registry, None):
        FakePlan(FakeExtent()).ask(registry)
        assert set(threading.enumerate()) <= before
