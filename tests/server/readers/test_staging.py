from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CacheFull, CacheTooSmall, CorpusChanged, CorpusServerError, NotStaged
from corpus_server.plan import Plan, Stage
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers import staging
from corpus_server.readers.shards import Follower, PlannedShards
from corpus_server.readers.staging import Stager
from corpus_server.stores import Cache, StagedFile
from tests.corpora import some_tokens
from tests.server.readers.test_prefetch import wait_until
from tests.stores import WebServer

pytest.importorskip("obstore")


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
    assert error.detail == (
        f"1 shards of this answer (a ...) are being staged: {size_bytes} bytes are on their way, at 100 MB/s "
        f"about {size_bytes / 1e8:.0f} s"
    )


@pytest.mark.parametrize(
    ("is_running", "received", "mb_per_second", "seconds"),
    [(True, 500_000_000, 5000, 1), (True, 0, 100, 50), (False, 500_000_000, 100, 40)],
    ids=["running", "nothing has come", "nothing runs"],
)
def test_the_rate_is_that_of_the_bytes_that_came_since_shards_run(
    stager: Stager, is_running: bool, received: int, mb_per_second: int, seconds: int
) -> None:
    """In a tenth of a second at least. Three of the shards are named; what else is under way counts, too."""
    missing = [Failing(name) for name in "dcab"]
    other = Failing("e")
    for each in (*missing, other):
        each.size_bytes = 1_000_000_000
    with stager._changed:
        if is_running:
            stager._running.add(cast("StagedFile", other))
        stager._received = (received, time.monotonic() + 1000)
        error = stager._too_late(cast("list[StagedFile]", missing))
        stager._running.clear()
    num_bytes = (4 + is_running) * 10**9
    assert isinstance(error, NotStaged)
    assert error.detail == (
        f"4 shards of this answer (a, b, c ...) are being staged: {num_bytes} bytes are on their way, "
        f"at {mb_per_second} MB/s about {num_bytes / mb_per_second / 1e6:.0f} s"
    )
    assert error.retry_after_seconds == seconds


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


class Shard(Failing):
    """A shard that a store delivers at once, after some failures; remembers what was done to it.

    Args:
        failures: what its first fetches raise.
    """

    is_changed = False

    def __init__(self, name: str, *failures: Exception) -> None:
        super().__init__(name)
        self.failures = list(failures)
        self.is_cached = self.is_attached = False
        self.urgent: list[bool] = []  # of each fetch
        self.num_touched = self.num_synced = self.num_detached = self.num_discarded = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    @property
    def num_fetched(self) -> int:
        return len(self.urgent)

    def attach(self) -> bool:
        self.is_attached = self.is_cached
        return self.is_attached

    def detach(self) -> bool:
        self.num_detached += 1
        self.is_attached = False
        return True

    def discard(self) -> None:
        self.num_discarded += 1
        self.is_cached = self.is_changed = False

    def check_unchanged(self) -> None:
        if self.is_changed:
            raise CorpusChanged(f"{self.name} was written to")

    def stage(self, *arguments: object, urgent: bool, on_bytes: Callable[[int], object]) -> None:
        self.urgent.append(urgent)
        self.may_go_on.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        on_bytes(7)
        self.is_cached = True

    def touch(self) -> None:
        self.num_touched += 1

    def sync(self) -> None:
        self.num_synced += 1


def shards(*files: Shard) -> list[StagedFile]:
    return cast("list[StagedFile]", list(files))


def plan_for(stager: Stager, *files: Shard) -> None:
    """Have a rank's next steps read shards."""
    with stager._changed:
        stager._planned._num_ranks.update(dict.fromkeys(shards(*files), 1))
        stager._changed.notify()


def test_what_is_mapped_need_not_be_waited_for(stager: Stager) -> None:
    file = Shard("a")
    file.is_cached = True
    assert stager.want(shards(file), time.monotonic() + 60) is None
    assert file.num_fetched == 0


