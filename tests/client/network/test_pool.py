"""Which replica is asked, and which connections are kept: decided without a network."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest

from corpus_client import errors
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from corpus_client.network.pool import Pool, Stopped
from corpus_client.network.replica import Replica
from corpus_client.network.replicas import Exchange, Replicas, _Attempt
from corpus_client.network.transport import Connection
from corpus_client.observe.attribution import Stopwatch


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


def test_the_server_with_the_earliest_answer_is_asked(pool: Pool) -> None:
    first, second = pool._replicas
    connected(first, 0)
    connected(second, 0)
    first.last_used, second.last_used = 7, 3
    assert pool.ready(idle=True) == (second, second.connections[0])
    first.num_in_flight, second.num_in_flight = 0, 1
    assert pool.ready(idle=True) == (first, first.connections[0])
    first.retry_at = math.inf
    assert pool.ready(idle=True) == (second, second.connections[0])
    assert pool.ready(idle=True, other_than=second) is None


def test_a_busy_server_gets_another_connection_only_where_no_other_is_idle(pool: Pool) -> None:
    busy, idle = pool._replicas
    connected(busy, 1)
    connected(idle, 0)
    assert pool.ready(idle=True) == (idle, idle.connections[0])
    pool.run.assert_not_called()
    idle.connections[0].num_waiting = 1
    for _ in range(2):  # once is enough
        assert pool.ready(idle=True) is None
        assert [call.args[1] for call in pool.run.call_args_list] == [busy, idle]
    assert {call.args[2] for call in pool.run.call_args_list} == {busy.opening, idle.opening}


def test_a_failing_server_is_connected_to_again_when_it_may_be(pool: Pool) -> None:
    working, failing = pool._replicas
    connected(working, 0)
    failing.probe_at = time.monotonic() - 1
    pool.ready(idle=False)
    assert [call.args[1] for call in pool.run.call_args_list] == [failing]


def test_why_servers_are_not_used_is_one_error(pool: Pool) -> None:
    """As long as one is in use it is none."""
    first, second = pool._replicas
    assert pool.refusal() is None
    first.refused = errors.ReplicaRefused("first: another corpus")
    assert pool.refusal() is first.refused
    assert pool.live() == [second]
    second.refused = errors.CertificateRefused("second: expired")
    with pytest.raises(errors.ReplicaUnusable, match="first: another corpus; second: expired"):
        pool.live()


def test_a_failure_closes_the_connections_that_nobody_waits_on(pool: Pool) -> None:
    replica, _ = pool._replicas
    idle, busy = connected(replica, 0, 1)
    pool.failed(replica, errors.NoProgress("silent"))
    assert (replica.connections, idle.usable, busy.usable) == ([busy], False, True)
    assert replica.retry_at > time.monotonic()
    assert "silent" in str(pool.deadline_exceeded(3))
    assert isinstance(pool.deadline_exceeded(3).__cause__, errors.NoProgress)


def test_a_connection_that_the_server_had_closed_is_no_failure(pool: Pool) -> None:
    replica, _ = pool._replicas
    pool.failed(replica, errors.ConnectionFailed("closed while idle", stale=True))
    assert (replica.num_failures, replica.retry_at) == (0, 0.0)


def test_failures_in_a_row_are_logged_ever_more_rarely(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    replica, _ = pool._replicas
    for _ in range(20):
        pool.failed(replica, errors.NoProgress("silent"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("failure ")[1].split(" ")[0] for line in lines] == ["1", "2", "4", "8", "16"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_an_error_that_cannot_pass_ends_the_use_of_a_server(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    replica, other = pool._replicas
    error = errors.ReplicaRefused("another corpus")
    pool.failed(replica, error)
    assert (replica.refused, replica.num_failures) == (error, 0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert pool.live() == [other]


@pytest.mark.parametrize(
    "error", [errors.ServerError("busy", status=503), errors.AccessDenied("no", status=401)]
)
def test_an_error_that_tells_nothing_of_the_plan_refuses_no_server(
    pool: Pool, error: errors.ServerError
) -> None:
    replica = introduced(pool, Mock(side_effect=error))
    with pytest.raises(type(error), match=error.detail):
        pool.introduce(replica)
    assert replica.plan_in_doubt


def test_a_server_that_refuses_the_plan_or_makes_another_one_of_it_is_refused(pool: Pool) -> None:
    replica = introduced(pool, Mock(side_effect=errors.ServerError("no such corpus", status=422)))
    with pytest.raises(errors.ReplicaRefused, match="refuses the plan p: no such corpus"):
        pool.introduce(replica)
    replica.control.post_plan = Mock(return_value=Mock(plan_id="q"))
    with pytest.raises(errors.ReplicaRefused, match="makes plan q of the plan p"):
        pool.introduce(replica)
    assert replica.plan_in_doubt
    replica.control.post_plan = Mock(return_value=Mock(plan_id="p"))
    pool.introduce(replica)
    assert not replica.plan_in_doubt


def introduced(pool: Pool, post_plan: Mock) -> Replica:
    """Return a replica that is in doubt about plan `p`."""
    pool.plan = Mock(plan_id="p")
    replica, _ = pool._replicas
    replica.plan_in_doubt = True
    replica.control.close()
    replica.control = Mock(post_plan=post_plan)
    return replica


def test_a_connection_is_opened_behind_and_closed_if_nobody_wants_it_any_more(pool: Pool) -> None:
    replica, other = pool._replicas
    for each, stopped in ((replica, False), (other, True)):
        connection = each.opening = Connection(each.endpoint)
        connection.open = Mock()
        pool._stopped = stopped
        pool._open(each, connection)
        assert each.opening is None
        assert each.connections == ([] if stopped else [connection])
        assert connection.usable == (not stopped)
        assert connection.open.call_args.args[0] <= time.monotonic() + pool.network.connect_seconds
    pool._stopped = False


def test_a_connection_that_cannot_be_opened_is_a_failure(pool: Pool) -> None:
    replica, _ = pool._replicas
    connection = replica.opening = Connection(replica.endpoint)
    connection.open = Mock(side_effect=errors.ConnectionFailed("nobody there"))
    pool._open(replica, connection)
    assert (replica.opening, replica.connections, replica.num_failures) == (None, [], 1)
    assert not connection.usable


def test_who_waits_is_woken_when_the_next_server_may_be_asked(pool: Pool) -> None:
    first, second = pool._replicas
    pool.changed = Mock(wait=Mock(), __enter__=Mock(), __exit__=Mock())
    now = time.monotonic()
    first.retry_at, second.retry_at = now + 7, now - 7
    for deadline, next_at, seconds in ((60, 0, 7), (60, 5, 5), (60, -5, 7), (3, 5, 3), (-3, 5, 0)):
        pool.wait(now + deadline, now + next_at)
        assert seconds - 1 <= pool.changed.wait.call_args.args[0] <= seconds


def test_others_are_those_that_work_and_are_connected(pool: Pool) -> None:
    first, second = pool._replicas
    assert not pool.others(first)
    connected(first, 0)
    assert not pool.others(first)
    connected(second, 1)
    assert pool.others(first)
    second.probe_at = math.inf
    assert not pool.others(first)
    second.probe_at, second.gone = 0.0, True
    assert not pool.others(first)


@pytest.fixture
def named() -> Iterator[Pool]:
    """A service by name, which was not looked up yet."""
    pool = Pool(["http://service.test:81/prefix"], Network(), Stopwatch())
    pool.run = Mock()
    yield pool
    pool.close()


def resolved(pool: Pool, *addresses: str | Exception) -> None:
    """Look the name up, with these addresses or this error."""
    (name,) = pool._names
    failures = [each for each in addresses if isinstance(each, Exception)]
    family = socket.AF_INET
    found = [replace(name.endpoint, address=(family, (each, 81))) for each in addresses if not failures]
    with patch.object(Endpoint, "resolve", Mock(side_effect=failures or None, return_value=found)):
        pool._look_up(name)


def test_a_name_is_looked_up_once_at_a_time_and_again_after_half_a_minute(named: Pool) -> None:
    for _ in range(2):
        assert named.live() == []
        assert not named.looked_up()
        assert named.run.call_count == 1
    resolved(named, "127.0.0.1", "127.0.0.2")
    assert named.looked_up()
    assert {replica.endpoint.address[1][0] for replica in named.live()} == {"127.0.0.1", "127.0.0.2"}
    assert named.run.call_count == 1
    assert 29 < named._names[0].due - time.monotonic() <= 30
    named._names[0].due = time.monotonic()
    named.live()
    assert named.run.call_count == 2


def test_an_address_that_is_gone_is_left_once_its_answers_have_come(named: Pool) -> None:
    resolved(named, "127.0.0.1", "127.0.0.2")
    gone, stays = sorted(named._replicas, key=lambda each: each.endpoint.address)
    (idle,) = connected(gone, 0)
    gone.num_in_flight = 1
    resolved(named, "127.0.0.2", "127.0.0.3")
    assert (gone.gone, stays.gone, gone in named._replicas, idle.usable) == (True, False, True, True)
    assert gone not in named.live()
    assert len(named.live()) == 2
    gone.num_in_flight = 0
    resolved(named, "127.0.0.2", "127.0.0.3")
    assert (gone in named._replicas, gone.connections, idle.usable) == (False, [], False)
    assert stays in named.live()
    resolved(named, "127.0.0.1", "127.0.0.2")  # back again
    assert len(named.live()) == 2


def test_a_name_service_that_does_not_answer_is_asked_three_times(named: Pool) -> None:
    error = errors.ConnectionFailed("the name cannot be looked up")
    for _ in range(2):
        resolved(named, error)
        assert named.looked_up()
        assert 0 < named._names[0].due - time.monotonic() <= 1
        named._names[0].due = math.inf
        assert named.live() == []
    resolved(named, error)
    with pytest.raises(errors.ConnectionFailed):
        named.live()
    assert named._names[0].due == math.inf


def test_a_name_that_does_not_exist_is_an_error_at_once(named: Pool) -> None:
    resolved(named, errors.HostNotFound("no host is named so"))
    with pytest.raises(errors.HostNotFound):
        named.live()


def test_a_failure_after_a_good_look_up_counts_anew(named: Pool) -> None:
    error = errors.ConnectionFailed("the name cannot be looked up")
    for addresses in ([error], [error], ["127.0.0.1"], [error], [error]):
        resolved(named, *addresses)
    assert named._names[0].refused is None


def test_what_a_background_thread_uses_is_closed_when_it_has_ended() -> None:
    pool = Pool(["http://127.0.0.1:1"], Network(), Stopwatch())
    (control,) = pool._controls
    control.close = close = Mock(wraps=control.close)
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(20)

    pool.run(work)
    assert begun.wait(20)
    pool.close()
    close.assert_not_called()
    with pytest.raises(Stopped):
        pool.live()
    go_on.set()
    with pool.changed:
        assert pool.changed.wait_for(lambda: not pool._num_background, 20)
    deadline = time.monotonic() + 20
    while not close.called:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopping_ends_the_wait_for_a_server(pool: Pool) -> None:
    stopper = threading.Timer(0.05, pool.stop)
    stopper.start()
    with pytest.raises(Stopped):
        pool.acquire(time.monotonic() + 60, idle=True, resting=True)
    stopper.join()


def test_a_request_that_may_not_wait_for_resting_servers_does_not(pool: Pool) -> None:
    assert pool.acquire(time.monotonic() + 60, idle=True, resting=False) is None
    assert pool.acquire(time.monotonic(), idle=True, resting=True) is None
