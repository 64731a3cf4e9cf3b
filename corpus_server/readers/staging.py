"""Bring shards of object stores to this machine before they are asked for.

One thread plans which shards come next (`shards`) and has them fetched, first those that requests
wait for. A request waits for a few seconds, without a thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple
from weakref import WeakSet

from corpus_server.corpus.files import Closing
from corpus_server.errors import CacheFull, CorpusServerError, NotStaged
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.registry import Registry
from corpus_server.readers.shards import PlannedShards, RankShards, check_working_set
from corpus_server.stores import Cache, StagedFile
from corpus_server.stores.download import RANGES_AT_ONCE

WAIT_SECONDS = 3.0
"""A request waits for its shards for so long; then the client is told when to come again."""

_SHARDS_AT_ONCE = 4  # one is checked while others arrive
_TICK_SECONDS = 1.0
_RECENT_SECONDS = 2.0  # a shard asked for so lately may be read by a response under way
_SYNC_SECONDS = 5.0  # a shard is flushed to disk by then; sooner, it would take a third of the rate of others
_LAST_RETRY_SECONDS = 30.0
_REST_SECONDS = 10.0  # for a rank whose planning failed
_LOOK_SECONDS = 0.1  # whether another process has staged a shard, or the cache has room by now
_USUAL_RATE = 100e6  # bytes per second, until some have come
_MAX_RETRY_AFTER_SECONDS = 60

_log = logging.getLogger("corpus_server")


class _Failure(NamedTuple):
    """Why a shard was not staged, when to try again, and how often it has failed in a row.

    The last is 0 where the cache is full or another process stages it: requests go on waiting.
    """

    error: CorpusServerError | BlockingIOError
    retry_at: float
    times: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request whose shards are not here yet; all its files stay mapped until `future` is done."""

    files: set[StagedFile]
    missing: set[StagedFile]
    deadline: float
    future: Future[None] = field(default_factory=Future)


