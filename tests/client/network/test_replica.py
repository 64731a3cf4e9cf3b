"""How fast a replica is, and for how long it is left alone: arithmetic without any I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from corpus_client import errors
from corpus_client.network.control import ControlPlane
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.replica import FORGET_SECONDS, Latency, Replica, may_pass


def measured(*seconds: float, waited: bool = True) -> Latency:
    latency = Latency()
    for each in seconds:
        latency.add(each, 100.0, waited=waited)
    return latency


def test_what_was_not_waited_for_is_only_an_upper_bound() -> None:
    assert measured(0.5, waited=False).expected(100) == 0
    latency = measured(0.2, 0.2, 0.2)
    latency.add(9.0, 100.0, waited=False)
    assert latency.expected(100) == 0.2
    for _ in range(3):
        latency.add(0.1, 100.0, waited=False)
    assert latency.expected(100) == 0.1
    latency.add(0.1, 100.0 + FORGET_SECONDS, waited=False)
    assert latency.expected(100 + FORGET_SECONDS) == 0.05, "as usual at most: nothing new"


def test_a_slow_replica_is_forgiven_in_time() -> None:
    latency = measured(0.05)
    assert latency.expected(100 + FORGET_SECONDS) == pytest.approx(0.025)
    assert latency.expected(100 + 7 * FORGET_SECONDS) < 0.0005


@pytest.mark.parametrize(
    ("seconds", "usual"),
    [
        ([], 0),
        ([1], 1),
        ([1, 2], 2),
        ([3, 1, 2], 2),
        ([1, 2, 3, 4], 3),
        ([5, 1, 4, 2, 3], 3),
        ([9, 1, 2, 3, 8, 7], 3),
    ],
)
def test_usual_is_the_median_of_the_last_five(seconds: list[float], usual: float) -> None:
    assert measured(*seconds).expected(100.0) == usual


@pytest.mark.parametrize(
    ("seconds", "late"),
    [
        ([], 1.0),
        (7 * [5.0], 1.0),
        (8 * [5.0], 10.0),
        ([each / 10 for each in range(20, 0, -1)], 3.8),
        ([0.0, *64 * [2.0]], 4.0),
        (8 * [0.04], 0.1),
        (8 * [0.06], 0.12),
    ],
    ids=["none", "too few", "just enough", "spread", "the oldest forgotten", "floor", "above the floor"],
)
def test_late_is_twice_the_95th_percentile(seconds: list[float], late: float) -> None:
    assert measured(*seconds).late_after(2.0) == late


def test_late_is_what_is_rare() -> None:
    assert measured(*7 * [0.2]).late_after(3) == 1.0, "too few to tell"
    assert measured(*19 * [0.2], 5.0).late_after(3) == pytest.approx(0.6)
    assert measured(*20 * [0.001]).late_after(3) == 0.1, "not before a busy machine would be"


def replica() -> Replica:
    endpoint = Endpoint.parse("http://127.0.0.1:1")
    return Replica(endpoint, ControlPlane(endpoint))


def test_a_new_replica_has_neither_failures_nor_requests() -> None:
    new = replica()
    assert (new.connections, new.opening, new.refused) == ([], None, None)
    assert (new.num_in_flight, new.num_failures, new.last_used) == (0, 0, 0)
    assert (new.retry_at, new.probe_at) == (0.0, 0.0)
    assert (new.plan_in_doubt, new.gone, new.usable) == (False, False, True)


@pytest.mark.parametrize(("refused", "gone"), [(True, False), (False, True), (True, True)])
def test_a_replica_that_was_refused_or_is_gone_is_not_usable(refused: bool, gone: bool) -> None:
    tried = replica()
    tried.refused, tried.gone = errors.ReplicaRefused("no") if refused else None, gone
    assert not tried.usable


def test_cost_counts_the_requests_before_an_answer() -> None:
    tried = replica()
    tried.latency = measured(0.25)
    tried.num_in_flight, tried.last_used, tried.probe_at = 3, 7, 100.0
    assert tried.cost(100.0) == (False, 1.0, 3, 7)
    tried.probe_at = 100.5
    assert tried.cost(100.0) == (True, 1.0, 3, 7)


def test_the_earliest_answer_is_cheapest_and_a_failing_replica_last() -> None:
    fast, slower, busy, new, failing = (replica() for _ in range(5))
    fast.latency, slower.latency, busy.latency = measured(0.01), measured(0.018), measured(0.01)
    busy.num_in_flight = 1
    failing.leave_alone(errors.NoProgress("silent"), 100.0)
    order = sorted([failing, busy, slower, fast, new], key=lambda each: each.cost(100.0))
    assert order == [new, fast, slower, busy, failing]
    unknown, asked = replica(), replica()
    asked.num_in_flight, unknown.last_used = 1, 2
    assert unknown.cost(100.0) < asked.cost(100.0)
    failing.succeeded()
    assert not failing.cost(100.0)[0]


def test_a_request_that_may_wait_its_turn_goes_on_the_newest_connection_or_a_new_one() -> None:
    """An older one is only there for the answers that are still on their way on it."""
    asked = replica()
    older, newest = Mock(usable=True, num_in_flight=0), Mock(usable=True, num_in_flight=1)
    asked.connections = [older, newest]
    assert asked.connection(idle=False) is newest
    assert asked.connection(idle=True) is older
    newest.num_in_flight = 0
    assert asked.connection(idle=True) is newest
    newest.usable = False
    assert asked.connection(idle=False) is None
    assert asked.connection(idle=True) is older
    older.num_in_flight = 1
    assert asked.connection(idle=True) is None
    asked.connections = [older]
    assert asked.connection(idle=False) is older
    asked.connections = []
    assert asked.connection(idle=False) is asked.connection(idle=True) is None


def test_each_failure_in_a_row_takes_longer_and_a_busy_server_is_obeyed() -> None:
    tried = replica()
    delays = [tried.leave_alone(errors.NoProgress("silent"), 100.0) for _ in range(12)]
    assert 0.025 <= delays[0] <= 0.05
    assert 1.0 <= delays[-1] <= 2.0
    assert tried.probe_at == 130
    full = errors.ServerError("full", status=503, retry_after_seconds=40)
    told = {tried.leave_alone(full, 100.0) for _ in range(20)}
    assert 40 <= min(told) < max(told) <= 60  # ranks that were refused together come back one by one
    assert 140 <= tried.probe_at <= 160


@pytest.mark.parametrize(
    ("end", "delays"),
    [
        (max, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]),
        (min, [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
    ],
    ids=["longest", "shortest"],
)
def test_a_back_off_doubles_up_to_two_seconds_less_up_to_half_by_chance(
    end: Callable[[float, float], float], delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And replicas that work are preferred for up to half a minute."""
    monkeypatch.setattr(random, "uniform", end)
    tried = replica()
    for number, (delay, probe) in enumerate(zip(delays, [1, 2, 4, 8, 16, 30, 30, 30], strict=True)):
        assert tried.leave_alone(errors.ServerError("broke", status=500), 100.0) == pytest.approx(delay)
        assert (tried.num_failures, tried.probe_at) == (number + 1, 100.0 + probe)
        assert tried.retry_at == pytest.approx(100.0 + delay)
    for _ in range(1100):  # the longest number that Python's floats hold is 2**1023
        assert tried.leave_alone(errors.NoProgress("silent"), 100.0) == pytest.approx(delays[-1])
    tried.succeeded()
    assert (tried.num_failures, tried.retry_at, tried.probe_at) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("end", "asked", "delay"),
    [(max, 8, 12), (min, 8, 8), (max, 0.04, 0.06), (min, 0.04, 0.04), (max, 0, 0.05), (min, 0, 0.025)],
)
def test_a_server_that_asks_for_time_gets_up_to_half_as_much_again(
    end: Callable[[float, float], float], asked: float, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", end)
    tried = replica()
    error = errors.ServerError("full", status=503, retry_after_seconds=asked)
    assert tried.leave_alone(error, 100.0) == pytest.approx(delay)
    assert tried.retry_at == pytest.approx(100.0 + delay)
    assert tried.probe_at == 100.0 + max(delay, 1.0)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (errors.ServerError("busy", status=503), True),
        (errors.ServerError("wrong", status=422), False),
        (errors.UnknownPlan("forgotten", status=404), True),
        (errors.UnknownCorpus("none", status=404), False),
        (errors.AccessDenied("no", status=401), False),
        (errors.ConnectionFailed("refused"), True),
        (errors.NoProgress("silent"), True),
        (errors.AnswerCorrupt("cut"), True),
        (errors.ReplicaRefused("another plan"), False),
        (ValueError("a mistake"), False),
    ],
    ids=repr,
)
def test_trouble_on_the_way_passes_and_a_wrong_request_does_not(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
