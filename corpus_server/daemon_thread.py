"""Run blocking work that may never end, such as reading a file on a network disk that is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` in a thread of its own that does not keep the process from ending.

    The interpreter waits for the threads of an executor at its end, however long they hang. Other work of the
    executor would wait, too.
    """
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
