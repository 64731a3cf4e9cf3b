"""Turns of questions: one computes at a time, callers alternate, and none waits for ever."""

from __future__ import annotations

import threading

import pytest

from corpus_server.work import Turns, turns

NOBODY_LEAVES = bool  # a call of it says False


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


def test_callers_alternate_however_many_questions_one_of_them_has() -> None:
    shared = Turns()
    order: list[str] = []
    first = shared.of("first")
    first.take(NOBODY_LEAVES)

    def ask(caller: str) -> None:
        turn = shared.of(caller)
        turn.take(NOBODY_LEAVES)
        order.append(caller)
        turn.give()

    threads = []
    for number, caller in enumerate(["many"] * 5 + ["one"], 1):
        threads.append(threading.Thread(target=ask, args=(caller,)))
        threads[-1].start()
        while sum(map(len, shared._waiting.values())) < number:  # no face shows who waits
            pass
    first.give()
    for thread in threads:
        thread.join()
    assert order.index("one") <= 1
