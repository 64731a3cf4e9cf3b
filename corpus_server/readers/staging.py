"""Bring extents of object stores to this machine before they are asked for.

One thread plans which extents come next (`extents`) and has them fetched, first those that requests
wait for. A request waits for a few seconds, without a thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import cast
from weakref import WeakKeyDictionary, WeakSet

from corpus_server.corpus.files import Closing
from corpus_server.errors import CacheFull, CorpusServerError, NotStaged, counted
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.extents import PlannedExtents, RankExtents
from corpus_server.readers.failures import Failures, log_failed
from corpus_server.readers.progress import Progress
from corpus_server.readers.registry import Registry
from corpus_server.readers.working_set import check_working_set
from corpus_server.stores import Cache, Extent, MappedSpans
from corpus_server.stores.download import RANGES_AT_ONCE

WAIT_SECONDS = 6.0
"""A request waits for its extents for so long; then the client is told when to come again."""

MAX_ATTACHED = 16384
"""Extents that a process has mapped, or half of its descriptors: a quarter of the maps that Linux allows."""

_EXTENTS_AT_ONCE = 12  # of two ranges each, so that all connections are busy while some are checked
_FEW_EXTENTS = 4  # while a request waits, planned ones are begun only where so few are on their way
_TICK_SECONDS = 1.0
_KEEP_SECONDS = 3.0  # until planned extents are touched again: 10,000 take 50 ms
_RECENT_SECONDS = 2.0  # an extent asked for so lately may be read by a response under way
_SYNC_SECONDS = (
    5.0  # an extent is flushed to disk by then; sooner, it would take a third of the rate of others
)
_REST_SECONDS = 10.0  # for a rank whose planning failed
_USUAL_RATE = 100e6  # bytes per second, until some have come
_MAX_RETRY_AFTER_SECONDS = 60

_log = logging.getLogger("corpus_server")


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request whose extents are not here yet; all its extents stay mapped until `future` is done."""

    extents: set[Extent]
    missing: set[Extent]
    deadline: float
    future: Future[None] = field(default_factory=Future)


