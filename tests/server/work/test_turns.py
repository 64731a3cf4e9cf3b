"""Turns: one question computes at a time, caller after caller, and one that hangs stops nobody."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest

from corpus_server.errors import ResponseTooLarge
from corpus_server.work import Budget, ClientLeft, Limits, Turns, turns
from tests.serving import wait_until

LONG = 30.0
NOBODY_LEAVES = bool  # a call of it says False


def run(*works: threading.Thread) -> None:
    for each in works:
        each.start()
    for each in works:
        each.join(LONG)
        assert not each.is_alive()


def test_one_question_computes_at_a_time_and_callers_have_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with five questions gets no more time than a caller with one."""
    monkeypatch.setattr(turns, "LOST_SECONDS", LONG)  # as is that of a process that is stopped
    shared, lock = Turns(), threading.Lock()
    computing, most, spent = 0, 0, Counter[str]()

    def work(caller: str) -> None:
        nonlocal computing, most
        budget = Budget(turn=shared.of(caller))
        budget.begin()
        while spent.total() < 300:
            with lock:
                computing += 1
                most = max(most, computing)
            began = time.thread_time()
            while time.thread_time() - began < 0.002:
                pass
            spent[caller] += 1
            with lock:
                computing -= 1
            budget.spend()
        budget.stop()

    run(*(threading.Thread(target=work, args=(caller,)) for caller in ("a", *["b"] * 5)))
    assert most == 1
    assert spent["a"] > 0.5 * spent["b"] > 0


def test_a_question_that_hangs_stops_nobody() -> None:
    shared, hold = Turns(), threading.Event()

    def hang() -> None:
        budget = Budget(turn=shared.of("a"))
        budget.begin()
        hold.wait(LONG)
        budget.spend()  # comes back, and waits for a turn as all do
        budget.stop()

    hanging = threading.Thread(target=hang)
    hanging.start()
    other = Budget(turn=shared.of("b"))
    other.begin()
    hold.set()
    other.stop()
    hanging.join(LONG)
    assert not hanging.is_alive()


def test_a_question_that_waits_for_its_turn_ends_when_nobody_waits_for_it() -> None:
    shared = Turns()
    first = Budget(turn=shared.of("a"))
    first.begin()
    waiting, ended = Budget(turn=shared.of("b")), threading.Event()

    def wait() -> None:
        with pytest.raises(ClientLeft):
            waiting.begin()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.end()
    assert ended.wait(LONG)
    first.spend()
    first.stop()
    last = Budget(turn=shared.of("c"))
    last.begin()  # what has left takes no turn
    thread.join(LONG)


def test_a_question_may_use_so_much_processor_time() -> None:
    budget = Budget(Limits(seconds=0.1), turn=Turns().of("a"))

    def compute() -> None:
        budget.begin()
        while True:
            began = time.thread_time()
            while time.thread_time() - began < 0.01:
                pass
            budget.spend()

    with pytest.raises(ResponseTooLarge, match="seconds of processor time"):
        compute()


def test_work_is_counted_and_refused_before_it_is_done() -> None:
    budget = Budget(Limits(rows=100, num_bytes=1000))
    budget.spend(rows=60, num_bytes=10)
    budget.check(rows=40, num_bytes=990)
    assert budget.left_rows == 40
    with pytest.raises(ResponseTooLarge) as refused:
        budget.check(rows=41, parameter="count", remedy="ask for less")
    assert (refused.value.received, refused.value.accepted) == (101, "at most 100 rows")
    assert (refused.value.parameter, refused.value.remedy) == ("count", "ask for less")
    with pytest.raises(ResponseTooLarge, match="at most 1000 bytes"):
        budget.check(num_bytes=991)
    with pytest.raises(ResponseTooLarge):
        budget.spend(rows=41)


def test_a_question_that_waits_gives_its_turn_away() -> None:

    shared, future = Turns(), Future[int]()
    budget, found = Budget(turn=shared.of("a")), list[int]()

    def wait() -> None:
        budget.begin()
        found.append(budget.wait(future, "a table is being built"))
        budget.stop()

    thread = threading.Thread(target=wait)
    thread.start()
    other = Budget(turn=shared.of("b"))
    other.begin()
    other.stop()
    future.set_result(7)
    wait_until(lambda: found == [7])
    thread.join(LONG)


def test_a_turn_that_was_taken_for_lost_before_its_thread_saw_it_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is stopped for a second, and goes on, is where that happens."""
    monkeypatch.setattr(turns, "LOST_SECONDS", -1.0)  # each turn is lost as soon as another question looks
    monkeypatch.setattr(turns, "_LOOK_SECONDS", 0.001)
    shared = Turns()

    def ask(caller: str) -> None:
        for _ in range(300):
            turn = shared.of(caller)
            turn.take(NOBODY_LEAVES)
            turn.give()

    threads = [threading.Thread(target=ask, args=(f"caller {k % 3}",), daemon=True) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
