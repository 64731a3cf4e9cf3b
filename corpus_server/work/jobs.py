"""Work that is done once for all who wait for it: tables of plans, and plans of megabytes.

Two threads do it. One of them takes small work alone, so that it never waits for large work. In each class
the callers have turns, as in `turns.py`. Work for which nobody waits any more is given up.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from corpus_server.errors import Overloaded
from corpus_server.work.budget import Budget, ClientLeft

T = TypeVar("T")

COMES_AGAIN_SECONDS: Final = 10.0
"""Work goes on so long for clients that were told to come again, and have not come yet."""

MAX_WAITING: Final = 16
"""Jobs of one caller that wait; a further one is refused. Those of other callers have turns between them."""

_LOOK_SECONDS: Final = 1.0


class _Job:
    def __init__(self, key: Hashable, work: Callable[[Budget], Any], caller: str) -> None:
        self.key, self.work = key, work
        self.future: Future[Any] = Future()
        self.budget = Budget(caller=caller)
        self.waiting: set[Budget] = set()
        self.wanted_until = 0.0  # by clients that come again


def shared(
    jobs: Jobs | None,
    budget: Budget,
    key: Hashable,
    work: Callable[[Budget], T],
    *,
    is_small: bool,
    what: str,
) -> T:
    """Return what work returns, see `Jobs.result`; without `jobs` who asks does it."""
    if jobs is None:
        return work(budget)
    return jobs.result(budget, key, work, is_small=is_small, what=what)


class Jobs:
    """The jobs of a process; safe to use from several threads.

    Raises:
        Overloaded: the machine has no thread left.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._jobs: dict[Hashable, _Job] = {}  # that wait or run
        self._queues: dict[bool, OrderedDict[str, deque[_Job]]] = {True: OrderedDict(), False: OrderedDict()}
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        try:
            for classes in ((True,), (True, False)):
                thread = threading.Thread(
                    target=self._run, args=(classes,), name=f"job_{len(self._threads)}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise Overloaded(f"the threads for jobs cannot be started: {error}") from error

    def result(
        self, budget: Budget, key: Hashable, work: Callable[[Budget], T], *, is_small: bool, what: str
    ) -> T:
        """Return what `work` returns, which is called once for all who ask for the same key meanwhile.

        Args:
            budget: of who waits.
            work: gets the job's own budget, which ends when nobody waits any more.
            what: is waited for, as a sentence for clients.

        Raises:
            ClientLeft, Later, Overloaded: see `Budget.wait`; Overloaded, too, if too many jobs of the caller
                wait.
        """
        future: Future[T] = budget.once(key, partial(self._joined, budget, key, work, is_small=is_small))
        return budget.wait(future, what)

    def close(self) -> None:
        """Give up all work and wait for the threads; idempotent."""
        with self._changed:
            self._is_closed = True
            jobs = list(self._jobs.values())
            self._changed.notify_all()
        for job in jobs:
            job.budget.end()
        for thread in self._threads:
            thread.join()

    def _joined(
        self, budget: Budget, key: Hashable, work: Callable[[Budget], Any], *, is_small: bool
    ) -> Future[Any]:
        with self._changed:
            if (job := self._jobs.get(key)) is None:
                queue = self._queues[is_small].setdefault(budget.caller, deque())
                if len(queue) >= MAX_WAITING or self._is_closed:
                    raise Overloaded(f"{len(queue)} tables or plans of yours wait to be made in this process")
                job = self._jobs[key] = _Job(key, work, budget.caller)
                queue.append(job)
                self._changed.notify_all()
            job.waiting.add(budget)
        budget.when_over(partial(self._leave, job, budget))
        return job.future

    def _leave(self, job: _Job, budget: Budget, comes_again: bool) -> None:
        with self._changed:
            job.waiting.discard(budget)
            if comes_again:
                job.wanted_until = time.monotonic() + COMES_AGAIN_SECONDS
            is_unwanted = self._give_up_if_unwanted(job)
        if is_unwanted:
            job.budget.end()

    def _give_up_if_unwanted(self, job: _Job) -> bool:
        if job.waiting or time.monotonic() < job.wanted_until:
            return False
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
        return True

    def _run(self, classes: tuple[bool, ...]) -> None:
        while (job := self._next(classes)) is not None:
            try:
                result = job.work(job.budget)
            except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
                settle: Callable[[], None] = partial(job.future.set_exception, error)
            else:
                settle = partial(job.future.set_result, result)
                del result
            with self._changed:
                if self._jobs.get(job.key) is job:
                    del self._jobs[job.key]
            settle()
            del job, settle  # what they hold is not needed while this thread waits

    def _next(self, classes: tuple[bool, ...]) -> _Job | None:
        while True:
            unwanted = []
            with self._changed:
                if self._is_closed:
                    return None
                now = time.monotonic()
                # Nobody came again: a queue is looked through here, what runs once a second.
                unwanted = [job for job in self._jobs.values() if 0 < job.wanted_until < now]
                unwanted = [job for job in unwanted if self._give_up_if_unwanted(job)]
                if not unwanted:
                    for is_small in classes:
                        if (job := self._taken(is_small)) is not None:
                            return job
                    self._changed.wait(_LOOK_SECONDS if self._jobs else None)
            for each in unwanted:
                each.budget.end()

    def _taken(self, is_small: bool) -> _Job | None:
        queues = self._queues[is_small]
        while queues:
            caller, queue = queues.popitem(last=False)
            job = queue.popleft() if queue else None
            if queue:
                queues[caller] = queue
            if job is None:
                continue
            if self._jobs.get(job.key) is job:
                return job
            job.future.set_exception(ClientLeft("nobody waits for it"))
        return None