class Stager(Closing):
    """Stages for all requests of a process; owns its threads. Safe to use from several threads.

    Args:
        cache: None where no corpus lies in an object store; then there are no threads, and nothing to do.
        on_bytes: told of the bytes of each range that has arrived.

    Attributes:
        num_staged: extents that have come from their stores.
        num_found_bytes: of planned extents that the cache had already.
        progress: how far plans have come.
        held: extents in the cache folder, those of all processes, and their bytes.
    """

    def __init__(
        self,
        registry: Registry,
        cache: Cache | None,
        *,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._limit_bytes = 0 if cache is None else cache.limit_bytes
        self._on_bytes = on_bytes
        self.num_staged = self.num_found_bytes = 0
        self.held = (0, 0)
        self._changed = threading.Condition()  # guards everything below
        self._planned = PlannedExtents(self._limit_bytes)
        self.progress = Progress(self._planned, self._changed)
        self._waiting: list[_Waiting] = []
        self._running: set[Extent] = set()
        self._unsynced: deque[tuple[Extent, float]] = deque()  # and when they were staged
        self._failures = Failures()
        self._asked_at: dict[Extent, float] = {}  # of those attached
        self._all_asked_at: WeakKeyDictionary[MappedSpans, float] = WeakKeyDictionary()
        self._max_attached = max_attached()
        self._checked: WeakSet[BoundPlan] = WeakSet()  # plans whose extents fit
        self._received = (0, 0.0)  # bytes, and the time since which they are counted
        self._tick_at = self._keep_at = 0.0
        self._room_asked = b"" if cache is None else cache.room_asked()
        self._stopping = threading.Event()
        if cache is None:
            self._stopping.set()
            return
        self._extents = ThreadPoolExecutor(_EXTENTS_AT_ONCE, "stage")
        self._ranges = ThreadPoolExecutor(RANGES_AT_ONCE, "fetch")
        self._syncs = ThreadPoolExecutor(1, "sync")  # nobody waits for the disk, but a failure must show
        # A daemon: the interpreter ends without it if it hangs on the cache's disk.
        self._thread = threading.Thread(target=self._run, name="stager", daemon=True)
        self._thread.start()
        cache.needed_in = self.progress.needed_in
        cache.on_attached = self._note_attached
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
        for threads in (self._extents, self._ranges, self._syncs):
            threads.shutdown(cancel_futures=True)

    def begin(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> RankExtents | None:
        """Stage the extents of the next steps of a new reader."""
        if not bound.is_staged:
            return None
        work = RankExtents(bound, rank, world_size, steps)
        with self._changed:
            self._planned.add(work)
        return work

    def note(self, work: RankExtents) -> None:
        """Have the thread look for the extents of the steps after a request."""
        with self._changed:
            self._changed.notify()

    def end(self, work: RankExtents) -> None:
        """Let go of the extents that only this reader would have read: the thread does, within a second."""

    def check_order(self, bound: BoundPlan) -> None:
        """Raise CacheTooSmall if the cache holds less than the order of a staged plan needs."""
        if bound not in self._checked:
            check_working_set(bound, self._limit_bytes)
            self._checked.add(bound)

    def has(self, extents: MappedSpans) -> bool:
        """Tell whether extents that a request is about to read are all mapped: then it need not `want` them.

        Seldom notes the request for each, because all requests of a plan ask for the same ones.
        """
        if not extents.are_good():
            return False
        now = time.monotonic()
        with self._changed:
            if now - self._all_asked_at.get(extents, -math.inf) < _RECENT_SECONDS / 4:
                return True
            self._all_asked_at[extents] = now
            self._asked_at.update(dict.fromkeys(cast("Sequence[Extent]", extents.spans), now))
            is_full = len(self._asked_at) > self._max_attached
        if is_full:
            self._let_go()
        return True

    def want(self, extents: Iterable[Extent], deadline: float) -> Future[None] | None:
        """Map extents that a request is about to read.

        Returns:
            None if all are mapped; else what is done when they are on this machine. It fails with NotStaged
            at the deadline, or with the reason why one of them cannot be staged.
        """
        extents = set(extents)
        now = time.monotonic()
        sign = next((extent.file.sign() for extent in extents), (b"", 0))  # of all, which lie in one cache
        missing = {
            extent
            for extent in extents
            if not (extent.file.is_surely_good(extent, sign) or (extent.attach() and _is_good(extent)))
        }
        with self._changed:
            self._asked_at.update(dict.fromkeys(extents, now))
            is_full = len(self._asked_at) > self._max_attached
        if is_full:
            self._let_go()
        with self._changed:
            if not missing:
                return None
            if self._stopping.is_set():  # nobody would end its waiting
                raise _shutting_down()
            self._planned.note_absent(missing)
            request = _Waiting(extents, missing, deadline)
            self._waiting.append(request)
            for extent in list(missing):  # a copy: `_response` takes what has failed out of the set
                if (error := self._failures.fresh(extent, now)) is not None:
                    self._response(extent, error)
            self._changed.notify()
        return request.future

    def _note_attached(self, extent: Extent) -> None:
        """Unmap an extent in the end that a response mapped anew, whose reader was slow."""
        with self._changed:
            self._asked_at[extent] = time.monotonic()

    def _response(self, extent: Extent, error: BaseException | None) -> None:
        """Let requests go on that wait for nothing but this extent, or fail all that wait for it."""
        for each in [each for each in self._waiting if extent in each.missing]:
            each.missing.discard(extent)
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
                deadlines = (each.deadline for each in self._waiting)
                wake_at = min([self._tick_at, *deadlines, *self._failures.retries_after(now)])
                if wake_at > now:
                    self._changed.wait(wake_at - now)
        if rank is not None:
            self._plan(rank)
        if time.monotonic() >= self._tick_at:
            self._tick_at = time.monotonic() + _TICK_SECONDS
            self._tick()

    def _plan(self, rank: RankExtents) -> None:
        try:
            steps = rank.locate()  # some ms: requests need not wait for it
            with self._changed:
                self._planned.extend(rank, steps)
        except BaseException:  # noqa: BLE001 - what requests ask for is staged in any case
            rank.rests_until = time.monotonic() + _REST_SECONDS
            log_failed(f"planning what to stage failed for plan {rank.bound.plan.id}")

    def _start_staging(self, now: float) -> None:
        """Give the threads the extents that come next: first those that requests wait for."""
        waited = dict.fromkeys(extent for each in self._waiting for extent in each.missing)
        for extent in chain(waited, self._planned.absent):
            most = _FEW_EXTENTS if waited and extent not in waited else _EXTENTS_AT_ONCE
            if len(self._running) >= most or self._stopping.is_set():
                return
            if extent in self._running or not self._failures.may_try(extent, now):
                continue
            if extent not in waited and not self._failures.may_begin_planned(now):
                return
            if not self._running:
                self._received = (0, now)
            self._running.add(extent)
            try:
                self._extents.submit(self._stage, extent, urgent=extent in waited)
            except BaseException as error:  # noqa: BLE001 - no thread can be started, or no memory is left
                self._finished(extent, error)
                return

    def _too_late(self, missing: set[Extent]) -> CorpusServerError:
        """Return what a request is told that has waited long enough."""
        if self._stopping.is_set():
            return _shutting_down()
        for extent in missing:
            if (error := self._failures.last(extent)) is not None:
                return error
        num_bytes = sum(extent.size_bytes for extent in self._running.union(missing))
        received, since = self._received
        seconds_since = max(time.monotonic() - since, 0.1)
        rate = received / seconds_since if self._running and received else _USUAL_RATE
        seconds = num_bytes / rate
        names = ", ".join(sorted(extent.name for extent in missing)[:3])
        return NotStaged(
            f"{counted(len(missing), 'extent')} of this response ({names} ...) must be staged first: "
            f"{num_bytes} bytes are on their way, at {rate / 1e6:.0f} MB/s about {seconds:.0f} s",
            retry_after_seconds=min(max(1, math.ceil(seconds)), _MAX_RETRY_AFTER_SECONDS),
        )

    def _tick(self) -> None:
        """Keep what is planned, and let go of what is not."""
        self._registry.end_idle()
        if time.monotonic() >= self._keep_at:
            self._keep_at = time.monotonic() + _KEEP_SECONDS
            self._keep()
        with self._changed:
            until = time.monotonic() - (_SYNC_SECONDS if self._running else 0.0)
            while self._unsynced and self._unsynced[0][1] <= until:
                self._syncs.submit(_sync, self._unsynced.popleft()[0])
        before, self._room_asked = self._room_asked, b"" if self._cache is None else self._cache.room_asked()
        is_asked = self._room_asked != before
        self._let_go(urgent=is_asked, planned=is_asked)

    def _keep(self) -> None:
        """Note in the cache what is planned, and find out what of it is gone."""
        with self._changed:
            planned = self._planned.extents()
        gone = [extent for extent in planned if not extent.is_cached]
        for extent in planned:
            extent.touch()
        with self._changed:
            self._planned.note_absent(gone)
        if self._cache is not None:
            self.held = self._cache.held()

    def _let_go(self, *, urgent: bool = False, planned: bool = False) -> None:
        """Unmap extents that nobody reads, so that they may leave the cache; more for one that is urgent.

        Args:
            planned: also those that steps will read soon: they are mapped again then, if they are still here.
        """
        now = time.monotonic()
        idle_seconds = 0.0 if urgent else _RECENT_SECONDS
        with self._changed:
            if urgent:
                self._planned.drop_margins()
            wanted = {extent for each in self._waiting for extent in each.extents}
            idle = [extent for extent, asked in self._asked_at.items() if now - asked > idle_seconds]
            for extent in idle:
                is_free = extent not in wanted and (planned or extent not in self._planned)
                if is_free and extent.detach():
                    del self._asked_at[extent]
            if (excess := len(self._asked_at) - self._max_attached) > 0:
                for extent in sorted(self._asked_at, key=self._asked_at.__getitem__)[:excess]:
                    is_recent = now - self._asked_at[extent] <= _RECENT_SECONDS
                    if extent not in wanted and not is_recent and extent.detach():
                        del self._asked_at[extent]

    # -- the threads of extents

    def _stage(self, extent: Extent, *, urgent: bool) -> None:
        is_new = False
        try:
            if not extent.is_cached:
                self._let_go(urgent=urgent)
                extent.stage(self._ranges, self._stopping, urgent=urgent, on_bytes=self._count)
                is_new = True
            else:
                with self._changed:
                    self.num_found_bytes += extent.size_bytes
        except BaseException as error:  # noqa: BLE001 - reported to whoever waits
            if urgent and isinstance(error, CacheFull) and self._cache is not None:
                self._cache.ask_for_room()
            if not self._stopping.is_set():  # else told to stop, or the threads of ranges are gone
                self._finished(extent, error)
        else:
            self._finished(extent, None, is_new=is_new)

    def _finished(self, extent: Extent, error: BaseException | None, *, is_new: bool = False) -> None:
        if not (error is None or isinstance(error, CorpusServerError | BlockingIOError)):
            _log.error("staging %s failed", extent.name, exc_info=error)
            error = CorpusServerError(f"staging {extent.name} failed: {error}")
        with self._changed:
            self._running.discard(extent)
            now = time.monotonic()
            if is_new:
                self.num_staged += 1
                self._unsynced.append((extent, now))
            if error is None:
                self._failures.end(extent, now)
                self._planned.absent.pop(extent, None)
                self._response(extent, None)
            else:
                if self._failures.note(extent, error, now):
                    self._response(extent, error)
                self._failures.say(extent, error, now)
            self._changed.notify()

    def _count(self, num_bytes: int) -> None:
        self._on_bytes(num_bytes)
        with self._changed:
            received, since = self._received
            self._received = (received + num_bytes, since)


def max_attached() -> int:
    """Return how many extents are mapped at a time, besides those of the last seconds."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_ATTACHED if soft == resource.RLIM_INFINITY else min(MAX_ATTACHED, soft // 2)


def _is_good(extent: Extent) -> bool:
    """Tell whether a mapped extent is what was staged; throw it away if not."""
    try:
        extent.check_unchanged()
    except CorpusServerError as error:
        _log.warning("%s; its copy in the cache is thrown away", error.detail)
        if extent.detach():
            extent.discard()
        return False
    return True


def _sync(extent: Extent) -> None:
    try:
        extent.sync()
    except BaseException:  # noqa: BLE001 - nobody takes the result of this thread
        _log.exception("%s is staged, but may not be on the disk", extent.name)


def _shutting_down() -> NotStaged:
    return NotStaged("the server is shutting down")
