"""How fast a replica is, and for how long it is left alone: arithmetic without any I/O."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from corpus_client import errors
from corpus_client.network.control import ControlPlane
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.replica import FORGET_SECONDS, Latency, Replica


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


def test_late_is_what_is_rare() -> None:
    assert measured(*7 * [0.2]).late_after(3) == 1.0, "too few to tell"
    assert measured(*19 * [0.2], 5.0).late_after(3) == pytest.approx(0.6)
    assert measured(*20 * [0.001]).late_after(3) == 0.1, "not before a busy machine would be"


def replica() -> Replica:
    endpoint = Endpoint.parse("http://127.0.0.1:1")
    return Replica(endpoint, ControlPlane(endpoint))


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
    older, newest = Mock(usable=True, num_waiting=0), Mock(usable=True, num_waiting=1)
    asked.connections = [older, newest]
    assert asked.connection(idle=False) is newest
    assert asked.connection(idle=True) is older
    newest.usable = False
    assert asked.connection(idle=False) is None


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
