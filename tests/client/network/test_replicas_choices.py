"""When requests are sent again or elsewhere, what is counted, and which replica is blamed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from corpus_client import errors
from corpus_client.network import replicas as module
from corpus_client.network import wire
from corpus_client.network.control import BoundPlan
from corpus_client.network.options import Network
from corpus_client.network.pool import Stopped
from corpus_client.network.replica import Replica
from corpus_client.network.replicas import Exchange, Replicas, _Attempt
from corpus_client.network.transport import Connection
from corpus_client.observe.attribution import Phase, Stopwatch
from corpus_client.plan.document import make_plan
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import Fault, ReferenceServer

PLAN = make_plan(corpus="web", seq_len=16, global_batch_size=12, seed=0, order="sequential", stride=None)
START = 1024.0


class Noted(Stopwatch):
    """A stopwatch that notes the phases."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def enter(self, phase: Phase, *, server_seconds: float = 0.0) -> None:
        self.phases.append(phase)
        super().enter(phase, server_seconds=server_seconds)


@pytest.fixture
def pair() -> Iterator[Replicas]:
    """Two replicas to which nothing is connected, nor will be."""
    with Replicas(["http://127.0.0.1:1", "http://127.0.0.1:2"]) as replicas:
        replicas._pool.run = Mock()
        yield replicas


def connected(replica: Replica, num_in_flight: int = 0) -> Connection:
    """Give a replica a connection with so many answers to come."""
    connection = Connection(replica.endpoint)
    connection.num_in_flight = num_in_flight
    replica.connections.append(connection)
    return connection


def bound(*servers: ReferenceServer) -> BoundPlan:
    with Replicas([server.url for server in servers]) as replicas:
        return replicas.bind(PLAN)


def batch(plan: BoundPlan, step: int = 0) -> wire.ArrayRequest:
    """Return the request for the tokens of a step."""
    return wire.steps_request("/v1/batches", (1, 12, 17), "uint16", step=step, verify=True, plan=plan.plan_id)


def buffer() -> memoryview:
    return memoryview(bytearray(12 * 17 * 2))


def test_one_server_is_named_by_its_url_alone_and_none_is_refused() -> None:
    network, stopwatch = Network(deadline_seconds=7), Stopwatch()
    with Replicas("http://127.0.0.1:1", network, stopwatch=stopwatch) as replicas:
        assert [each.endpoint.url for each in replicas._pool.live()] == ["http://127.0.0.1:1"]
        assert replicas.network is replicas._pool.network is network
        assert replicas.stopwatch is stopwatch
    with pytest.raises(Stopped):
        replicas._pool.live()
    with pytest.raises(errors.InvalidArgument) as caught:
        Replicas([])
    assert str(caught.value) == "urls must name at least one server, got none"
    with Replicas(["http://127.0.0.1:1"]) as replicas:
        assert replicas.network == Network()
        replicas.stop()
        with pytest.raises(Stopped):
            replicas._pool.live()


def test_a_request_is_sent_at_once_and_its_answer_is_measured(server: ReferenceServer) -> None:
    plan, stopwatch = bound(server), Noted()
    with Replicas([server.url], plan=plan, stopwatch=stopwatch) as replicas:
        (replica,) = replicas._pool.live()
        for number in (1, 2):
            exchange = replicas.begin(batch(plan, number))
            (attempt,) = exchange.attempts
            assert (replica.num_in_flight, replica.last_used) == (1, number)
            assert attempt.started == attempt.sent_at
            attempt.started = 0.0  # how long it lay there does not count
            replica.num_failures, replica.probe_at = 3, math.inf
            replicas.finish(exchange, buffer())
            assert (replica.num_in_flight, exchange.attempts) == (0, [])
            assert (replica.num_failures, replica.probe_at) == (0, 0.0)
            assert stopwatch.received_bytes == number * 12 * 17 * 2
        now = time.monotonic()
        assert 0 < replica.latency.expected(now) < min(60, now)
        assert len(replica.connections) == 1
        assert (stopwatch.num_retries, stopwatch.num_hedges) == (0, 0)
        assert stopwatch.phases == 2 * ["send", "answer", "receive", "host"]


