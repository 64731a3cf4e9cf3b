"""Threads that take work: the one that ended its work last first."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from corpus_server.answers.hot_threads import HotThreads

SECONDS = 60.0


@pytest.fixture
def threads() -> Iterator[HotThreads]:
    threads = HotThreads(2, "hot")
    yield threads
    threads.shutdown()


def hold(threads: HotThreads) -> threading.Event:
    """Keep a thread at work until the event is set, and return once it is."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert end.wait(SECONDS)

    threads.submit(work)
    assert begun.wait(SECONDS)
    return end


def name_of_thread() -> str:
    return threading.current_thread().name


def wait_until_idle(threads: HotThreads, number: int) -> None:
    """Wait until so many threads are idle: a result is there before its thread is."""
    pause = threading.Event()
    while len(threads._idle) < number:
        pause.wait(0.001)


@pytest.mark.parametrize("last", [0, 1])
def test_the_thread_that_ended_last_is_asked_first(threads: HotThreads, last: int) -> None:
    held = [hold(threads), hold(threads)]
    held[1 - last].set()
    wait_until_idle(threads, 1)
    held[last].set()
    wait_until_idle(threads, 2)
    for _ in range(3):
        assert threads.submit(name_of_thread).result(SECONDS) == f"hot_{last}"
        wait_until_idle(threads, 2)


def test_work_beyond_the_threads_waits_in_order(threads: HotThreads) -> None:
    held = [hold(threads), hold(threads)]
    done: list[int] = []
    futures = [threads.submit(done.append, number) for number in range(5)]
    assert not any(future.running() or future.done() for future in futures)
    held[0].set()
    for future in futures:
        future.result(SECONDS)
    assert done == list(range(5))
    held[1].set()


def test_results_and_errors_reach_who_asked(threads: HotThreads) -> None:
    assert threads.submit(divmod, 7, 4).result(SECONDS) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 7, 0).result(SECONDS)
    assert threads.submit(int, "11", base=2).result(SECONDS) == 3  # the thread goes on


def test_an_idle_thread_holds_nothing_of_its_last_work(threads: HotThreads) -> None:
    """Neither what it was called with nor, of an error, the future: no garbage is left to be collected."""

    class Thing:
        def fail(self) -> None:
            raise ValueError

    gc.disable()
    try:
        thing = Thing()
        done, failed = threads.submit(id, thing), threads.submit(Thing().fail)
        done.result(SECONDS)
        failed.exception(SECONDS)
        held = [weakref.ref(each) for each in (thing, done, failed)]
        del thing, done, failed
        wait_until_idle(threads, len(threads._threads))
        assert [each() for each in held] == [None] * 3
    finally:
        gc.enable()


def test_the_interpreter_waits_for_none(threads: HotThreads) -> None:
    """One may hang in a read of the disk."""
    assert threads.submit(lambda: threading.current_thread().daemon).result(SECONDS)


def test_the_end_waits_for_what_is_under_way_and_cancels_the_rest(threads: HotThreads) -> None:
    held = [hold(threads), hold(threads)]
    waiting = threads.submit(name_of_thread)
    ending = threading.Thread(target=threads.shutdown, kwargs={"cancel_futures": True})
    ending.start()
    with pytest.raises(CancelledError):
        waiting.result(SECONDS)
    assert ending.is_alive()
    for event in held:
        event.set()
    ending.join(SECONDS)
    assert not ending.is_alive()
    assert not any(thread.is_alive() for thread in threads._threads)
    with pytest.raises(RuntimeError, match="told to end"):
        threads.submit(name_of_thread)


def test_the_end_begins_nothing_that_waits(threads: HotThreads) -> None:
    """Not even while it cancels one after the other."""
    held = [hold(threads), hold(threads)]
    first, second = (threads.submit(name_of_thread) for _ in range(2))

    def let_go(_: object) -> None:
        held[0].set()
        pause = threading.Event()
        while all(thread.is_alive() for thread in threads._threads) and not second.done():
            pause.wait(0.001)

    first.add_done_callback(let_go)
    ending = threading.Thread(target=threads.shutdown, kwargs={"cancel_futures": True})
    ending.start()
    with pytest.raises(CancelledError):
        second.result(SECONDS)
    held[1].set()
    ending.join(SECONDS)


def test_the_end_lets_work_that_waits_come_first(threads: HotThreads) -> None:
    held = [hold(threads), hold(threads)]
    waiting = threads.submit(name_of_thread)
    threads.shutdown(wait=False)
    for event in held:
        event.set()
    assert waiting.result(SECONDS).startswith("hot_")
    threads.shutdown()
