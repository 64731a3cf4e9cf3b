"""Which replica is asked, and which connections are kept: decided without a network."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from unittest.mock import Mock, patch

import pytest

from corpus_client import errors
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from corpus_client.network.pool import Pool, Stopped
from corpus_client.network.pool import named as error_text
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
        connection.num_in_flight = number
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
    old.num_in_flight += 1
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
    idle.connections[0].num_in_flight = 1
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
    with pytest.raises(errors.ReplicaUnusable) as caught:
        pool.live()
    assert str(caught.value) == "first: another corpus; second: expired"


def test_no_server_is_missed_while_a_name_is_not_looked_up() -> None:
    """One name does not exist, but the other one may have servers."""
    pool = Pool(["http://one.test", "http://other.test"], Network(), Stopwatch())
    pool.run = Mock()
    wrong, pending = pool._names
    assert pool.live() == []
    wrong.refused = errors.HostNotFound("no host is named so")
    assert pool.live() == []
    pending.found = True
    with pytest.raises(errors.HostNotFound):
        pool.live()
    pool.close()


def test_a_failure_closes_the_connections_that_nobody_waits_on(pool: Pool) -> None:
    replica, _ = pool._replicas
    idle, busy = connected(replica, 0, 1)
    pool.failed(replica, errors.NoProgress("silent"))
    assert (replica.connections, idle.usable, busy.usable) == ([busy], False, True)
    assert replica.retry_at > time.monotonic()


GIVEN_UP = "no good answer from {} within {}; is the server running? deadline_seconds= sets how long to wait"


def test_whoever_gave_up_is_told_which_servers_were_asked_and_what_went_wrong(
    pool: Pool, named: Pool
) -> None:
    both = "http://127.0.0.1:1, http://127.0.0.1:2"
    error = pool.deadline_exceeded(0.25)
    assert str(error) == GIVEN_UP.format(both, "0.25 s; last: nothing came in time")
    assert error.__cause__ is None
    cause = errors.ServerError("it broke", status=500)
    pool.failed(pool._replicas[1], cause)
    error = pool.deadline_exceeded(300.0)
    assert str(error) == GIVEN_UP.format(both, "300 s; last: http://127.0.0.1:2: it broke")
    assert error.__cause__ is cause
    resolved(named, errors.ConnectionFailed("the name cannot be looked up"))
    name = "http://service.test:81/prefix"
    expected = GIVEN_UP.format(name, "3 s; last: the name cannot be looked up")
    assert str(named.deadline_exceeded(3)) == expected
    resolved(named, "127.0.0.1")
    expected = expected.replace(name, f"{name} (127.0.0.1)")
    assert str(named.deadline_exceeded(3)) == expected


def test_the_first_server_decides_which_corpus_is_meant_and_any_may_begin_with_a_plan() -> None:
    """Else all clients of a service would begin with the same server."""
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1", "http://127.0.0.1:3"]

    def order(plan: Mock | None) -> list[str]:
        with closing(Pool(urls, Network(), Stopwatch(), plan)) as pool:
            return [replica.endpoint.url for replica in pool.live()]

    named_first = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"]
    assert [order(None) for _ in range(5)] == 5 * [named_first]
    shuffled = [order(Mock()) for _ in range(30)]
    assert len({each[0] for each in shuffled}) > 1
    assert all(sorted(each) == named_first for each in shuffled)


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


def test_one_of_a_names_addresses_that_fails_is_no_news_while_another_works(
    named: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    resolved(named, "127.0.0.1", "127.0.0.2")
    one, other = named._replicas
    with caplog.at_level(logging.INFO, "corpus_client"):
        for replica in (one, other, other):
            named.failed(replica, errors.NoProgress("silent"))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "silent; failure 1 in a row",
        "silent; failure 1 in a row",
        "silent; failure 2 in a row",
    ]


def test_that_a_new_replica_has_not_seen_the_plan_is_no_news(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told the plan next; that it forgets it again and again is a mistake."""
    replica, _ = pool._replicas
    with caplog.at_level(logging.INFO, "corpus_client"):
        for _ in range(2):
            pool.failed(replica, errors.UnknownPlan("forgotten", status=404))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_only_an_error_of_the_server_lacks_its_name(pool: Pool) -> None:
    replica, _ = pool._replicas
    assert error_text(replica, errors.ServerError("full", status=503)) == "http://127.0.0.1:1: full"
    assert error_text(replica, errors.NoProgress("somewhere: silent")) == "somewhere: silent"


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
    with pytest.raises(errors.ReplicaRefused) as caught:
        pool.introduce(replica)
    assert str(caught.value) == "http://127.0.0.1:1 refuses the plan p: no such corpus"
    replica.control.post_plan = Mock(return_value=Mock(plan_id="q"))
    with pytest.raises(errors.ReplicaRefused) as caught:
        pool.introduce(replica)
    text = "http://127.0.0.1:1 makes plan q of the plan p: does it run another version?"
    assert str(caught.value) == text
    assert replica.plan_in_doubt
    replica.control.post_plan = Mock(return_value=Mock(plan_id="p"))
    pool.introduce(replica)
    assert not replica.plan_in_doubt
    pool.plan = None  # nothing was agreed on
    pool.introduce(replica)
    replica.control.post_plan.assert_called_once()


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
        left = connection.open.call_args.args[0] - time.monotonic()
        assert 0 < left <= pool.network.connect_seconds
    pool._stopped = False