def test_a_request_that_could_not_be_sent_before_is_no_retry(server: ReferenceServer) -> None:
    """It waited for a connection, or the first one broke before anything was sent."""
    plan = bound(server)
    with Replicas([server.url], plan=plan) as replicas:
        replicas.finish(Exchange(request=batch(plan)), buffer())
        (replica,) = replicas._pool.live()
        acquire = replicas._pool.acquire
        broken = connected(replica)
        broken.close()
        found = iter([(replica, broken)])
        replicas._pool.acquire = lambda *args, **options: next(found, None) or acquire(*args, **options)
        replicas.finish(Exchange(request=batch(plan)), buffer())
        assert replicas.stopwatch.num_retries == 0
        assert server.num_arrays == 2


def test_each_request_that_is_lost_with_a_connection_is_sent_again_once(server: ReferenceServer) -> None:
    plan, stopwatch = bound(server), Noted()
    with Replicas([server.url], plan=plan, stopwatch=stopwatch) as replicas:
        exchanges = [replicas.begin(batch(plan, step)) for step in (0, 1)]
        assert len({id(each.attempts[0].connection) for each in exchanges}) == 1
        exchanges[0].attempts[0].connection.close()
        for number, exchange in enumerate(exchanges):
            replicas.finish(exchange, buffer())
            assert stopwatch.num_retries == number + 1
        (replica,) = replicas._pool.live()
        assert (replica.num_in_flight, replica.num_failures) == (0, 0)


