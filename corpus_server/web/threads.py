"""Threads that touch the maps, and wait for the disk and for readers so that the event loop never does.

The standard executor's two futures and their locks cost as much as reading a small batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_Job = Callable[[], None]


class Threads:
    """Threads that work for an event loop; jobs are begun in order.

    The thread that became idle last is woken first: the processor's cache still holds what it needs.
    """

    def __init__(self, number: int, name: str) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._idle: list[_Thread] = []
        self._closed = False
        self._threads = [_Thread(self._next, f"{name}-{k}") for k in range(number)]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run blocking work; return what becomes its result, or its error, in the running loop.

        Work whose future is cancelled before it was begun is left out.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.put(partial(_report, work, future, loop))
        return future

    def put(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise; nobody is told of its end."""
        with self._lock:
            thread = self._idle.pop() if self._idle else None
            if thread is None:
                self._waiting.append(job)
        if thread is not None:
            thread.wake(job)

    def close(self) -> None:
        """Finish what was asked for, and end; idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.wake(None)
        for thread in self._threads:
            thread.join()

    def _next(self, thread: _Thread) -> tuple[_Job | None, bool]:
        """Return the next job, and whether the thread goes on; without a job it is idle from here on."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft(), True
            if self._closed:
                return None, False
            self._idle.append(thread)
            return None, True


class _Thread(threading.Thread):
    def __init__(self, take: Callable[[_Thread], tuple[_Job | None, bool]], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._take = take
        self._woken = threading.Lock()
        self._woken.acquire()
        self._job: _Job | None = None

    def wake(self, job: _Job | None) -> None:
        """Give an idle thread a job, or let it see that there will be none."""
        self._job = job
        self._woken.release()

    def run(self) -> None:
        """Work until there will be no more jobs."""
        while True:
            job, goes_on = self._take(self)
            if not goes_on:
                return
            if job is None:
                self._woken.acquire()
                job, self._job = self._job, None
            if job is not None:
                job()
                del job  # nothing of an answer may stay alive until the next one comes


def _report(work: Callable[[], Any], future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Work, and let the loop know what became of it."""
    if future.cancelled():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - it is raised where the work is awaited
        report, value = future.set_exception, error
    else:
        report, value = future.set_result, result
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_settle, future, report, value)


def _settle(future: asyncio.Future[Any], report: Callable[[Any], None], value: Any) -> None:
    if not future.cancelled():
        report(value)
