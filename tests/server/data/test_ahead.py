"""Responses made ahead: for those who go step by step, for one exact request, and within a bound."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from corpus_server.access import ANYONE
from corpus_server.data import ahead as ahead_module
from corpus_server.data import exchange
from corpus_server.data.ahead import MAX_RESPONSE_BYTES, RUN_BYTES, Ahead, Budget, Made, following, step_of
from corpus_server.data.head import parse_simple_get
from corpus_server.data.response import Response

SIZE = RUN_BYTES // 4


def text(step: int, more: bytes = b"&count=1&format=raw") -> bytes:
    return b"GET /v1/batches?plan=ab&step=%d%b HTTP/1.1\r\nHost: x\r\n\r\n" % (step, more)


def made(run: tuple[bytes, ...], size: int = SIZE) -> dict[bytes, Made]:
    requests = {each: parse_simple_get(each) for each in run}
    return {each: Made(it, Response(200, {}, [[bytes(size)]])) for each, it in requests.items() if it}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (text(7), text(8)),
        (text(9, b""), text(10, b"")),
        (text(9_999), text(10_000)),
        (text(99, b"&count=3"), text(102, b"&count=3")),
        (
            b"GET /v1/batches?count=2&step=3 HTTP/1.1\r\n\r\n",
            b"GET /v1/batches?count=2&step=5 HTTP/1.1\r\n\r\n",
        ),
        (b"GET /v1/batches?plan=ab HTTP/1.1\r\n\r\n", None),
        (b"GET /v1/batches?first_step=3 HTTP/1.1\r\n\r\n", None),
        (text(7, b"&rank=step=1&count=1"), text(8, b"&rank=step=1&count=1")),
    ],
)
def test_what_follows_is_the_same_text_with_the_next_step(before: bytes, after: bytes | None) -> None:
    assert following(before) == ([] if after is None else [after])


def test_a_run_is_made_for_the_second_of_two_steps_in_a_row() -> None:
    ahead = Ahead(Budget())
    assert ahead.next_run(text(5), SIZE) == ()
    run = ahead.next_run(text(6), SIZE)
    assert run == tuple(text(step) for step in (7, 8, 9, 10))
    assert ahead.is_making(text(8))
    assert not ahead.is_making(text(11))
    assert ahead.take(text(7)) is None
    ahead.keep(run, made(run))
    assert not ahead.is_making(text(8))
    assert ahead.take(text(7)) is not None
    assert ahead.take(text(7)) is None, "a response is sent once"
    assert ahead.next_run(text(7), SIZE) == ()  # three are left
    for step, expected in ((8, (11, 12, 13, 14)), (9, ())):
        assert ahead.take(text(step)) is not None
        assert ahead.next_run(text(step), SIZE) == tuple(map(text, expected))


@pytest.mark.parametrize("other", [5, 6, 8, 700])
def test_another_step_than_the_expected_one_drops_everything(other: int) -> None:
    ahead = Ahead(Budget())
    ahead.next_run(text(5), SIZE)
    run = ahead.next_run(text(6), SIZE)
    ahead.keep(run, made(run))
    assert ahead.next_run(text(other), SIZE) == ()
    assert ahead.take(text(9)) is None


def test_a_run_that_was_dropped_while_it_was_made_is_not_kept() -> None:
    ahead = Ahead(Budget())
    ahead.next_run(text(5), SIZE)
    run = ahead.next_run(text(6), SIZE)
    ahead.next_run(text(50), SIZE)
    later = ahead.next_run(text(51), SIZE)
    ahead.keep(run, made(run))
    assert ahead.take(text(7)) is None
    assert ahead.is_making(later[0])


def test_a_run_ends_with_the_first_response_that_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed may be mended by the time that the client asks."""
    statuses = iter([200, 200, 503, 200])

    def respond(*_: object) -> Iterator[None]:
        yield None
        return Response(next(statuses), {}, [[b"body"]])

    monkeypatch.setattr(exchange, "respond", respond)
    first = b"GET /v1/batches?corpus=c&seq_len=4&batch_size=2&step=7 HTTP/1.1\r\nHost: x\r\n\r\n"
    texts = [first, *following(first, 3)]
    assert list(exchange.make_ahead(Mock(), texts, ANYONE)) == texts[:2]