class Stager(Closing):
    """Stages for all requests of a process; owns its threads. Safe to use from several threads.

    Args:
        cache: None where no corpus lies in an object store; then there are no threads, and nothing to do.
        on_bytes: told of the bytes of each range that has arrived.

    Attributes:
        num_staged: shards that have come from their stores.
    """

    def __init__(
        self,
        registry: Registry,
        cache: Cache | None,
        *,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self._registry = registry
        self._limit_bytes = 0 if cache is None else cache.limit_bytes
        self._on_bytes = on_bytes
        self.num_staged = 0
        self._changed = threading.Condition()  # guards everything below
        self._planned = PlannedShards(self._limit_bytes)
        self._waiting: list[_Waiting] = []
        self._running: set[StagedFile] = set()
        self._unsynced: deque[tuple[StagedFile, float]] = deque()  # and when they were staged
        self._failures: dict[StagedFile, _Failure] = {}
        self._asked_at: dict[StagedFile, float] = {}  # of those attached
        self._checked: WeakSet[BoundPlan] = WeakSet()  # plans whose shards fit
        self._received = (0, 0.0)  # bytes, and the time since which they are counted
        self._tick_at = 0.0
        self._stopping = threading.Event()
        if cache is None:
            self._stopping.set()
            return
        self._shards = ThreadPoolExecutor(_SHARDS_AT_ONCE, "stage")
        self._ranges = ThreadPoolExecutor(RANGES_AT_ONCE, "fetch")
        self._syncs = ThreadPoolExecutor(1, "sync")  # nobody waits for the disk, but a failure must show
        # A daemon: the interpreter ends without it if it hangs on the cache's disk.
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True)
        self._thread.start()
        registry.add_subscriber(self)

    def close(self) -> None:
        """Stop staging; idempotent. Requests that wait get NotStaged."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with self._changed:
            self._expire(math.inf)
            self._changed.notify_all()
        self._thread.join(_TICK_SECONDS * 2)
        for threads in (self._shards, self._ranges, self._syncs):
            threads.shutdown(cancel_futures=True)

    def begin(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> RankShards | None:
        """Stage the shards of the next steps of a new reader."""
        if not bound.is_staged:
            return None
        work = RankShards(bound, rank, world_size, steps)
        with self._changed:
            self._planned.add(work)
        return work

    def note(self, work: RankShards) -> None:
        """Have the thread look for the shards of the steps after a request."""
        with self._changed:
            self._changed.notify()

    def end(self, work: RankShards) -> None:
        """Let go of the shards that only this reader would have read: the thread does, within a second."""

    def check_order(self, bound: BoundPlan) -> None:
        """Raise CacheTooSmall if the cache holds less than the order of a staged plan needs."""
        if bound not in self._checked:
            check_working_set(bound, self._limit_bytes)
            self._checked.add(bound)

    def want(self, files: Iterable[StagedFile], deadline: float) -> Future[None] | None:
        """Map shards that a request is about to read.

        Returns:
            None if all are mapped; else what is done when they are on this machine. It fails with NotStaged
            at the deadline, or with the reason why one of them cannot be staged.
        """
        files = set(files)
        missing = {file for file in files if not (file.attach() and _is_good(file))}
        now = time.monotonic()
        with self._changed:
            self._asked_at.update(dict.fromkeys(files, now))
            if not missing:
                return None
            if self._stopping.is_set():  # nobody would end its waiting
                raise _shutting_down()
            self._planned.note_absent(missing)
            request = _Waiting(files, missing, deadline)
            self._waiting.append(request)
            for file in list(missing):  # a copy: `_answer` takes what has failed out of the set
                failure = self._failures.get(file)
                if failure is not None and failure.times and failure.retry_at > now:
                    self._response(file, failure.error)
            self._changed.notify()
        return request.future

    def _response(self, file: StagedFile, error: BaseException | None) -> None:
        """Let requests go on that wait for nothing but this shard, or fail all that wait for it."""
        for each in [each for each in self._waiting if file in each.missing]:
            each.missing.discard(file)
            if error is not None:
                self._waiting.remove(each)
                each.future.set_exception(error)
            elif not each.missing:
                self._waiting.remove(each)
                each.future.set_result(None)

    def _expire(self, now: float) -> None:
        """Fail the requests that have waited long enough."""
        for each in [each for each in self._waiting if each.deadline <= now]:
            self._waiting.remove(each)
            each.future.set_exception(self._too_late(each.missing))

    # -- the stager's thread

    def _run(self) -> None:
        logged = ""
        while not self._stopping.is_set():
            try:
                self._turn()
            except BaseException as error:  # noqa: BLE001 - requests wait for this thread
                with contextlib.suppress(BaseException):  # no memory even for the log
                    if repr(error) != logged:  # a disk that is gone fails once a second
                        _log.exception("staging failed")
                    logged = repr(error)
                self._stopping.wait(_TICK_SECONDS)

    def _turn(self) -> None:
        """Plan some of the next steps of one rank; if there is nothing to plan, wait for something to do."""
        with self._changed:
            now = time.monotonic()
            self._expire(now)
            self._start_staging(now)
            rank = self._planned.next_rank(now)
            if rank is None:
                retries = [each.retry_at for each in self._failures.values() if each.retry_at > now]
                wake_at = min([self._tick_at, *(each.deadline for each in self._waiting), *retries])
                if wake_at > now:
                    self._changed.wait(wake_at - now)
        if rank is not None:
            self._plan(rank)
        if time.monotonic() >= self._tick_at:
            self._tick_at = time.monotonic() + _TICK_SECONDS
            self._tick()

    def _plan(self, rank: RankShards) -> None:
        try:
            steps = rank.locate()  # some ms: requests need not wait for it
            with self._changed:
                self._planned.extend(rank, steps)
        except BaseException:  # noqa: BLE001 - what requests ask for is staged in any case
            rank.rests_until = time.monotonic() + _REST_SECONDS
            _log.exception("planning what to stage failed for plan %s", rank.bound.plan.id)

    def _start_staging(self, now: float) -> None:
        """Give the threads the shards that come next: first those that requests wait for."""
        waited = dict.fromkeys(file for each in self._waiting for file in each.missing)
        for file in chain(waited, self._planned.absent):
            if len(self._running) >= _SHARDS_AT_ONCE or self._stopping.is_set():
                return
            failure = self._failures.get(file)
            if file in self._running or (failure is not None and failure.retry_at > now):
                continue
            if not self._running:
                self._received = (0, now)
            self._running.add(file)
            try:
                self._shards.submit(self._stage, file, urgent=file in waited)
            except BaseException as error:  # noqa: BLE001 - no thread can be started, or no memory is left
                self._finished(file, error)
                return

    def _too_late(self, missing: set[StagedFile]) -> CorpusServerError:
        """Return what a request is told that has waited long enough."""
        if self._stopping.is_set():
            return _shutting_down()
        for file in missing:
            if file in self._failures and isinstance(error := self._failures[file].error, CorpusServerError):
                return error
        num_bytes = sum(file.size_bytes for file in self._running.union(missing))
        received, since = self._received
        seconds_since = max(time.monotonic() - since, 0.1)
        rate = received / seconds_since if self._running and received else _USUAL_RATE
        seconds = num_bytes / rate
        names = ", ".join(sorted(file.name for file in missing)[:3])
        return NotStaged(
            f"{len(missing)} shards of this response ({names} ...) are being staged: "
            f"{num_bytes} bytes are on their way, at {rate / 1e6:.0f} MB/s about {seconds:.0f} s",
            retry_after_seconds=min(max(1, math.ceil(seconds)), _MAX_RETRY_AFTER_SECONDS),
        )

    def _tick(self) -> None:
        """Keep what is planned, and let go of what is not."""
        self._registry.end_idle()
        with self._changed:
            planned = self._planned.files()
        gone = [file for file in planned if not file.is_cached]
        for file in planned:
            file.touch()
        with self._changed:
            self._planned.note_absent(gone)
            until = time.monotonic() - (_SYNC_SECONDS if self._running else 0.0)
            while self._unsynced and self._unsynced[0][1] <= until:
                self._syncs.submit(_sync, self._unsynced.popleft()[0])
        self._let_go()

    def _let_go(self, *, urgent: bool = False) -> None:
        """Unmap shards that nobody reads, so that they may leave the cache; more for one that is urgent."""
        now = time.monotonic()
        idle_seconds = 0.0 if urgent else _RECENT_SECONDS
        with self._changed:
            if urgent:
                self._planned.drop_margins()
            wanted = {file for each in self._waiting for file in each.files}
            idle = [file for file, asked in self._asked_at.items() if now - asked > idle_seconds]
            for file in idle:
                if file not in wanted and file not in self._planned and file.detach():
                    del self._asked_at[file]

    # -- the threads of shards

    def _stage(self, file: StagedFile, *, urgent: bool) -> None:
        is_new = False
        try:
            if not file.is_cached:
                self._let_go(urgent=urgent)
                file.stage(self._ranges, self._stopping, urgent=urgent, on_bytes=self._count)
                is_new = True
        except BaseException as error:  # noqa: BLE001 - reported to whoever waits
            if not self._stopping.is_set():  # else told to stop, or the threads of ranges are gone
                self._finished(file, error)
        else:
            self._finished(file, None, is_new=is_new)

    def _finished(self, file: StagedFile, error: BaseException | None, *, is_new: bool = False) -> None:
        if not (error is None or isinstance(error, CorpusServerError | BlockingIOError)):
            _log.error("staging %s failed", file.name, exc_info=error)
            error = CorpusServerError(f"staging {file.name} failed: {error}")
        with self._changed:
            self._running.discard(file)
            now = time.monotonic()
            if is_new:
                self.num_staged += 1
                self._unsynced.append((file, now))
            if error is None:
                self._failures.pop(file, None)
                self._planned.absent.pop(file, None)
                self._response(file, None)
            elif isinstance(error, CacheFull | BlockingIOError):  # there may be room, or the shard, soon
                self._failures[file] = _Failure(error, now + _LOOK_SECONDS, 0)
            else:
                times = self._failures[file].times + 1 if file in self._failures else 1
                seconds = min(0.5 * 2.0 ** min(times, 10), _LAST_RETRY_SECONDS)
                self._failures[file] = _Failure(error, now + seconds, times)
                self._response(file, error)
                _log.warning("%s was not staged: %s", file.name, error.detail)
            self._changed.notify()

    def _count(self, num_bytes: int) -> None:
        self._on_bytes(num_bytes)
        with self._changed:
            received, since = self._received
            self._received = (received + num_bytes, since)


def _is_good(file: StagedFile) -> bool:
    """Tell whether a mapped shard is what was staged; throw it away if not."""
    try:
        file.check_unchanged()
    except CorpusServerError as error:
        _log.warning("%s; its copy in the cache is thrown away", error.detail)
        if file.detach():
            file.discard()
        return False
    return True


def _sync(file: StagedFile) -> None:
    try:
        file.sync()
    except BaseException:  # noqa: BLE001 - nobody takes the result of this thread
        _log.exception("%s is staged, but may not be on the disk", file.name)


def _shutting_down() -> NotStaged:
    return NotStaged("the server is shutting down")
