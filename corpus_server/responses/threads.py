"""Threads for work that the event loop must not wait for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from corpus_server.errors import Overloaded

T = TypeVar("T")

PAUSE_SECONDS = 0.05
"""How long a thread waits at most for refusals: however many come, answers go on."""

_Call = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]]


class Threads:
    """Threads of which the one that ended its work last takes the next.

    One of them, if there are several, is kept for work that does not say that it takes long. Such work, and
    work that takes long, each wait in the order in which they came.

    All of them run from the start: no request can fail because no thread can be started. Beside the standard
    library's pool, whose threads take turns, and its two futures for each call, a request of 16 x 1,025 costs
    0.85 of the CPU (`scripts/bench latency`); see docs/performance.md.

    Raises:
        Overloaded: the process, or the machine, has as many threads as it may.
    """

    def __init__(self, number: int, name: str) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._waiting_long: deque[_Call] = deque()
        self._max_long = max(1, number - 1)
        self._long: set[int] = set()  # threads whose work takes long
        self._long_is_next = False
        self._idle: list[tuple[int, SimpleQueue[_Call | None]]] = []  # each idle thread, and what wakes it
        self._began: dict[int, float] = {}  # by thread, the monotonic second at which its work began
        self._may_begin = threading.Event()
        self._may_begin.set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for k in range(number):
                thread = threading.Thread(target=self._work, name=f"{name}_{k}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise Overloaded(f"the {number} threads for {name} cannot be started: {error}") from error

    @property
    def are_wanted(self) -> bool:
        """Whether work waits for one of them."""
        return bool(self._waiting or self._waiting_long)

    def num_stuck(self, seconds: float) -> int:
        """Return how many threads have been at one piece of work for longer than that."""
        now = time.monotonic()
        return sum(now - began > seconds for began in list(self._began.values()))

    def pause(self) -> None:
        """Have threads begin nothing until the event loop has taken what has come; for the loop's thread.

        Where hundreds of requests are to be refused at once, 99 % are in three quarters of the time, and what
        is answered meanwhile takes 1.1 times as long.
        """
        if self._may_begin.is_set():
            self._may_begin.clear()
            asyncio.get_running_loop().call_soon(self._may_begin.set)

    def takes_long(self) -> bool:
        """Say so of the work of this thread; return whether it may go on, or shall be run again as long."""
        with self._lock:
            if len(self._long) < self._max_long:
                self._long.add(threading.get_ident())
            return threading.get_ident() in self._long

    async def run(self, work: Callable[[], T], *, is_long: bool = False) -> T:
        """Run work in a thread, and return or raise what it does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._idle and (not is_long or len(self._long) < self._max_long):
                thread, inbox = self._idle.pop()
                if is_long:
                    self._long.add(thread)
                inbox.put((loop, future, work))
            else:
                (self._waiting_long if is_long else self._waiting).append((loop, future, work))
        return await future

    def close(self) -> None:
        """End the threads after what they do now, without what waits; idempotent."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._waiting_long.clear()
            for _, inbox in self._idle:
                inbox.put(None)
            self._idle.clear()
        for thread in self._threads:
            thread.join()

    def _next(self) -> _Call | None:
        """Return work for this thread; short work and long work take turns."""
        self._long.discard(threading.get_ident())
        is_free = len(self._long) < self._max_long
        if self._waiting_long and is_free and (self._long_is_next or not self._waiting):
            self._long_is_next = False
            self._long.add(threading.get_ident())
            return self._waiting_long.popleft()
        self._long_is_next = True
        return self._waiting.popleft() if self._waiting else None

    def _work(self) -> None:
        own, inbox = threading.get_ident(), SimpleQueue[_Call | None]()
        while True:
            with self._lock:
                if self._closed:
                    return
                if (call := self._next()) is None:
                    self._idle.append((own, inbox))
            if call is None and (call := inbox.get()) is None:
                return
            loop, future, work = call
            self._may_begin.wait(PAUSE_SECONDS)
            self._began[own] = time.monotonic()
            try:
                settle = partial(_settle, future, work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                settle = partial(_settle, future, error=error)
            del self._began[own]
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle)
            del call, future, work, settle  # what they hold is not needed while this thread waits


def _settle(future: asyncio.Future[T], result: Any = None, error: BaseException | None = None) -> None:
    if not future.done():  # else its task was cancelled
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