def test_the_step_of_a_text_is_the_one_that_is_counted_up() -> None:
    assert [step_of(each) for each in following(text(7), 3)] == [8, 9, 10]
    assert step_of(b"GET /v1/batches?plan=ab HTTP/1.1\r\n\r\n") == -1


@pytest.mark.parametrize("num_bytes", [1, MAX_RESPONSE_BYTES])
def test_small_responses_are_made_up_to_the_bytes_of_a_run(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr(ahead_module, "RUN_BYTES", 3 * num_bytes)
    ahead = Ahead(Budget())
    assert [len(ahead.next_run(text(step), num_bytes)) for step in range(2)] == [0, 3]


def test_all_connections_together_use_the_bytes_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "MAX_BYTES", 100)
    budget = Budget()
    one, two, three = (Mock(spec=Ahead) for _ in range(3))

    def dropped() -> list[bool]:
        found = [each.clear.called for each in (one, two, three)]
        for each in (one, two, three):
            each.clear.reset_mock()
        return found

    budget.forget(three)
    assert [budget.share(each) for each in (one, one, two)] == [66, 66, 33]
    for ahead, num_bytes, expected in (
        (one, 60, [False, False, False]),
        (two, 40, [False, False, False]),
        (two, 41, [True, False, False]),
        (one, 59, [False, False, False]),
        (one, 60, [False, True, False]),
        (two, 40, [False, False, False]),
        (three, 40, [True, False, False]),
        (one, 20, [False, False, False]),
        (one, 21, [False, True, False]),
    ):
        budget.note(ahead, num_bytes)
        assert dropped() == expected
    for ahead in (three, three, one):
        budget.forget(ahead)
    budget.note(two, 100)
    assert dropped() == [False, False, False]
    assert budget.share(two) == 66


@pytest.mark.parametrize("num_bytes", [0, MAX_RESPONSE_BYTES + 1])
def test_large_and_failed_responses_are_not_made(num_bytes: int) -> None:
    ahead = Ahead(Budget())
    assert [ahead.next_run(text(step), num_bytes) for step in range(4)] == [()] * 4


def test_all_connections_together_keep_no_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones get less; where that is too late, those that asked longest ago lose theirs."""
    monkeypatch.setattr(ahead_module, "MAX_BYTES", 10 * SIZE)
    budget, connections = Budget(), []
    for _ in range(5):
        ahead = Ahead(budget)
        ahead.next_run(text(5), SIZE)
        run = ahead.next_run(text(6), SIZE)
        ahead.keep(run, made(run))
        connections.append(ahead)
    assert [ahead.take(text(7)) is not None for ahead in connections] == [False] + [True] * 4


def test_many_connections_use_everything_that_was_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its share: nobody takes the room from another who has not used it yet."""
    monkeypatch.setattr(ahead_module, "MAX_BYTES", 64 * SIZE)
    budget = Budget()
    connections = [Ahead(budget) for _ in range(20)]
    taken, asked = 0, 0
    for step in range(100):
        for ahead in connections:
            was_made = ahead.take(text(step)) is not None
            run = ahead.next_run(text(step), SIZE)
            ahead.keep(run, made(run))
            taken, asked = taken + (was_made and step >= 10), asked + (step >= 10)
    assert taken == asked
    for ahead in connections[1:]:
        ahead.drop()
    left = connections[0]
    assert [ahead.take(text(100)) is None for ahead in connections[1:]] == [True] * 19
    assert max(len(left.next_run(text(step), SIZE)) for step in range(100, 110)) == RUN_BYTES // SIZE


def test_with_more_connections_than_there_is_room_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "MAX_BYTES", 16 * SIZE)
    budget = Budget()
    connections = [Ahead(budget) for _ in range(20)]
    for ahead in connections:
        ahead.next_run(text(5), SIZE)
        run = ahead.next_run(text(6), SIZE)
        ahead.keep(run, made(run))
    assert [ahead.next_run(text(7), SIZE) for ahead in connections] == [()] * 20
