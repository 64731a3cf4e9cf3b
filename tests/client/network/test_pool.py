"""Which replica is asked, and which connections are kept: decided without a network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from corpus_client import errors
from corpus_client.network.pool import Pool
from corpus_client.network.replica import Replica
from corpus_client.network.replicas import Exchange, Replicas, _Attempt
from corpus_client.network.transport import Connection


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    """Two replicas to which nothing is connected."""
    with Replicas(["http://127.0.0.1:1", "http://127.0.0.1:2"]) as replicas:
        replicas._pool.run = Mock()
        yield replicas


@pytest.fixture
def pool(replicas: Replicas) -> Pool:
    return replicas._pool


def connected(replica: Replica, *waiting: int) -> list[Connection]:
    """Give a replica connections with so many answers to come."""
    for number in waiting:
        connection = Connection(replica.endpoint)
        connection.num_waiting = number
        replica.connections.append(connection)
    return list(replica.connections)


@pytest.mark.parametrize(
    ("error", "in_doubt"),
    [
        (errors.AnswerCorrupt("another plan's"), True),
        (errors.UnknownPlan("forgotten", status=404), True),
        (errors.NoProgress("silent"), False),
    ],
)
def test_a_replica_that_sends_what_is_wrong_is_told_the_plan_again(
    pool: Pool, error: Exception, in_doubt: bool
) -> None:
    """Its answer tells whether it was chance or whether it makes other tokens of the plan."""
    replica, _ = pool._replicas
    pool.failed(replica, error)
    assert replica.plan_in_doubt == in_doubt


def test_a_failing_replica_is_not_connected_to_before_its_probe_while_another_works(pool: Pool) -> None:
    working, failing = pool._replicas
    connected(working, 0)
    failing.probe_at = math.inf
    assert pool.ready(idle=False) == (working, working.connections[0])
    pool.run.assert_not_called()
    working.connections.clear()
    assert pool.ready(idle=False) is None
    assert {call.args[1] for call in pool.run.call_args_list} == {working, failing}


def test_a_late_answer_is_not_asked_for_at_a_failing_replica(replicas: Replicas, pool: Pool) -> None:
    late, other = pool._replicas
    connected(other, 0)
    send = replicas._send = Mock(return_value=[])
    attempt = _Attempt(late, Connection(late.endpoint), 0.0, 0.0)
    other.probe_at = math.inf
    assert replicas._hedge(Mock(), attempt) == []
    send.assert_not_called()
    other.probe_at = 0.0
    replicas._hedge(Mock(), attempt)
    assert send.call_args.args[1] is other


def test_a_burst_of_late_answers_is_hedged_five_times(replicas: Replicas, pool: Pool) -> None:
    """Where every replica is slow, second requests would double the load of all."""
    late, other = pool._replicas
    connected(other, 0)
    replicas._send = Mock()
    attempt = _Attempt(late, Connection(late.endpoint), 0.0, 0.0)
    for _ in range(7):
        replicas._hedge(Mock(), attempt)
    assert (replicas._send.call_count, replicas.stopwatch.num_hedges) == (5, 5)


@pytest.mark.parametrize(("waiting", "left"), [((0, 0), 1), ((1, 0), 2), ((0,), 1)])
def test_a_connection_whose_place_was_taken_is_closed_behind_its_last_answer(
    replicas: Replicas, pool: Pool, waiting: tuple[int, ...], left: int
) -> None:
    replica, _ = pool._replicas
    old = connected(replica, *waiting)[0]
    replica.num_in_flight = 1
    attempts = [_Attempt(replica, old, 0.0, 0.0)]
    replicas._end(attempts, attempts[0])
    assert (attempts, len(replica.connections), old.usable) == ([], left, left == len(waiting))


def test_an_answer_that_came_too_late_is_never_read(replicas: Replicas, pool: Pool) -> None:
    """It would be taken for the answer to the next request."""
    replica, _ = pool._replicas
    (connection,) = connected(replica, 1)
    attempts = [_Attempt(replica, connection, 0.0, 0.0)]
    replicas._give_up(attempts, 1.0)
    assert (attempts, replica.connections, connection.usable) == ([], [], False)


def test_a_replica_is_not_blamed_for_what_was_lost_with_an_earlier_answer(
    replicas: Replicas, pool: Pool
) -> None:
    replica, _ = pool._replicas
    (connection,) = connected(replica, 1)
    connection.close()
    pool.failed, pool.acquire = Mock(), Mock(return_value=None)
    exchange = Exchange(request=Mock(), attempts=[_Attempt(replica, connection, 0.0, 0.0)])
    with pytest.raises(errors.DeadlineExceeded):
        replicas.finish(exchange, memoryview(bytearray(8)))
    pool.failed.assert_not_called()