def test_a_wrong_request_is_the_fault_of_no_server(
    corpus: ReferenceCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every server would answer so; the next request is sent as if nothing had been."""
    monkeypatch.setattr(module, "STALL_SECONDS", 60.0)
    faults = [Fault("bad-request")]

    def once() -> Fault | None:
        return faults.pop() if faults else None

    with ReferenceServer([corpus], once) as one, ReferenceServer([corpus], once) as other:
        plan = bound(one, other)
        with Replicas([one.url, other.url], Network(hedge_factor=0), plan=plan) as replicas:
            with pytest.raises(errors.ServerError, match="too large"):
                replicas.finish(replicas.begin(batch(plan)), buffer())
            assert [each.refused for each in replicas._pool.live()] == [None, None]
            assert [each.num_in_flight for each in replicas._pool.live()] == [0, 0]
            assert one.num_arrays + other.num_arrays == 1
            replicas.finish(replicas.begin(batch(plan)), buffer())
            assert replicas.stopwatch.num_retries == 0


def test_while_a_failure_is_waited_out_the_phase_is_retry(
    server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    plan, stopwatch = bound(server), Noted()
    faults = [Fault("error")]
    server.next_fault = lambda: faults.pop() if faults else None
    with Replicas([server.url], plan=plan, stopwatch=stopwatch) as replicas:
        replicas.finish(replicas.begin(batch(plan)), buffer())
        assert stopwatch.phases == ["send", "answer", "retry", "answer", "receive", "host"]
        assert stopwatch.num_retries == 1
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{server.url}: it broke; failure 1 in a row, left alone for 0.0")


@pytest.mark.parametrize("moment", ["request_line", "read_head"], ids=["sending", "receiving"])
def test_a_failure_elsewhere_does_not_close_a_connection_in_use(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A further connection to the same server fails in the background, say."""
    plan = bound(server)
    with Replicas([server.url], plan=plan) as replicas:
        (replica,) = replicas._pool.live()
        ordinary = getattr(wire, moment)

        def meanwhile(*arguments: Any) -> Any:
            monkeypatch.setattr(wire, moment, ordinary)
            replicas._pool.failed(replica, errors.ConnectionFailed("no answer"))
            return ordinary(*arguments)

        monkeypatch.setattr(wire, moment, meanwhile)
        exchange = replicas.begin(batch(plan))
        assert len(exchange.attempts) == 1
        replicas.finish(exchange, buffer())
        assert replicas.stopwatch.num_retries == 0
        assert (replica.num_in_flight, len(replica.connections)) == (0, 1)


def test_a_request_does_not_go_behind_another_one_where_it_would_wait_its_turn(
    server: ReferenceServer,
) -> None:
    """When it is sent again its answer is read at once, and must be the first on its connection."""
    plan = bound(server)
    with Replicas([server.url], plan=plan) as replicas:
        begun = replicas.begin(batch(plan, 0))
        again = Exchange(request=batch(plan, 1))
        replicas.finish(again, buffer())
        replicas.finish(begun, buffer())
        assert replicas.stopwatch.num_retries == 0


def test_beginning_does_not_wait_for_resting_servers(pair: Replicas) -> None:
    for replica in pair._pool.live():
        replica.retry_at = math.inf
    pair._pool.wait = Mock(side_effect=AssertionError("waited"))
    assert pair.begin(Mock()).attempts == []


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(pair: Replicas) -> None:
    replica, _ = pair._pool.live()
    connection = connected(replica, 1)
    connection.close()
    request = wire.ArrayRequest(path="/", shape=(), dtype="uint8", plan_id=None)
    assert pair._send(request, replica, connection) == []
    assert (replica.connections, replica.num_in_flight, replica.num_failures) == ([], 0, 1)


@pytest.mark.parametrize(
    ("options", "alone", "beside_another"),
    [
        ({}, 30.0, 1.0),
        ({"deadline_seconds": 40}, 10.0, 1.0),
        ({"progress_seconds": 0.5}, 0.5, 0.5),
        ({"deadline_seconds": 2}, 0.5, 0.5),
    ],
)
def test_a_replica_beside_which_another_one_works_has_a_second(
    options: dict[str, Any], alone: float, beside_another: float
) -> None:
    with Replicas(["http://127.0.0.1:1", "http://127.0.0.1:2"], Network(**options)) as replicas:
        first, second = replicas._pool.live()
        attempt = _Attempt(first, connected(first), 0.0, 0.0)
        assert replicas._patience(attempt) == alone
        connected(second)
        assert replicas._patience(attempt) == beside_another


class Waiting:
    """`first_to_answer` and `time` for `Replicas`: a wait takes as long as it may, and is noted.

    Args:
        answers: which of the attempts answers at which look, counted from 0, and so in half the time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[int, int]) -> None:
        self.now = START
        self.waits: list[float] = []
        self._answers = answers
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, "first_to_answer", self._look)

    def _look(self, connections: list[Connection], seconds: float) -> Connection | None:
        assert len(self.waits) < 100, "it never ends"
        number = self._answers.get(len(self.waits))
        self.waits.append(seconds)
        self.now += seconds if number is None else seconds / 2
        return None if number is None else connections[number]


def await_first(
    replicas: Replicas, *, sent_before: float = 0.0, deadline: float = 300.0
) -> tuple[list[_Attempt], _Attempt, bool]:
    """Return all attempts, the one to be read, and whether it was waited for."""
    replica = replicas._pool._replicas[0]
    attempts = [_Attempt(replica, connected(replica, 1), START - sent_before, START)]
    found, waited = replicas._first_to_answer(Mock(), attempts, START + deadline)
    return attempts, found, waited


def test_where_there_is_one_server_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, stopwatch = Waiting(monkeypatch, {}), Noted()
    with Replicas("http://127.0.0.1:1", stopwatch=stopwatch) as replicas:
        attempts, found, waited = await_first(replicas)
    assert ([found], waited, waiting.waits, stopwatch.phases) == (attempts, True, [], [])


def test_an_answer_that_is_there_was_not_waited_for(pair: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, {0: 0})
    pair.stopwatch = Noted()
    attempts, found, waited = await_first(pair)
    assert ([found], waited, waiting.waits, pair.stopwatch.phases) == (attempts, False, [0.0], ["answer"])


def test_a_second_server_is_looked_for_from_when_an_answer_is_late(
    pair: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 20 ms, until one can be asked, and less often than once a second never."""
    waiting = Waiting(monkeypatch, {6: 0})
    pair._pool._replicas[0].latency = Mock(late_after=Mock(return_value=2.75))
    attempts, found, waited = await_first(pair, sent_before=0.5)
    assert ([found], waited) == (attempts, True)
    assert waiting.waits == pytest.approx([0.0, 1.0, 1.0, 0.25, 0.02, 0.02, 0.02])
    assert pair._pool._replicas[0].latency.late_after.call_args.args == (3.0,)


def test_an_answer_that_is_soon_late_is_not_looked_at_all_the_time(
    pair: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch, {2: 0})
    pair._pool._replicas[0].latency = Mock(late_after=Mock(return_value=2.0**-10))
    await_first(pair)
    assert waiting.waits == pytest.approx([0.0, 0.02, 0.02])


@pytest.mark.parametrize(
    ("deadline", "beside_another", "waits"),
    [
        (2.5, False, [0.0, 1.0, 1.0, 0.5]),
        (300.0, False, [0.0, 1.0, 1.0, 1.0, 1.0]),
        (300.0, True, [0.0, 1.0]),
        (0.25, True, [0.0, 0.25]),
    ],
    ids=["deadline", "progress", "another server", "deadline first"],
)
def test_without_hedging_an_answer_is_awaited_as_long_as_it_may_take(
    deadline: float, beside_another: bool, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(monkeypatch, {})
    network = Network(hedge_factor=0, progress_seconds=4)
    with Replicas(["http://127.0.0.1:1", "http://127.0.0.1:2"], network) as replicas:
        replicas._pool.run = Mock()
        if beside_another:
            connected(replicas._pool._replicas[1])
        attempts, found, waited = await_first(replicas, deadline=deadline, sent_before=1000.0)
    assert ([found], waited, waiting.waits) == (attempts, True, waits)


@pytest.mark.parametrize(
    ("answers", "read", "waits"),
    [
        ({2: 0}, 0, [0.0, 0.1875, 0.8125]),
        ({2: 1}, 1, [0.0, 0.1875, 0.8125]),
        ({}, 0, [0.0, 0.1875, 0.8125]),
    ],
    ids=["the first answers", "the second answers", "none does"],
)
def test_one_late_answer_is_asked_for_elsewhere_once(
    answers: dict[int, int],
    read: int,
    waits: list[float],
    pair: Replicas,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting = Waiting(monkeypatch, answers)
    late, other = pair._pool._replicas
    for _ in range(8):
        late.latency.add(0.0625, START, waited=True)
    connection = connected(other)
    monkeypatch.setattr(Connection, "send", Mock())
    with caplog.at_level(logging.INFO, "corpus_client"):
        attempts, found, waited = await_first(pair)
    assert attempts[1:] == [found] if read else attempts[0] is found
    assert (attempts[1].replica, attempts[1].connection) == (other, connection)
    assert (attempts[1].sent_at, attempts[1].started) == (START + 0.1875, START + 0.1875)
    assert (len(attempts), waited, waiting.waits) == (2, True, waits)
    assert (other.num_in_flight, other.last_used, pair.stopwatch.num_hedges) == (1, 1, 1)
    assert Connection.send.call_args.kwargs == {"deadline": START + 0.1875 + 75}
    assert [record.getMessage() for record in caplog.records] == [
        "http://127.0.0.1:1 has not answered for 0.19 s; asking http://127.0.0.1:2 as well"
    ]


def test_a_late_answer_is_not_asked_for_behind_another_one(pair: Replicas) -> None:
    """It would come after that."""
    late, other = pair._pool._replicas
    connected(other, 1)
    pair._send = Mock()
    assert pair._hedge(Mock(), _Attempt(late, connected(late, 1), 0.0, 0.0)) == []
    assert (pair._send.call_count, pair.stopwatch.num_hedges, pair._hedges_left) == (0, 0, 5.0)


def test_ten_answers_allow_another_hedge(server: ReferenceServer) -> None:
    """And no more than five are saved up."""
    plan = bound(server)
    with Replicas([server.url], plan=plan) as replicas:
        for hedges_left, num_answers, expected in ((0.0, 10, 1.0), (0.5, 1, 0.6), (4.95, 2, 5.0)):
            replicas._hedges_left = hedges_left
            for _ in range(num_answers):
                replicas.finish(replicas.begin(batch(plan)), buffer())
            assert replicas._hedges_left == pytest.approx(expected)


def test_a_replica_that_lost_to_another_one_is_slow_and_rests(
    pair: Replicas, caplog: pytest.LogCaptureFixture
) -> None:
    slow, _ = pair._pool._replicas
    slow.num_in_flight = 1
    connection = connected(slow, 1)
    attempts = [_Attempt(slow, connection, START, START)]
    with caplog.at_level(logging.INFO, "corpus_client"):
        pair._give_up(attempts, START + 1.5)
    assert (attempts, slow.connections, connection.usable) == ([], [], False)
    assert (slow.num_in_flight, slow.num_failures) == (0, 1)
    assert slow.latency.expected(START + 1.5) == 1.5
    (record,) = caplog.records
    text = "http://127.0.0.1:1: no answer in 1.50 s, another replica was faster; failure 1 in a row"
    assert (record.levelname, record.getMessage().split(",")[:2]) == ("INFO", text.split(","))


def test_the_answer_of_the_faster_server_is_taken_and_the_other_ones_never(
    corpus: ReferenceCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_SECONDS", 60.0)
    with ReferenceServer([corpus], lambda: Fault("hole")) as silent, ReferenceServer([corpus]) as fast:
        plan = bound(silent, fast)
        with Replicas([silent.url, fast.url], plan=plan) as replicas:
            late, other = sorted(replicas._pool.live(), key=lambda each: each.endpoint.url == fast.url)
            for _ in range(8):
                late.latency.add(0.01, time.monotonic(), waited=True)
            late.connections.append(Connection(late.endpoint))
            other.connections.append(Connection(other.endpoint))
            exchange = Exchange(request=batch(plan))
            exchange.attempts += replicas._send(exchange.request, late, late.connections[0])
            replicas.finish(exchange, buffer())
            assert (late.num_in_flight, late.connections, late.num_failures) == (0, [], 1)
            assert (other.num_in_flight, len(other.connections), other.num_failures) == (0, 1, 0)
            assert (replicas.stopwatch.num_hedges, replicas.stopwatch.num_retries) == (1, 0)
            assert silent.num_arrays == fast.num_arrays == 1


class Enough(Exception):
    """Ends a wait that nothing would end."""


@pytest.mark.parametrize(
    ("options", "deadline", "next_at"),
    [({}, 300.0, 0.5), ({"deadline_seconds": 1.0}, 1.0, 0.25), ({"deadline_seconds": 4.0}, 4.0, 0.5)],
)
def test_a_question_is_asked_elsewhere_after_half_a_second_or_a_quarter_of_its_time(
    options: dict[str, float],
    deadline: float,
    next_at: float,
    pair: Replicas,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=START)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    asked: list[Replica] = []
    waits = []

    def wait(*until: float) -> None:
        waits.append(until)
        clock.now = START + next_at * len(waits)
        if len(waits) == 3:
            raise Enough

    pair._pool.run = lambda _, replica: asked.append(replica)
    pair._pool.wait = wait
    with pytest.raises(Enough):
        pair.ask(Mock(), **options)
    assert asked == pair._pool._replicas, "each once, however long it takes"
    ends = [START + next_at, START + 2 * next_at, START + 2 * next_at]
    assert waits == [(START + deadline, end) for end in ends]


def answering(replicas: Replicas, *answers: Any) -> Callable[[Any], Any]:
    """Return a question that gets these answers, or errors, one after another, from whomever is asked."""
    left = list(answers)

    def question(control: Any) -> Any:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, control

    return question


@pytest.fixture
def live_pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    """Two replicas that are asked in turn, never both at once."""
    monkeypatch.setattr(module, "ASK_SECONDS", 60.0)
    with Replicas(["http://127.0.0.1:1", "http://127.0.0.1:2"], Network(deadline_seconds=240)) as replicas:
        yield replicas


def test_the_first_answer_to_a_question_is_enough(live_pair: Replicas) -> None:
    first, second = live_pair._pool._replicas
    first.num_failures = 3
    assert live_pair.ask(answering(live_pair, 7)) == (7, first.control)
    assert (first.num_failures, second.num_failures) == (0, 0)


def test_a_question_that_fails_is_asked_elsewhere_and_again(live_pair: Replicas) -> None:
    first, second = live_pair._pool._replicas
    silent, busy = errors.NoProgress("silent"), errors.ServerError("busy", status=503)
    assert live_pair.ask(answering(live_pair, silent, 7)) == (7, second.control)
    assert (first.num_failures, second.num_failures) == (1, 0)
    second.refused = errors.ReplicaRefused("another corpus")
    assert live_pair.ask(answering(live_pair, busy, silent, 8)) == (8, first.control)
    assert first.num_failures == 0


def test_a_question_that_is_wrong_is_asked_once(live_pair: Replicas) -> None:
    """Every server would say the same, but of a server that cannot be used only itself."""
    first, second = live_pair._pool._replicas
    for wrong in (errors.ServerError("too large", status=422), ValueError("a mistake")):
        with pytest.raises(type(wrong)) as caught:
            live_pair.ask(answering(live_pair, wrong))
        assert caught.value is wrong
    assert (first.refused, second.refused) == (None, None)
    refused = errors.ReplicaRefused("another corpus")
    _, asked = live_pair.ask(answering(live_pair, refused, 7))
    last, left_out = (first, second) if asked is first.control else (second, first)
    assert (last.refused, left_out.refused) == (None, refused)


def test_a_server_that_forgot_the_plan_is_told_it_and_asked_again(live_pair: Replicas) -> None:
    first, _ = live_pair._pool._replicas
    live_pair._pool.introduce = introduce = Mock()
    forgotten = errors.UnknownPlan("forgotten", status=404)
    assert live_pair.ask(answering(live_pair, forgotten, 7)) == (7, first.control)
    introduce.assert_called_once_with(first)
    assert first.num_failures == 0


def test_a_question_has_its_own_deadline(live_pair: Replicas) -> None:
    def silent(_: Any) -> None:
        raise errors.NoProgress("silent")

    with pytest.raises(errors.DeadlineExceeded, match=r"2 within 0\.05 s; last: silent"):
        live_pair.ask(silent, deadline_seconds=0.05)


def test_binding_waits_for_servers_that_answer_soon_and_names_the_others(
    corpus: ReferenceCorpus,
    black_hole: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "BIND_SECONDS", 20.0)
    with ReferenceServer([corpus]) as one, ReferenceServer([corpus]) as two:
        with Replicas([one.url, two.url]) as replicas:
            plan = replicas.bind(PLAN)
            assert replicas._pool.plan is plan
        assert [one.plans.keys(), two.plans.keys()] == [{plan.plan_id}, {plan.plan_id}]
        assert caplog.records == []
        monkeypatch.setattr(module, "BIND_SECONDS", 0.05)
        with Replicas([one.url, black_hole]) as replicas:
            assert replicas.bind(PLAN) == plan
            (record,) = caplog.records
            assert record.getMessage() == f"{black_hole} has not answered yet; going on without it"
            replicas._pool.stop()


def test_binding_tells_of_every_server_that_refuses(corpus: ReferenceCorpus) -> None:
    with (
        ReferenceServer([corpus]) as right,
        ReferenceServer([make_corpus(seed=9)]) as wrong,
        ReferenceServer([corpus], plan_salt="v2") as other,
        Replicas([right.url, wrong.url, other.url]) as replicas,
        pytest.raises(errors.ReplicaUnusable, match=rf"{wrong.url} refuses .*; {other.url} makes plan"),
    ):
        replicas.bind(PLAN)
