"""Prefetch: a thread asks the kernel for the windows that readers will request next; 14 times the cold reads.

A request to the kernel starts a read and does not wait for it, until the disk's queue is full. So one
thread keeps the disk as busy as possible. Each worker process prefetches for the requests that it gets;
a page that is in memory or being read is not read twice. A bounded shuffle is read group by group.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from corpus_server.corpus.corpus import Corpus
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.failures import log_failed
from corpus_server.readers.groups import Groups
from corpus_server.readers.registry import Registry
from corpus_server.readers.windows import Windows

# No reader gets more than this part of the budget, even alone. A quarter of the default budget is half a
# second of a fast disk; pages prefetched for a reader that goes away are wasted.
_MIN_SHARES = 4

# Windows in one call to the kernel. The call blocks while the disk's queue (commonly 256 requests) is
# full; between two calls the thread checks whether the windows are still of use.
_CALL_WINDOWS = 256

_SAMPLE_WINDOWS = 64  # a corpus of which 5 % are not resident passes for warm once in 27 times

_REST_SECONDS = 10.0  # after a failure, so that a plan that always fails neither fills the log nor a core

_JOIN_SECONDS = 2.0  # a call takes some ms; a longer wait means a disk that hangs, perhaps for ever

_log = logging.getLogger("corpus_server")


class Prefetcher:
    """Prefetches for all readers of a process; owns a thread. Safe to use from several threads.

    Args:
        budget_bytes: page cache that is filled beyond the requests, for all readers together. Groups of
            bounded shuffles come first. Of the rest, readers get equal shares, a quarter at most; one whose
            share is less than one of its steps gets none. With 0 nothing is prefetched.
        on_asked: called by the thread with the bytes of windows that it asked the kernel for.
    """

    def __init__(
        self,
        registry: Registry,
        budget_bytes: int,
        *,
        on_asked: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self._registry = registry
        self._budget_bytes = budget_bytes
        self._on_asked = on_asked
        self._changed = threading.Condition()  # guards everything below
        self._closed = False
        self._queue: OrderedDict[Windows, None] = OrderedDict()  # whose turn it is
        self._groups: dict[BoundPlan, Groups] = {}
        self._num_readers = 0
        self._thread: threading.Thread | None = None
        if budget_bytes:
            # A daemon: the interpreter ends without it if it hangs in a read.
            self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
            self._thread.start()
            registry.add_subscriber(self)

    def close(self) -> None:
        """Stop the thread, waiting for at most 2 s; idempotent.

        If a disk or network file system hangs, the thread stays behind until its system call returns. Shards
        may be closed meanwhile, because the thread only gives hints and never reads mapped memory.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                _log.warning(
                    "the prefetch thread did not end within %g s and is left behind: "
                    "does the disk or the network file system hang?",
                    _JOIN_SECONDS,
                )

    def begin(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> Windows:
        """Prefetch for a new reader."""
        work = Windows(bound, rank, world_size, steps)
        with self._changed:
            self._num_readers += 1
            if bound.plan.order.has_groups:
                work.groups = self._groups.setdefault(bound, Groups(bound))
                work.groups.num_readers += 1
        return work

    def note(self, work: Windows) -> None:
        """Have the thread prefetch for a reader, unless what it needs has just failed."""
        now = time.monotonic()
        with self._changed:
            is_due = work.groups is None or work.groups.note(work.steps.start, now)
            if is_due and not work.has_ended and now >= (work.groups or work).rests_until:
                self._queue[work] = None
                self._changed.notify()

    def end(self, work: Windows) -> None:
        """Prefetch nothing more for a reader; groups that nobody reads any more are dropped."""
        with self._changed:
            self._num_readers -= 1
            if (groups := work.groups) is not None:
                groups.num_readers -= 1
                if not groups.num_readers:
                    del self._groups[groups.bound]
                    self._queue[work] = None
                    self._changed.notify()

    def _run(self) -> None:
        """Run the thread: one turn after another, of each reader that has work."""
        while True:
            work = None
            try:
                with self._changed:
                    while not self._queue and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    work, _ = self._queue.popitem(last=False)
                if self._turn(work):
                    with self._changed:
                        self._queue.setdefault(work)
            except BaseException:  # noqa: BLE001 - no response depends on prefetching
                self._rest(work)

    def _turn(self, work: Windows) -> bool:
        """Prefetch something for a reader; return whether to go on."""
        if (groups := work.groups) is not None and not groups.num_readers:
            groups.drop_all(self._others(groups))
            return False
        if work.has_ended:
            return False
        if groups is None or not self._admits(groups):
            return self._turn_of_windows(work)
        if steps := groups.take_steps(time.monotonic()):
            groups.look(steps, self._others(groups))
        num_bytes = groups.read_chunk()
        self._on_asked(num_bytes)
        return num_bytes > 0

    def _admits(self, groups: Groups) -> bool:
        """Tell whether groups are read ahead: if they fit the budget."""
        num_bytes = groups.num_bytes  # takes ms with many shards, the first time
        with self._changed:
            taken = sum(each.admitted_bytes for each in self._groups.values())
            if not groups.admitted_bytes and taken + num_bytes <= self._budget_bytes:
                groups.admitted_bytes = num_bytes
        return groups.admitted_bytes > 0

    def _turn_of_windows(self, work: Windows) -> bool:
        with self._changed:
            admitted = [each for each in self._groups.values() if each.admitted_bytes]
            num_readers = self._num_readers - sum(each.num_readers for each in admitted)
        taken = sum(each.admitted_bytes for each in admitted)
        turn = work.next_turn((self._budget_bytes - taken) // max(_MIN_SHARES, num_readers))
        if turn is None:
            return False
        gatherer, spread = work.bound.gatherer, max(1, -(-len(turn.windows) // _SAMPLE_WINDOWS))
        if turn.samples and gatherer.are_resident(turn.windows[::spread]):
            work.note_warm()
            return False
        if work.groups is not None:
            self._log_refusal(work.groups, taken)
        for begin in range(0, len(turn.windows), _CALL_WINDOWS):
            if self._closed or work.steps.start >= turn.stop:
                break
            here = slice(begin, begin + _CALL_WINDOWS)
            work.bound.read_ahead(turn.windows[here], turn.lengths[here])
            self._on_asked(int(turn.lengths[here].sum()) * work.bound.token_bytes)
        return True

    def _others(self, groups: Groups) -> list[Corpus]:
        """Return the corpora of the other plans that are being read."""
        others = (each for each in self._registry.bounds() if each is not groups.bound)
        return [corpus for each in others for corpus in each.corpora.values()]

    def _rest(self, work: Windows | None) -> None:
        """Log an error, and do nothing for a while for what it came from."""
        with contextlib.suppress(BaseException):  # no memory even for the log
            plan = "" if work is None else f" for plan {work.bound.plan.id}"
            log_failed(f"prefetching failed{plan}")
        if work is None:
            time.sleep(_JOIN_SECONDS / 2)
            return
        with self._changed:
            (work.groups or work).rests_until = time.monotonic() + _REST_SECONDS
            if not work.has_ended:  # a request came meanwhile
                self._queue.pop(work, None)

    def _log_refusal(self, groups: Groups, taken: int) -> None:
        """Say, once, why a plan of a bounded shuffle on disk is read window by window."""
        if groups.is_refusal_logged:
            return
        groups.is_refusal_logged = True
        plan, needed = groups.bound.plan, groups.num_bytes
        _log.warning(
            f"plan {plan.id}: reading ahead its groups ({plan.order} windows) takes {needed:,} "
            "bytes of page cache, three groups of each source; "
            f"read_ahead_bytes is {self._budget_bytes:,}, of which other plans take {taken:,}; its windows "
            "are read one by one instead, at the rate of random reads; "
            f"set read_ahead_bytes to at least {taken + needed:,}, or choose smaller groups"
        )
