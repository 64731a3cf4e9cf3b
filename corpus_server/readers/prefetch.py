"""Prefetch: a thread asks the kernel for the windows that readers will request next; 14 times the cold reads.

A request to the kernel starts a read and does not wait for it, until the disk's queue is full. So one
thread keeps the disk as busy as possible. Each worker process prefetches for the requests that it gets;
a page that is in memory or being read is not read twice. A bounded shuffle is read group by group.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from corpus_server.corpus.corpus import Corpus
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.groups import Groups, group_bytes
from corpus_server.readers.registry import Registry, StepsRequest
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
        # Whose turn it is, and what is done then.
        self._queue: OrderedDict[Windows | Groups, Callable[[Any], bool]] = OrderedDict()
        self._groups: dict[BoundPlan, Groups] = {}
        self._group_bytes = 0  # of the budget, taken by groups
        self._num_readers = self._num_grouped = 0  # the second: those whose groups are read ahead
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

    def begin(self, request: StepsRequest) -> Windows | None:
        """Prefetch for a new reader.

        Rows of pieces are not prefetched: a response asks for all of its own at once.
        """
        bound, groups = request.bound, None
        if not bound.sampler.rows.is_window:
            return None
        with self._changed:
            self._num_readers += 1
            if bound.sampler.groups is not None:
                groups = self._groups.setdefault(bound, Groups(bound))
                groups.num_readers += 1
                self._num_grouped += groups.admitted_bytes > 0
            return Windows(request, groups)

    def note(self, work: Windows, request: StepsRequest) -> None:
        """Note a request: prefetch the groups of its plan if they fit the budget, else its next windows."""
        now = time.monotonic()
        with self._changed:
            groups = work.groups
            if work.has_ended:
                return
            if groups is not None and (groups.num_bytes is None or self._admit(groups, groups.num_bytes)):
                if groups.note(request.step, now):
                    self._enqueue(self._turn_of_groups, groups, now)
                return
            rest_bytes = max(0, self._budget_bytes - self._group_bytes)
            share_bytes = rest_bytes // max(_MIN_SHARES, self._num_readers - self._num_grouped)
            if work.note(request, share_bytes):
                self._enqueue(self._turn_of_windows, work, now)

    def end(self, work: Windows) -> None:
        """Prefetch nothing more for a reader; groups that nobody reads any more are dropped."""
        with self._changed:
            work.has_ended = True
            self._num_readers -= 1
            if (groups := work.groups) is None:
                return
            groups.num_readers -= 1
            self._num_grouped -= groups.admitted_bytes > 0
            if not groups.num_readers:
                del self._groups[groups.bound]
                self._group_bytes -= groups.admitted_bytes
                self._enqueue(self._drop, groups, math.inf)

    def _admit(self, groups: Groups, num_bytes: int) -> bool:
        """Tell whether groups are read ahead: if they fit the budget."""
        if not groups.admitted_bytes and self._group_bytes + num_bytes <= self._budget_bytes:
            groups.admitted_bytes = num_bytes
            self._group_bytes += num_bytes
            self._num_grouped += groups.num_readers
        return groups.admitted_bytes > 0

    def _enqueue(self, turn: Callable[[Any], bool], work: Windows | Groups, now: float) -> None:
        if now >= work.rests_until:
            self._queue[work] = turn
            self._changed.notify()

    def _run(self) -> None:
        """Run the thread: one turn after another, of each reader and plan that has work."""
        while True:
            work = None
            try:
                with self._changed:
                    while not self._queue and not self._closed:
                        self._changed.wait()
                    if self._closed:
                        return
                    work, turn = self._queue.popitem(last=False)
                if turn(work):
                    with self._changed:
                        self._queue.setdefault(work, turn)
            except BaseException:  # noqa: BLE001 - no response depends on prefetching
                self._rest(work)

    def _turn_of_windows(self, work: Windows) -> bool:
        """Prefetch some steps of a reader, unless their windows are resident; return whether to go on."""
        gatherer = work.bound.gatherer
        if work.has_ended or (turn := work.next_turn()) is None:
            return False
        spread = max(1, -(-len(turn.windows) // _SAMPLE_WINDOWS))
        is_warm = turn.samples and gatherer.are_resident(turn.windows[::spread])
        with self._changed:
            after = turn.after
            if not work.finish(turn, is_warm=is_warm):
                return not is_warm
        if work.groups is not None:
            self._log_refusal(work.groups)
        for begin in range(0, len(turn.windows), _CALL_WINDOWS):
            if self._closed or work.step >= after:
                break
            windows = turn.windows[begin : begin + _CALL_WINDOWS]
            gatherer.read_ahead(windows, turn.length)
            self._on_asked(len(windows) * turn.length * work.bound.dtype.itemsize)
        return True

    def _turn_of_groups(self, groups: Groups) -> bool:
        """Read one chunk of a group, and drop the groups that were left; return whether to go on."""
        num_bytes = group_bytes(groups.bound) if groups.num_bytes is None else groups.num_bytes
        with self._changed:
            groups.num_bytes = num_bytes
            if not groups.num_readers or not self._admit(groups, num_bytes):
                return False
            steps = groups.take_steps(time.monotonic())
        if steps:
            groups.look(steps, self._others(groups))
        num_bytes = groups.read_chunk()
        self._on_asked(num_bytes)
        return num_bytes > 0

    def _drop(self, groups: Groups) -> bool:
        groups.drop_all(self._others(groups))
        return False

    def _others(self, groups: Groups) -> list[Corpus]:
        """Return the corpora of the other plans that are being read."""
        others = (each for each in self._registry.bounds() if each is not groups.bound)
        return [corpus for each in others for corpus in each.corpora.values()]

    def _rest(self, work: Windows | Groups | None) -> None:
        """Log an error, and do nothing for a while for what it came from."""
        with contextlib.suppress(BaseException):  # no memory even for the log
            plan = "" if work is None else f" for plan {work.bound.plan.id}"
            _log.exception("prefetching failed%s", plan)
        if work is None:
            time.sleep(_JOIN_SECONDS / 2)
            return
        with self._changed:
            work.rests_until = time.monotonic() + _REST_SECONDS
            if self._queue.get(work) != self._drop:  # a request came meanwhile
                self._queue.pop(work, None)

    def _log_refusal(self, groups: Groups) -> None:
        """Say, once, why a plan of a bounded shuffle on disk is read window by window."""
        bound, needed, taken = groups.bound, groups.num_bytes or 0, self._group_bytes
        if groups.is_refusal_logged:
            return
        groups.is_refusal_logged = True
        _log.warning(
            f"plan {bound.plan.id}: reading ahead its groups ({bound.plan.order} windows) takes {needed:,} "
            "bytes of page cache, three groups of each source; "
            f"read_ahead_bytes is {self._budget_bytes:,}, of which other plans take {taken:,}; its windows "
            "are read one by one instead, at the rate of random reads; "
            f"set read_ahead_bytes to at least {taken + needed:,}, or choose smaller groups"
        )
