"""Threads for an event loop: every job once and in order, errors where they are awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from corpus_server.web.threads import Threads


@pytest.fixture
def one() -> Iterator[Threads]:
    threads = Threads(1, "test")
    yield threads
    threads.close()


def test_results_and_errors_come_to_the_loop(one: Threads) -> None:
    async def work() -> None:
        assert await one.run(lambda: 6 * 7) == 42
        with pytest.raises(ZeroDivisionError):
            await one.run(lambda: 1 / 0)
        assert await one.run(lambda: threading.current_thread().name) == "test-0"

    asyncio.run(work())


def test_jobs_begin_in_order(one: Threads) -> None:
    begun: list[str] = []
    hold = threading.Event()

    async def work() -> None:
        first = one.run(hold.wait)
        one.put(lambda: begun.append("a"))
        jobs = [one.run(lambda name=name: begun.append(name)) for name in ("b", "c")]
        one.put(lambda: begun.append("d"))
        hold.set()
        await asyncio.gather(first, *jobs)

    asyncio.run(work())
    one.close()
    assert begun == ["a", "b", "c", "d"]


def test_work_that_was_cancelled_before_it_began_is_left_out(one: Threads) -> None:
    begun: list[int] = []
    hold = threading.Event()

    async def work() -> None:
        first = one.run(hold.wait)
        dropped = one.run(lambda: begun.append(1))
        dropped.cancel()
        hold.set()
        await first
        await one.run(lambda: None)

    asyncio.run(work())
    assert begun == []


def test_a_thousand_jobs_from_a_loop_are_each_done_once() -> None:
    threads = Threads(4, "test")
    done: list[int] = []

    async def work() -> None:
        await asyncio.gather(*(threads.run(lambda k=k: done.append(k)) for k in range(1000)))

    asyncio.run(work())
    threads.close()
    threads.close()
    assert sorted(done) == list(range(1000))


def test_closing_finishes_what_was_asked_for() -> None:
    threads = Threads(2, "test")
    done: list[int] = []
    for k in range(100):
        threads.put(lambda k=k: done.append(k))
    threads.close()
    assert sorted(done) == list(range(100))
