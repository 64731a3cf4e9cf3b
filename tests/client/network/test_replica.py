"""How fast a replica is, and for how long it is left alone: arithmetic without any I/O."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from corpus_client import errors
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


def replica() -> Replica:
    return Replica(Endpoint.parse("http://127.0.0.1:1"))


def test_the_earliest_answer_is_cheapest_and_a_failing_replica_last() -> None:
    fast, slower, busy, new, failing = (replica() for _ in range(5))
    fast.latency, slower.latency, busy.latency = measured(0.01), measured(0.018), measured(0.01)
    busy.num_in_flight = 1
    failing.leave_alone(errors.NoProgress("silent"), 100.0, 75.0)
    order = sorted([failing, busy, slower, fast, new], key=lambda each: each.cost(100.0))
    assert order == [new, fast, slower, busy, failing]
    unknown, asked = replica(), replica()
    asked.num_in_flight, unknown.last_used = 1, 2
    assert unknown.cost(100.0) < asked.cost(100.0)
    failing.succeeded()
    assert not failing.cost(100.0)[0]


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
        assert tried.leave_alone(errors.ServerError("broke", status=500), 100.0, 75.0) == pytest.approx(delay)
        assert (tried.num_failures, tried.probe_at) == (number + 1, 100.0 + probe)
        assert tried.retry_at == pytest.approx(100.0 + delay)
    for _ in range(1100):  # the longest number that Python's floats hold is 2**1023
        assert tried.leave_alone(errors.NoProgress("silent"), 100.0, 75.0) == pytest.approx(delays[-1])
    tried.succeeded()
    assert (tried.num_failures, tried.retry_at, tried.probe_at) == (0, 0.0, 0.0)


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
        (errors.ResponseCorrupt("cut"), True),
        (errors.ReplicaRefused("another plan"), False),
        (ValueError("a mistake"), False),
    ],
    ids=repr,
)
def test_trouble_on_the_way_passes_and_a_wrong_request_does_not(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