def test_a_request_goes_on_when_all_its_shards_have_come(tmp_path: Path) -> None:
    received: list[int] = []
    with Stager(Cache(tmp_path, 1000), on_bytes=received.append) as stager:
        here, other, missing = Shard("a"), Shard("b"), Shard("c")
        here.is_cached = True
        missing.may_go_on.clear()
        future = stager.want(shards(here, other, missing), time.monotonic() + 60)
        assert future is not None
        wait_until(lambda: other.is_cached and missing.num_fetched == 1)
        assert not future.done()
        missing.may_go_on.set()
        assert future.result(20) is None
        assert (here.num_fetched, other.urgent, missing.urgent) == (0, [True], [True])
        assert (stager.num_staged, received) == (2, [7, 7])


def test_a_request_for_a_shard_is_not_kept_until_the_next_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_TICK_SECONDS", 600.0)
    with Stager(Cache(tmp_path, 1000)) as stager:
        for name in "abcde":  # a later one finds the thread waiting
            future = stager.want(shards(Shard(name)), time.monotonic() + 60)
            assert future is not None
            assert future.result(20) is None
            time.sleep(0.01)


def test_a_copy_that_was_written_to_is_thrown_away_and_fetched_anew(stager: Stager) -> None:
    file = Shard("a")
    file.is_cached = file.is_changed = True
    future = stager.want(shards(file), time.monotonic() + 60)
    assert future is not None
    assert future.result(20) is None
    assert (file.num_discarded, file.num_fetched) == (1, 1)


@pytest.mark.parametrize("failure", [BlockingIOError(), CacheFull("no room")], ids=["elsewhere", "no-room"])
def test_a_request_waits_while_another_process_fetches_or_there_is_no_room(
    stager: Stager, failure: Exception
) -> None:
    file = Shard("a", failure, failure)
    future = stager.want(shards(file), time.monotonic() + 60)
    assert future is not None
    assert future.result(20) is None
    assert file.num_fetched == 3


def test_a_request_that_has_waited_for_room_is_told_so(stager: Stager) -> None:
    file = Shard("a", *[CacheFull("no room")] * 1000)
    future = stager.want(shards(file), time.monotonic() + 60)
    assert future is not None
    wait_until(lambda: file.num_fetched > 1)
    with stager._changed:
        stager._waiting.expire(math.inf, stager._too_late)
    with pytest.raises(CacheFull, match="no room"):
        future.result(20)
    assert stager._waiting.files() == set()


def test_a_request_that_has_waited_long_enough_is_told_when_to_come_again(stager: Stager) -> None:
    file = Shard("a")
    file.may_go_on.clear()
    future = stager.want(shards(file), time.monotonic() + 0.1)
    assert future is not None
    with pytest.raises(NotStaged, match="1 bytes are on their way"):
        future.result(20)
    file.may_go_on.set()


def test_an_error_that_nobody_expected_is_told_and_logged(
    stager: Stager, caplog: pytest.LogCaptureFixture
) -> None:
    future = stager.want(shards(Shard("a", ZeroDivisionError("no bytes"))), time.monotonic() + 60)
    assert future is not None
    with pytest.raises(CorpusServerError, match="staging a failed: no bytes"):
        future.result(20)
    assert "ZeroDivisionError" in caplog.text


def test_a_shard_that_failed_is_tried_again_for_the_next_request(stager: Stager) -> None:
    file = Shard("a", CorpusChanged("a was replaced"))
    future = stager.want(shards(file), time.monotonic() + 60)
    assert future is not None
    with pytest.raises(CorpusChanged):
        future.result(20)
    wait_until(lambda: stager._failures[shards(file)[0]].retry_at < time.monotonic())
    again = stager.want(shards(file), time.monotonic() + 60)
    assert again is not None
    assert again.result(20) is None
    assert stager._failures == {}


