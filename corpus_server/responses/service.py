"""What one process has open: corpora, known plans, threads and limits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from corpus_server import metrics
from corpus_server.admission.access import Access
from corpus_server.admission.admission import Admission
from corpus_server.admission.request import Caller, RequestHead
from corpus_server.catalog import Catalog
from corpus_server.corpus import guard
from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import CorpusServerError, StateUnavailable
from corpus_server.known_plans import KnownPlans
from corpus_server.plan_store import PlanStore
from corpus_server.read.tables import Tables
from corpus_server.readers.prefetch import Prefetcher
from corpus_server.readers.registry import Registry
from corpus_server.readers.staging import WAIT_SECONDS, Stager
from corpus_server.recordings import Recordings
from corpus_server.reports import Reports
from corpus_server.responses.requests import Requests
from corpus_server.responses.threads import Threads
from corpus_server.settings import Settings
from corpus_server.stores import Extent
from corpus_server.work import Budget, ClientLeft, Jobs, Later, Limits, Turns
from corpus_server.work.budget import NO_LIMITS

T = TypeVar("T")

Gone = Callable[[], Awaitable[None]]
"""Returns when the client of a request has left."""

QUESTION_THREADS = 16
"""Questions that have begun: each keeps its thread, and one of them computes at a time."""

_CONTROL_THREADS = 2
"""For plans and descriptions: work that must not wait behind the disk."""

_STUCK_SECONDS = 20.0
"""A thread that is at one slice for so long waits for a disk that does not answer."""


class Unready(NamedTuple):
    """Why a process should get no requests at present.

    Attributes:
        said: to everybody.
        detail: with names of files, to those who may know them; "": there is no more to say.
    """

    said: str
    detail: str = ""


class Service:
    """The state of one process.

    Attributes:
        plan: see `KnownPlans.by_id`; may read the disk.
        requests: is told what became of each request.
        gather_threads: touch the maps and may wait for the disk; the event loop's thread never does.
        draining: the process is about to end: readiness says so.
    """

    def __init__(self, catalog: Catalog, store: PlanStore, settings: Settings, jobs: Jobs) -> None:
        self.gather_threads = Threads(settings.gather_threads, "gather")
        self._control_threads = Threads(_CONTROL_THREADS, "control")
        self._question_threads = Threads(QUESTION_THREADS, "question")
        self._turns = Turns()
        # Of its own: a probe that waits for plans to be bound would take a busy server for a dead one.
        self._probe_thread = Threads(1, "probe")
        self.catalog = catalog
        self.settings = settings
        self.access = Access(settings.tokens)
        self.admission = Admission(settings, self.access)
        self._jobs = jobs
        self.plans = KnownPlans(catalog, store, jobs)
        self.plan = self.plans.by_id
        self.store = store
        self.recordings = Recordings(settings.record_dir)
        self.reports = Reports(settings.report_dir)
        self.readers = Registry()
        self.prefetcher = Prefetcher(
            self.readers, settings.read_ahead_bytes, on_asked=metrics.READ_AHEAD_BYTES.add
        )
        self.stager = Stager(self.readers, catalog.cache, on_bytes=metrics.STAGED_BYTES.add)
        self.requests = Requests(settings.access_log)
        metrics.RANKS.pull_series(self.readers.counts)
        metrics.STALE_TOKENS.pull(lambda: bool(self.access.failure))
        metrics.BYTES_IN_FLIGHT.pull(lambda: self.admission.num_bytes)
        if (cache := catalog.cache) is not None:
            metrics.STAGED_EXTENTS.pull(lambda: self.stager.num_staged)
            metrics.EVICTED_EXTENTS.pull(lambda: cache.num_evicted)
            metrics.FOUND_BYTES.pull(lambda: self.stager.num_found_bytes)
            metrics.HELD_EXTENTS.pull(lambda: self.stager.held[0])
            metrics.HELD_BYTES.pull(lambda: self.stager.held[1])
            metrics.CACHE_BYTES.pull(lambda: cache.limit_bytes)
            metrics.STAGED_STEPS.pull_series(self.stager.progress.staged_steps)
            metrics.UNREAD_STEPS.pull_series(self.stager.progress.unread_steps)
        self._probes: dict[Callable[[], Any], asyncio.Task[Any]] = {}  # by their work, those that wait
        self.draining = False

    @classmethod
    @contextmanager
    def open(cls, settings: Settings) -> Iterator[Service]:
        """Open everything that the settings name, or raise UnreadableCorpus; close it at the end."""
        guard.install()
        jobs = Jobs()
        with (
            closing(jobs),
            Catalog.open(
                settings.corpora,
                reads_ahead=settings.read_ahead_bytes > 0,
                cache_dir=settings.cache_dir,
                cache_bytes=settings.cache_bytes,
                extent_bytes=settings.extent_bytes,
                tables=Tables(settings.state_dir / "tables", jobs),
                lists_names=settings.tokens is None,  # a token need not be for all
            ) as catalog,
            PlanStore(settings.state_dir) as store,
        ):
            if catalog.cache is not None:  # of a folder that other servers use
                settings = replace(settings, cache_bytes=catalog.cache.limit_bytes)
            service = cls(catalog, store, settings, jobs)
            gc.freeze()  # what is open stays open: collecting garbage need not look at it again
            try:
                yield service
            finally:
                service.close()

    def close(self) -> None:
        """Stop the threads; idempotent. Waits for them: they must not touch a map that is gone."""
        self.prefetcher.close()
        self.stager.close()
        self._jobs.close()
        for threads in (
            self.gather_threads,
            self._control_threads,
            self._question_threads,
            self._probe_thread,
        ):
            threads.close()

    def why_not_ready(self) -> Unready | None:
        """Return None when ready, else why not; blocks."""
        if self.draining:
            return Unready("the server is shutting down")
        number = self.settings.gather_threads
        if self.gather_threads.num_stuck(_STUCK_SECONDS) >= number:
            return Unready(f"all {number} gather threads have waited for the disk for {_STUCK_SECONDS:g} s")
        try:
            for corpus in self.catalog.corpora.values():
                corpus.check_unchanged(Budget())
            self.store.check_writable()
        except StateUnavailable as error:
            return Unready("plans cannot be kept", error.detail)
        except CorpusServerError as error:
            return Unready("a file of a corpus changed, or cannot be read", error.detail)
        return None

    def corpus(self, name: str, caller: Caller) -> Corpus:
        """Return a corpus that the caller may read.

        Raises:
            Forbidden: the caller may not, whether there is such a corpus or not.
            UnknownCorpus: there is none.
        """
        caller.check_read([name])
        return self.catalog.corpus(name)

    def stage(self, extents: Iterable[Extent], budget: Budget) -> None:
        """Wait until extents of shards are on this machine.

        Raises:
            ResponseTooLarge: the cache does not hold them together.
            NotStaged, StoreFailed, CacheFull, CorpusChanged: they are not, and why.
        """
        wanted = set[Extent]()
        for each in extents:
            wanted.add(each)
            budget.spend()
        self.admission.check_extents(sum(each.size_bytes for each in wanted))
        deadline = budget.once("staging", lambda: time.monotonic() + WAIT_SECONDS)
        while wanted and (waiting := self.stager.want(wanted, deadline)) is not None:
            metrics.STAGING_WAITS.add()
            budget.staging_since = budget.staging_since or time.monotonic()
            budget.wait(waiting, "extents are being staged")
        if budget.staging_since:
            budget.staging_seconds = time.monotonic() - budget.staging_since

    async def run(self, work: Callable[[Budget], T], request: RequestHead, gone: Gone) -> T:
        """Run short blocking work off the event loop; raise Overloaded if there is too much of it.

        Args:
            work: is called again when what it waits for is done.
            gone: see `settled`.
        """
        budget = self.budget(request, NO_LIMITS)
        with self.admission.short(request.caller), ended(budget):
            while True:
                try:
                    return await self._control_threads.run(partial(work, budget))
                except Later as later:
                    await self.settled(later, budget, gone)

    async def compute(self, work: Callable[[Budget], T], budget: Budget, gone: Gone) -> T:
        """Run a question in a thread of its own, in turns with others, until nobody waits for it any more.

        The caller ends the budget.

        Raises:
            ClientLeft: nobody does.
            CorpusServerError: what the question raises.
        """

        def in_turns() -> T:
            budget.begin()
            try:
                return work(budget)
            finally:
                budget.stop()

        async with self.admission.question(budget.caller):
            made = asyncio.ensure_future(self._question_threads.run(in_turns))
            leaving = asyncio.ensure_future(gone())
            try:
                await asyncio.wait((made, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not made.done():
                    budget.end()  # which the thread notices within a turn; its place is taken until then
                return await made
            finally:
                leaving.cancel()

    async def settled(self, later: Later, budget: Budget, gone: Gone) -> None:
        """Wait for what a question waits for, without a thread.

        Args:
            gone: returns when the client has left.

        Raises:
            ClientLeft: it has.
            Overloaded: it took too long; the client shall come again.
        """
        loop, told = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(told.set)

        later.future.add_done_callback(tell)
        done, leaving = asyncio.ensure_future(told.wait()), asyncio.ensure_future(gone())
        waits = done, leaving
        try:
            await asyncio.wait(waits, timeout=budget.seconds_left(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            has_left = leaving.done()
            for each in waits:
                each.cancel()
        if told.is_set():
            return
        if has_left:
            raise ClientLeft("the client left")
        raise budget.tired(later.what)

    async def run_probe(self, work: Callable[[], T]) -> T:
        """Run what tells how the process is doing: it waits behind nothing that callers ask for.

        Where the same work waits for its turn already, take its result: strangers may ask for `/readyz` as
        often as they like.
        """

        def look() -> T:
            del self._probes[work]  # who asks from now on wants another look
            return work()

        if (probe := self._probes.get(work)) is None:
            probe = self._probes[work] = asyncio.create_task(self._probe_thread.run(look))
        result: T = await asyncio.shield(probe)  # shielded: others may wait for it, too
        return result

    def budget(
        self,
        request: RequestHead,
        limits: Limits,
        *,
        has_left: Callable[[], bool] | None = None,
        claim: Callable[[int], None] | None = None,
        in_turns: bool = False,
    ) -> Budget:
        """Return what a request may use; see `Budget`."""
        caller = request.caller.name if self.access.num_tokens is not None else request.address
        turn = self._turns.of(caller) if in_turns else None
        return Budget(
            limits,
            caller=caller,
            has_left=has_left,
            turn=turn,
            blocks=in_turns,
            claim=claim,
            max_response_bytes=self.settings.max_response_bytes,
        )


@contextmanager
def ended(budget: Budget) -> Iterator[None]:
    """End a budget with a block."""
    try:
        yield
    finally:
        budget.end()
