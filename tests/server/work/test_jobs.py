"""Jobs: done once for all who wait, small ones first, given up when nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from corpus_server.errors import InvalidPlan, Overloaded
from corpus_server.work import Budget, ClientLeft, Jobs, Later
from corpus_server.work import jobs as module
from tests.serving import wait_until

LONG = 30.0


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with closing(Jobs()) as opened:
        yield opened


class Held:
    """Work that waits until it is let go, or given up; `begun` counts how often it ran."""

    def __init__(self) -> None:
        self.go, self.given_up = threading.Event(), threading.Event()
        self.begun = 0

    def __call__(self, budget: Budget) -> str:
        self.begun += 1
        budget.when_over(lambda _: self.given_up.set())
        while not self.go.wait(0.01):
            budget.spend()
        return "made"


def ask(jobs: Jobs, key: str, work: Callable[[Budget], str], budget: Budget, *, small: bool = False) -> str:
    return jobs.result(budget, key, work, is_small=small, what="it is being made")


def test_work_is_done_once_for_all_who_wait(jobs: Jobs) -> None:
    work = Held()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, jobs, "key", work, Budget()) for _ in range(4)]
        wait_until(lambda: work.begun)
        work.go.set()
        assert [each.result(LONG) for each in asked] == ["made"] * 4
    assert work.begun == 1
    assert ask(jobs, "key", lambda _: "again", Budget()) == "again"


def test_small_work_waits_for_no_large_work(jobs: Jobs) -> None:
    large = [Held() for _ in range(5)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, jobs, f"large {n}", each, Budget()) for n, each in enumerate(large)]
        wait_until(lambda: any(each.begun for each in large))
        assert ask(jobs, "small", lambda _: "small", Budget(), small=True) == "small"
        assert sum(each.begun for each in large) == 1
        for each in large:
            each.go.set()
        assert [each.result(LONG) for each in asked] == ["made"] * 5


def test_callers_have_turns(jobs: Jobs) -> None:
    """A caller with one piece of work waits for one of another caller, who has five."""
    order: list[str] = []
    first = Held()

    def note(name: str) -> Callable[[Budget], str]:
        def work(_: Budget) -> str:
            order.append(name)
            return name

        return work

    with ThreadPoolExecutor(8) as pool:
        pool.submit(ask, jobs, "first", first, Budget(caller="a"))
        wait_until(lambda: first.begun)
        for number in range(4):
            budget = Budget(caller="a", blocks=False)
            with pytest.raises(Later):
                ask(jobs, f"a{number}", note("a"), budget)
        later = Budget(caller="b", blocks=False)
        with pytest.raises(Later) as waiting:
            ask(jobs, "b", note("b"), later)
        first.go.set()
        assert waiting.value.future.result(LONG) == "b"
    wait_until(lambda: len(order) == 5)
    assert order.index("b") <= 1


def test_work_is_given_up_when_nobody_waits(jobs: Jobs) -> None:
    work, one, other = Held(), Budget(blocks=False), Budget(blocks=False)
    for each in (one, other):
        with pytest.raises(Later):
            ask(jobs, "key", work, each)
    wait_until(lambda: work.begun)
    one.end()
    assert not work.given_up.wait(0.2)
    other.end()
    assert work.given_up.wait(LONG)
    assert ask(jobs, "key", lambda _: "anew", Budget()) == "anew"


def test_work_that_has_not_begun_is_given_up_too(jobs: Jobs) -> None:
    first, second, budget = Held(), Held(), Budget(blocks=False)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, jobs, "first", first, Budget())
        wait_until(lambda: first.begun)
        with pytest.raises(Later) as waiting:
            ask(jobs, "second", second, budget)
        budget.end()
        first.go.set()
        assert asked.result(LONG) == "made"
    with pytest.raises(ClientLeft):
        waiting.value.future.result(LONG)
    assert not second.begun


def test_work_goes_on_for_clients_that_come_again(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were told so; if none of them does, it is given up."""
    work, budget = Held(), Budget(blocks=False)
    with pytest.raises(Later):
        ask(jobs, "key", work, budget)
    wait_until(lambda: work.begun)
    assert isinstance(budget.tired("it is being made"), Overloaded)
    assert not work.given_up.wait(0.5)
    real = module.time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + module.COMES_AGAIN_SECONDS)
    assert work.given_up.wait(LONG)


def test_an_error_is_that_of_all_who_wait_and_is_not_kept(jobs: Jobs) -> None:
    def fail(_: Budget) -> str:
        raise InvalidPlan("no")

    with pytest.raises(InvalidPlan):
        ask(jobs, "key", fail, Budget())
    assert ask(jobs, "key", lambda _: "now", Budget()) == "now"


def test_a_question_that_is_asked_again_fails_with_what_it_waited_for(jobs: Jobs) -> None:
    def fail(_: Budget) -> str:
        raise InvalidPlan("no")

    budget = Budget(blocks=False)
    with pytest.raises(Later) as waiting:
        ask(jobs, "key", fail, budget)
    with suppress(InvalidPlan):
        waiting.value.future.result(LONG)
    with pytest.raises(InvalidPlan):
        ask(jobs, "key", fail, budget)


def test_too_much_work_of_one_caller_is_refused(jobs: Jobs) -> None:
    works = [Held() for _ in range(module.MAX_WAITING + 2)]
    refused = 0
    for number, work in enumerate(works):
        with suppress(Later):
            try:
                ask(jobs, str(number), work, Budget(caller="a", blocks=False))
            except Overloaded:
                refused += 1
    assert refused in (1, 2)  # the first one may have begun by then
    with pytest.raises(Later):
        ask(jobs, "other", works[0], Budget(caller="b", blocks=False))


def test_the_end_gives_up_all_work() -> None:
    jobs, work = Jobs(), Held()
    with pytest.raises(Later):
        ask(jobs, "key", work, Budget(blocks=False))
    wait_until(lambda: work.begun)
    jobs.close()
    assert work.given_up.is_set()
    jobs.close()