def test_a_server_in_doubt_is_told_the_plan_before_it_is_connected_to(pool: Pool) -> None:
    replica = introduced(pool, Mock(side_effect=errors.ServerError("no such corpus", status=422)))
    connection = replica.opening = Connection(replica.endpoint)
    connection.open = Mock()
    pool._open(replica, connection)
    connection.open.assert_not_called()
    assert isinstance(replica.refused, errors.ReplicaRefused)
    replica.plan_in_doubt = False
    pool._open(replica, connection)
    connection.open.assert_called_once()
    replica.control.post_plan.assert_called_once()


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
    assert (gone.control._http.is_closed, stays.control._http.is_closed) == (True, False)
    assert gone.control not in named._controls  # a service's addresses may come and go for weeks
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
    resolved(named, error)
    assert named._names[0].refused is error
    assert len(named.live()) == 1, "the address found before is still used"


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


def test_a_background_thread_does_not_hold_up_the_end_of_the_process(pool: Pool) -> None:
    found: SimpleQueue[threading.Thread] = SimpleQueue()
    Pool.run(pool, lambda *arguments: found.put(threading.current_thread()), 7)
    thread = found.get(timeout=20)
    assert (thread.name, thread.daemon) == ("corpus-network", True)


def test_stopping_aborts_what_is_open_and_closing_closes_it(pool: Pool) -> None:
    replica, other = pool._replicas
    connections = connected(replica, 0, 1)
    opening = other.opening = Connection(other.endpoint)
    closes = [Mock(wraps=control.close) for control in pool._controls]
    for control, close in zip(pool._controls, closes, strict=True):
        control.close = close
    pool.stop()
    assert [each.usable for each in (*connections, opening)] == [False, False, False]
    assert replica.connections == connections
    for _ in range(2):
        with pytest.raises(Stopped):
            pool.failed(replica, errors.NoProgress("silent"))
    assert replica.num_failures == 0
    pool.close()
    assert replica.connections == []
    assert all(close.called for close in closes)


@pytest.mark.parametrize("what", ["a failure", "stopping", "the end of a background thread"])
def test_whatever_happens_wakes_who_waits(what: str, pool: Pool) -> None:
    replica, _ = pool._replicas
    happens = {
        "a failure": lambda: pool.failed(replica, errors.NoProgress("silent")),
        "stopping": pool.stop,
        "the end of a background thread": lambda: Pool.run(pool, lambda: None),
    }[what]
    thread = threading.Thread(target=happens)
    with pool.changed:
        thread.start()
        assert pool.changed.wait(20)
    thread.join()


def test_a_server_that_is_ready_is_not_waited_for(pool: Pool) -> None:
    replica, _ = pool._replicas
    connected(replica, 0)
    pool.wait = Mock(side_effect=AssertionError("waited"))
    for resting in (False, True):
        found = pool.acquire(time.monotonic() + 60, idle=True, resting=resting)
        assert found == (replica, replica.connections[0])


@pytest.mark.parametrize(
    ("resting", "num_background", "waits"),
    [(False, 0, False), (False, 1, True), (True, 0, True), (True, 1, True)],
)
def test_a_server_is_waited_for_while_something_may_change(
    resting: bool, num_background: int, waits: bool, pool: Pool
) -> None:
    """What is being opened may be ready soon; the end of a back-off only counts for who says so."""
    replica, _ = pool._replicas
    pool._num_background = num_background
    pool.wait = Mock(side_effect=lambda _: connected(replica, 0))
    deadline = time.monotonic() + 60
    found = pool.acquire(deadline, idle=True, resting=resting)
    pool._num_background = 0
    assert (found is not None) == waits
    assert [call.args for call in pool.wait.call_args_list] == ([(deadline,)] if waits else [])


def test_stopping_ends_the_wait_for_a_server(pool: Pool) -> None:
    stopper = threading.Timer(0.05, pool.stop)
    stopper.start()
    with pytest.raises(Stopped):
        pool.acquire(time.monotonic() + 60, idle=True, resting=True)
    stopper.join()


def test_a_request_that_may_not_wait_for_resting_servers_does_not(pool: Pool) -> None:
    assert pool.acquire(time.monotonic() + 60, idle=True, resting=False) is None
    assert pool.acquire(time.monotonic(), idle=True, resting=True) is None
