"""Who reads: which rank of which run and plan is at which step.

    note(request)  ->  active  -- silent for 60 s -->  idle  -- its place is needed -->  forgotten
                       subscribers are told            the page shows it

A *reader* is one rank that goes through a plan. Prefetching and staging subscribe: their work ahead of a
reader (`ahead.py`) begins with its first request for tokens, and ends when the reader becomes idle.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any, Final, Protocol, TypeVar

from corpus_server.read.bound_plan import BoundPlan
from corpus_server.readers.ahead import Ahead

W = TypeVar("W", bound=Ahead)

IDLE_SECONDS: Final = 60.0
"""A reader that is silent for so long is idle. When it comes back, work ahead of it starts anew."""

MAX_READERS: Final = 4096
"""Readers of a process. A new one takes the place of an idle one; if none is idle, it is not noted."""

MAX_COUNTED: Final = 512
"""Ranks that a process publishes, those that are active first: about 70 kB of its file."""


class Subscriber(Protocol[W]):
    """Does work ahead of the requests of readers."""

    def begin(self, bound: BoundPlan, rank: int, world_size: int, steps: range) -> W | None:
        """Return the work ahead of a reader, None if there is nothing to do. Brief: a lock is held."""

    def note(self, work: W) -> None:
        """Go on: `work.steps` were requested and are not quiet. From several threads; perhaps after `end`."""

    def end(self, work: W) -> None:
        """Let go of a reader that is idle, or whose plan was bound anew. Brief: a lock is held."""


class Reader:
    """One rank of a plan; `sent` belongs to the event loop's thread.

    Attributes:
        seen_seconds, seen_unix_seconds, last_step: monotonic time, unix time and last step of its latest
            request. Workers compare the unix times, which a conversion would shift by some milliseconds.
        trained_step: the last step that its loader had yielded by then; None: it did not say.
        end: unix time at which the loader said that it asks for no more, 0.0 if it never did, and the step
            that it had yielded last. A request that it sent before may be read later.
        begun: unix time of the latest request that says no step: a loader has yielded none yet.
        bound: its plan; None when idle, so that the plan need not stay in memory.
        work: by subscriber; None until tokens are read for it.
        counts: steps sent, seconds in which responses were made, seconds of sending.
    """

    __slots__ = (
        "begun",
        "bound",
        "counts",
        "end",
        "last_step",
        "seen_seconds",
        "seen_unix_seconds",
        "trained_step",
        "work",
    )

    def __init__(self) -> None:
        self.seen_seconds, self.seen_unix_seconds, self.last_step = 0.0, 0.0, 0
        self.trained_step: int | None = None
        self.end, self.begun = (0.0, 0), 0.0
        self.bound: BoundPlan | None = None
        self.work: list[tuple[Subscriber[Any], Ahead]] | None = None
        self.counts = [0.0, 0.0, 0.0]

    def sent(self, num_steps: int, *, making_seconds: float, sending_seconds: float) -> None:
        """Count a response that was sent whole."""
        self.counts[0] += num_steps
        self.counts[1] += making_seconds
        self.counts[2] += sending_seconds

    def stop(self) -> None:
        """End all work ahead of it."""
        for subscriber, work in self.work or ():
            work.has_ended = True
            subscriber.end(work)
        self.bound = self.work = None


class Registry:
    """The readers of a process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber[Any]] = []
        self._lock = threading.Lock()
        # By run, plan, world size and rank; silent for longest first.
        self._active: OrderedDict[tuple[str, str, int, int], Reader] = OrderedDict()
        self._idle: OrderedDict[tuple[str, str, int, int], Reader] = OrderedDict()

    def add_subscriber(self, subscriber: Subscriber[Any]) -> None:
        """Have a subscriber told of all readers from now on."""
        self._subscribers.append(subscriber)

    def note(
        self,
        bound: BoundPlan,
        steps: range,
        *,
        rank: int,
        world_size: int,
        reads_tokens: bool = True,
        run: str = "",
        trained_step: int | None = None,
    ) -> Reader | None:
        """Note a request for steps, checked; tell subscribers that have something to do for it.

        Does not wait for the disk.

        Args:
            reads_tokens: False for indices: the client reads its own copy, so nothing is done ahead.
            run, trained_step: as the request says, see `RequestHead`.

        Returns:
            Its reader; None if there is no place for one more.
        """
        now = time.monotonic()
        # A rank that goes on by plans that continue its first one is one reader.
        key = (run, bound.root_id, world_size, rank)
        with self._lock:
            self._end_idle(now)
            reader = self._active.pop(key, None) or self._idle.pop(key, None) or self._new()
            if reader is None:
                return None
            self._active[key] = reader
            reader.seen_seconds, reader.seen_unix_seconds = now, time.time()
            reader.last_step, reader.trained_step = steps.stop - 1, trained_step
            if trained_step is None:
                reader.begun = reader.seen_unix_seconds
            if reader.bound is not bound:  # new, or the catalogue was reloaded
                reader.stop()
                reader.bound = bound
            if not reads_tokens:
                return reader
            if reader.work is None:
                began = [(each, each.begin(bound, rank, world_size, steps)) for each in self._subscribers]
                reader.work = [(each, work) for each, work in began if work is not None]
            told = reader.work
        for subscriber, work in told:
            work.steps = steps
            if steps.start not in work.quiet or work.num_faults != bound.gatherer.num_faults:
                subscriber.note(work)
        return reader

    def note_end(self, bound: BoundPlan, trained_step: int, *, rank: int, world_size: int, run: str) -> None:
        """Note that a loader asks for no more, and the step that it yielded last.

        Another process may have had its requests: then this one counts nothing of it but that.
        """
        key = (run, bound.root_id, world_size, rank)
        with self._lock:
            reader = self._active.pop(key, None) or self._idle.pop(key, None)
            if reader is None:
                if (reader := self._new()) is None:
                    return
                reader.last_step = trained_step
            reader.stop()
            self._idle[key] = reader
            reader.seen_unix_seconds = time.time()
            reader.trained_step, reader.end = trained_step, (reader.seen_unix_seconds, trained_step)

    def _new(self) -> Reader | None:
        """Return a reader, in the place of one that is idle; None if there is no place."""
        if len(self._active) + len(self._idle) >= MAX_READERS:
            if not self._idle:
                return None
            self._idle.popitem(last=False)
        return Reader()

    def end_idle(self) -> None:
        """End what is done for readers that have become idle; called where no request may come for long."""
        with self._lock:
            self._end_idle(time.monotonic())

    def bounds(self) -> set[BoundPlan]:
        """Return the plans whose tokens are being read."""
        with self._lock:
            readers = list(self._active.values())
        return {each.bound for each in readers if each.bound and each.work is not None}

    def counts(self) -> dict[tuple[str, ...], list[float]]:
        """Return what the page shows of readers to which something was sent, or which have ended.

        By run, plan, world size and rank: unix time and last step of its latest request, the step that was
        trained (-1: not known), `Reader.end` and `begun`, then `Reader.counts`.
        """
        with self._lock:
            active, idle = list(self._active.items()), list(self._idle.items())
        shown = [each for each in (*active, *reversed(idle)) if each[1].counts[0] or each[1].end[0]]
        if len(shown) > MAX_COUNTED:  # always the same ones: the page shows how their counts grow
            shown.sort(key=lambda each: (each[1].bound is None, each[0]))
        return {
            (run, plan, str(world_size), str(rank)): [
                its.seen_unix_seconds,
                its.last_step,
                -1 if its.trained_step is None else its.trained_step,
                *its.end,
                its.begun,
                *its.counts,
            ]
            for (run, plan, world_size, rank), its in shown[:MAX_COUNTED]
        }

    def _end_idle(self, now: float) -> None:
        while self._active:
            key, reader = next(iter(self._active.items()))
            if now - reader.seen_seconds <= IDLE_SECONDS:
                return
            del self._active[key]
            self._idle[key] = reader
            reader.stop()