def test_what_requests_wait_for_comes_before_what_is_planned(stager: Stager) -> None:
    """And four at a time."""
    planned, waited = [Shard(f"planned-{n}") for n in range(6)], Shard("waited")
    for each in (*planned, waited):
        each.may_go_on.clear()
    plan_for(stager, *planned)
    wait_until(lambda: sum(each.num_fetched for each in planned) == 4)
    assert [each.urgent for each in planned] == [[False]] * 4 + [[]] * 2
    future = stager.want(shards(waited), time.monotonic() + 60)
    assert future is not None
    assert waited.num_fetched == 0
    planned[0].may_go_on.set()
    wait_until(lambda: waited.num_fetched == 1)
    assert (waited.urgent, planned[4].num_fetched) == ([True], 0)
    for each in (*planned, waited):
        each.may_go_on.set()
    assert future.result(20) is None
    wait_until(lambda: all(each.is_cached for each in planned))


def test_a_shard_that_takes_long_does_not_hold_up_the_next_ones(stager: Stager) -> None:
    """The rate is that of all that has come since the first of them began."""
    slow, next_one, later = Shard("a"), Shard("b"), Shard("c")
    for each in (slow, later):
        each.may_go_on.clear()
    plan_for(stager, slow)
    wait_until(lambda: slow.num_fetched == 1)
    plan_for(stager, next_one)
    wait_until(lambda: next_one.is_cached)
    received, since = stager._received
    assert (received, slow.is_cached) == (7, False)
    slow.may_go_on.set()
    wait_until(lambda: slow.is_cached and not stager._running)
    began = time.monotonic()
    assert since <= began
    plan_for(stager, later)
    wait_until(lambda: later.num_fetched == 1)
    assert stager._received[0] == 0
    assert began <= stager._received[1] <= time.monotonic()
    later.may_go_on.set()


def test_shards_are_fetched_while_others_are_still_being_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, never = Shard("a"), threading.Event()

    class Planning:
        """A rank whose steps take long to locate and have no end."""

        next = 0

        def locate(self, first: int) -> tuple[int, dict[StagedFile, int]]:
            never.wait(0.01)
            return 1, {}

    def extend(planned: PlannedShards, *about: object) -> None:
        planned._num_ranks[shards(file)[0]] = 1

    monkeypatch.setattr(PlannedShards, "next_follower", lambda planned: Planning())
    monkeypatch.setattr(PlannedShards, "extend", extend)
    with Stager(Cache(tmp_path, 1000)):
        wait_until(lambda: file.num_fetched == 1)


def test_shards_are_written_out_when_nothing_is_fetched_or_after_five_seconds(stager: Stager) -> None:
    running, old, young = Shard("a"), Shard("b"), Shard("c")
    running.may_go_on.clear()
    plan_for(stager, running)
    wait_until(lambda: running.num_fetched == 1)
    with stager._changed:
        now = time.monotonic()
        stager._unsynced.extend(zip(shards(old, young), (now - 5.1, now + 60), strict=True))
    stager._tick()
    wait_until(lambda: old.num_synced == 1)
    assert young.num_synced == 0
    with stager._changed:
        stager._unsynced[0] = (shards(young)[0], now)
    running.may_go_on.set()
    wait_until(lambda: not stager._running)
    stager._tick()
    wait_until(lambda: young.num_synced == 1)
    assert old.num_synced == 1


def test_a_second_request_waits_for_room_as_the_first_does(stager: Stager) -> None:
    file = Shard("a", *[CacheFull("no room")] * 2)
    first = stager.want(shards(file), time.monotonic() + 60)
    wait_until(lambda: file.num_fetched >= 1)
    file.may_go_on.clear()
    wait_until(lambda: shards(file)[0] in stager._failures)
    second = stager.want(shards(file), time.monotonic() + 60)
    assert first is not None
    assert second is not None
    assert not second.done()
    file.may_go_on.set()
    assert (first.result(20), second.result(20)) == (None, None)


def test_a_plan_that_fits_is_checked_once(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[object, int]] = []

    def check(bound: BoundPlan, limit_bytes: int) -> None:
        checked.append((bound, limit_bytes))
        if isinstance(bound, Large):
            raise CacheTooSmall("too large")

    class Plan:
        pass

    class Large(Plan):
        pass

    monkeypatch.setattr(staging, "check_working_set", check)
    fitting, large = Plan(), Large()
    for _ in range(3):
        stager.check_order(cast("BoundPlan", fitting))
        with pytest.raises(CacheTooSmall):
            stager.check_order(cast("BoundPlan", large))
    assert checked == [(fitting, 1000), *[(large, 1000)] * 3]


def test_a_rank_that_asks_has_the_shards_of_its_next_steps_staged(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    with (
        WebServer({f"/{name}.bin": some_tokens(300).tobytes() for name in names}) as server,
        Catalog.open(
            [CorpusSpec.parse(f"{name}={server.url}/{name}.bin") for name in names], cache_dir=tmp_path
        ) as catalog,
        Stager(catalog.cache) as stager,
    ):
        mixture = dict.fromkeys(names, 1 / 3)
        stage = Stage(global_batch_size=6, mixture=mixture)
        bound = catalog.bind(Plan(seq_len=10, order="sequential", stages=(stage,)))
        assert stager.num_staged == 0
        stager.note(bound, step=0, count=1, rank=0, world_size=1)
        wait_until(lambda: stager.num_staged == 3)
        assert all(file is not None and file.is_cached for file in bound.staged)


def test_what_is_planned_is_kept_written_out_and_fetched_again_if_it_was_removed(stager: Stager) -> None:
    file = Shard("a")
    plan_for(stager, file)
    wait_until(lambda: file.num_synced == 1 and file.num_touched > 0)
    assert file.num_fetched == 1
    file.is_cached = False  # by another process
    wait_until(lambda: file.num_fetched == 2)


def test_what_nobody_reads_or_plans_for_is_unmapped(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds after it was asked for: an answer may be under way; sooner to make room for a request."""
    idle, recent, planned = (Shard(name) for name in "abc")
    for each in (idle, recent, planned):
        each.is_cached = True
    plan_for(stager, planned)
    assert stager.want(shards(idle, recent, planned), time.monotonic() + 60) is None
    with stager._changed:
        for each in (idle, planned):
            stager._asked_at[shards(each)[0]] -= 3
    forgotten: list[bool] = []
    monkeypatch.setattr(stager._planned, "forget_margins", lambda: forgotten.append(True))
    stager._let_go()
    assert [each.num_detached for each in (idle, recent, planned)] == [1, 0, 0]
    assert forgotten == []
    assert shards(idle)[0] not in stager._asked_at
    stager._let_go(urgent=True)
    assert [each.num_detached for each in (idle, recent, planned)] == [1, 1, 0]
    assert forgotten == [True]  # the steps just behind the latest requests, too


def test_closing_ends_its_threads_and_the_requests_that_wait(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    stager = Stager(Cache(tmp_path, 1000))
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("stager", True)  # a cache's disk that hangs keeps no process
    file = Shard("a", *[BlockingIOError()] * 1000)
    future = stager.want(shards(file), time.monotonic() + 60)
    assert future is not None
    wait_until(lambda: file.num_fetched > 0)
    for _ in range(2):
        stager.close()
    with pytest.raises(NotStaged) as caught:
        future.result(0)
    assert (caught.value.detail, caught.value.retry_after_seconds) == ("the server is shutting down", 1)
    assert set(threading.enumerate()) <= before


def test_a_plan_that_fails_is_logged_and_the_others_go_on(
    stager: Stager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    next_follower, failures = stager._planned.next_follower, [ZeroDivisionError("a plan of no rows")]

    def fail_once() -> Follower | None:
        if failures:
            raise failures.pop()
        return next_follower()

    monkeypatch.setattr(stager._planned, "next_follower", fail_once)
    future = stager.want(shards(Shard("a")), time.monotonic() + 60)
    assert future is not None
    assert future.result(20) is None
    assert "a plan of no rows" in caplog.text


def test_without_stores_there_is_nothing_to_do() -> None:
    before = set(threading.enumerate())
    with Stager(None):
        assert set(threading.enumerate()) <= before


def test_a_shard_that_has_come_is_not_fetched_again_while_it_is_planned(stager: Stager) -> None:
    file = Shard("a")
    plan_for(stager, file)
    for _ in range(20):
        with stager._changed:
            stager._start_staging()
        wait_until(lambda: file.num_fetched > 0 and not stager._running)
    assert file.num_fetched == 1


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
