"""The door without a network: what no client of a whole server sees in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, patch

import pytest
from corpus_server.http.ahead import MAX_BYTES, Ahead, Budget

from corpus_server.admission.checks import MAX_URL_BYTES
from corpus_server.admission.request import MAX_HEAD_BYTES
from corpus_server.answers.access_log import Answered
from corpus_server.answers.response import ClientLeft
from corpus_server.errors import HeadTooLarge, Overloaded, ReadFailed, RequestTimeout, UrlTooLong
from corpus_server.http import connection as door_module
from corpus_server.http.connection import MAX_WAITING_BYTES, Door, State, too_large, too_slow
from corpus_server.http.lingering import Leaving
from corpus_server.http.ordinary import OrdinaryProtocol


@pytest.fixture(autouse=True)
def no_socket() -> Iterator[None]:
    with patch("corpus_server.http.connection.widen"):
        yield


def open_door(*, gate: Mock | None = None, peer: object = None, tls: bool = False, **settings: float) -> Door:
    """Return the door of a connection that was just accepted; call it in an event loop."""
    settings = {"keep_alive_seconds": 5, "send_timeout_seconds": 5, "head_timeout_seconds": 5, **settings}
    service = SimpleNamespace(
        ahead_budget=Budget(),
        settings=SimpleNamespace(**settings),
        gate=gate or Mock(closing=False),
        requests=Mock(),
        refusing=Mock(),
    )
    door = Door(service, SimpleNamespace(connections=set(), default_headers=[(b"server", b"s")]), Mock())
    about = {"peername": peer, "sslcontext": object() if tls else None}
    transport = Mock(**{"get_write_buffer_size.return_value": 0, "is_closing.return_value": False})
    transport.get_extra_info.side_effect = about.get
    door.connection_made(transport)
    return door


@pytest.mark.parametrize(
    "received", [b"", b"POST / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["lost", "handed over"]
)
def test_a_connection_that_is_gone_is_forgotten(received: bytes) -> None:
    """Else the process would keep all that it ever had, and their shares of what is made ahead."""

    async def come_and_go() -> Door:
        door = open_door()
        assert door._shared.connections == {door}
        door._service.ahead_budget.share(door._ahead)
        if received:
            door.data_received(received)
        else:
            door.connection_lost(None)
        return door

    door = asyncio.run(come_and_go())
    assert door._shared.connections == set()
    assert door._service.ahead_budget.share(Ahead(Budget())) == MAX_BYTES * 2 // 3


def test_a_response_under_way_at_the_end_of_the_process_says_that_it_is_the_last() -> None:
    async def end() -> Door:
        door = open_door()
        door._state, door._exchange = State.ANSWERING, Mock(close=False)
        door.shutdown()
        return door

    door = asyncio.run(end())
    assert door._exchange.close
    assert door._ends
    door.transport.close.assert_not_called()


def test_a_client_that_sends_on_during_a_response_is_not_read_beyond_a_bound() -> None:
    """Else pipelined requests would fill the memory; they are read again with the next request."""

    async def flood() -> None:
        door = open_door()
        door._state = State.ANSWERING
        door.data_received(bytes(MAX_WAITING_BYTES))
        door.transport.pause_reading.assert_not_called()
        door.data_received(b"x")
        door.transport.pause_reading.assert_called_once()
        door.transport.resume_reading.assert_not_called()
        door._next()
        door.transport.resume_reading.assert_called_once()

    asyncio.run(flood())


@pytest.mark.parametrize("kind", [Door, OrdinaryProtocol])
def test_a_reader_that_takes_a_little_within_each_time_out_is_kept(kind: type) -> None:
    unsent = Mock(side_effect=[300, 200, 100, 100])

    async def watch() -> None:
        if kind is Door:
            protocol = open_door(send_timeout_seconds=0.01)
        else:
            protocol = OrdinaryProtocol.__new__(OrdinaryProtocol)
            protocol.loop, protocol.transport = asyncio.get_running_loop(), Mock()
            protocol._settings = SimpleNamespace(send_timeout_seconds=0.01)
        dropped = asyncio.Event()
        protocol.transport.get_write_buffer_size = unsent
        protocol.transport.abort = dropped.set
        protocol._watch_reader()
        await asyncio.wait_for(dropped.wait(), 30)

    asyncio.run(watch())
    assert unsent.call_count == 4


def test_what_was_made_for_other_rights_is_not_sent() -> None:
    """The token may have lost a corpus since: the request is answered anew, and refused."""

    async def start() -> Door:
        door = open_door()
        door._exchange, door._work, door._write = Mock(), Mock(), Mock()
        door._start(Mock())
        door._work.assert_called_once_with()
        door._write.assert_not_called()
        door._start(Mock(request=Mock(caller=door._exchange.caller)))
        return door

    asyncio.run(start())._write.assert_called_once()


def in_a_loop(function: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return function()

    return asyncio.run(run())


def sent(door: Door) -> bytes:
    """Return all that was sent."""
    return b"".join(bytes(part) for call in door.transport.writelines.call_args_list for part in call.args[0])


def test_a_connection_is_counted_from_its_beginning_to_its_end() -> None:
    def come_and_go() -> None:
        door = open_door()
        gate, transport = door._service.admission, door.transport
        transport.set_write_buffer_limits.assert_called_once_with(high=0, low=0)
        gate.connect.assert_called_once_with(transport)
        gate.disconnect.assert_not_called()
        door_module.widen.assert_called_once_with(None)  # its socket
        timer = door._timer
        door.connection_lost(None)
        assert timer is not None
        assert timer.cancelled()
        gate.disconnect.assert_called_once_with(transport)

    in_a_loop(come_and_go)


def test_an_idle_client_is_closed_in_time() -> None:
    async def wait() -> Door:
        door = open_door(keep_alive_seconds=0.01)
        closed = asyncio.Event()
        door.transport.close = closed.set
        await asyncio.wait_for(closed.wait(), 60)
        return door

    door = asyncio.run(wait())
    assert sent(door) == b""
    assert door._state is State.CLOSING


def test_a_head_that_has_begun_has_a_time_of_its_own() -> None:
    """However long an idle client may wait, and however its bytes come."""

    async def wait() -> Door:
        door = open_door(keep_alive_seconds=0.01, head_timeout_seconds=0.05)
        door.data_received(b"GET /v1/batches?")
        left, timer = asyncio.Event(), door._timer
        door.transport.write_eof = left.set
        door.data_received(b"x")
        assert door._timer is timer
        assert timer is not None
        assert timer.when() - asyncio.get_running_loop().time() > 0.02
        await asyncio.wait_for(left.wait(), 60)
        return door

    door = asyncio.run(wait())
    head = sent(door)
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"\r\nConnection: close\r\n" in head
    assert b"a request's head must arrive within 0.05 s of its first byte" in head
    door.transport.close.assert_not_called()


def test_each_head_has_a_time_of_its_own() -> None:
    def receive() -> None:
        door = open_door()
        for _ in range(2):
            idle = door._timer
            door.data_received(b"GET /v1/batches?")
            assert idle is not None
            assert idle.cancelled()
            door._received = b""
            door._stop_timer()
            door._wait_for_request()

    in_a_loop(receive)


def test_empty_lines_begin_no_head() -> None:
    def receive() -> None:
        door = open_door()
        timer = door._timer
        door.data_received(b"\r\n\r\n")
        assert door._timer is timer

    in_a_loop(receive)


@pytest.mark.parametrize(
    ("tls", "received"),
    [
        (False, b"POST /v1/batches?x HTTP/1.1\r\n"),
        (False, b"GET /v1/plans?x HTTP/1.1\r\n"),
        (False, b"GET /v1/batches HTTP/1.1\r\n"),
        (False, b"GET /v1/batches?x HTTP/1.0\r\n\r\nmore"),
        (True, b"GET /v1/batches?x HTTP/1.1\r\nHost: x\r\n\r\n"),
    ],
    ids=["method", "path", "no query", "not plain", "tls"],
)
def test_other_requests_are_handed_over_with_all_their_bytes(tls: bool, received: bytes) -> None:
    def hand_over() -> None:
        door = open_door(tls=tls)
        timer = door._timer
        door.data_received(b"\r\n" + received)
        transport, ordinary = door.transport, door._make_ordinary.return_value
        assert timer is not None
        assert timer.cancelled()
        assert transport.set_write_buffer_limits.call_args_list[1:] == [((), {})]
        transport.set_protocol.assert_called_once_with(ordinary)
        calls = [(each[0], each.args) for each in ordinary.method_calls]
        assert calls == [("connection_made", (transport,)), ("data_received", (received,))]
        assert sent(door) == b""

    in_a_loop(hand_over)


@pytest.mark.parametrize(
    "start", [b"", b"G", b"GET /v1/", b"GET /v1/indices", b"GET /v1/batches?x HTTP/1.1\r\n"]
)
def test_the_beginning_of_a_request_is_waited_for(start: bytes) -> None:
    def receive() -> None:
        door = open_door()
        door.data_received(start)
        door._make_ordinary.assert_not_called()
        assert sent(door) == b""

    in_a_loop(receive)


def test_a_connection_beyond_the_limit_is_told_so_and_closed() -> None:
    gate = Mock(**{"connect.side_effect": Overloaded("too many")})

    def connect() -> Door:
        return open_door(gate=gate)

    door = in_a_loop(connect)
    head, _, body = sent(door).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert {"Connection: close", "server: s", "corpus-via: door"} < set(lines)
    door.transport.close.assert_called_once_with()
    door._service.requests.done.assert_called_once_with(
        Answered(
            request=ANY,
            route="refused",
            via="door",
            status=503,
            sent_bytes=len(body),
            problem_type="overloaded",
        )
    )
    door._service.refusing.assert_called_once_with()
    assert door._timer is None


@pytest.mark.parametrize("ends", [False, True])
def test_after_a_refusal_that_was_taken_late_the_connection_goes_on(ends: bool) -> None:
    """Or ends, if it was refused itself."""

    def take() -> None:
        door = open_door()
        door.transport.get_write_buffer_size.return_value = 100
        door._ends = ends
        door._refuse(Overloaded("busy"))
        assert door._state is State.ANSWERING
        door.transport.close.assert_not_called()
        door.transport.get_write_buffer_size.return_value = 0
        timer = door._timer
        door.resume_writing()
        assert timer is not None
        assert timer.cancelled()
        assert door.transport.close.called is ends
        assert door.transport.resume_reading.called is not ends
        assert door._state is (State.CLOSING if ends else State.IDLE)

    in_a_loop(take)


@pytest.mark.parametrize(("num_bytes", "is_refused"), [(MAX_HEAD_BYTES - 1, False), (MAX_HEAD_BYTES, True)])
def test_a_head_without_an_end_is_refused_at_its_limit(num_bytes: int, is_refused: bool) -> None:
    def receive() -> Door:
        door = open_door()
        start = b"GET /v1/batches?x HTTP/1.1\r\nX-Request-Id: my-id\r\nA: "
        door.data_received(start.ljust(num_bytes, b"a"))
        return door

    door = in_a_loop(receive)
    if is_refused:
        assert sent(door).startswith(b"HTTP/1.1 431 ")
        assert b"\r\nX-Request-Id: my-id\r\n" in sent(door)
        assert b"\r\nConnection: close\r\n" in sent(door)
        # What is still coming is dropped, or the response would be overtaken by a reset.
        assert isinstance(door.transport.set_protocol.call_args.args[0], Leaving)
    else:
        assert sent(door) == b""


def test_what_comes_to_a_connection_that_closes_is_dropped() -> None:
    def receive() -> Door:
        door = open_door()
        door.shutdown()
        door.data_received(b"POST / HTTP/1.1\r\n\r\n")
        return door

    door = in_a_loop(receive)
    door.transport.close.assert_called_once_with()
    door._make_ordinary.assert_not_called()
    assert door._received == b""


def test_a_client_that_ended_its_side_gets_the_response_under_way() -> None:
    def end() -> list[bool]:
        door = open_door()
        found = [door.eof_received()]
        door._state = State.ANSWERING
        return [*found, door.eof_received()]

    assert in_a_loop(end) == [False, True]


@pytest.mark.parametrize(
    ("received", "closes"), [(b"", True), (b"GET /v1/bat", True), (b"GET / HTTP/1.1\r\n\r\n", False)]
)
def test_after_the_last_whole_request_of_such_a_client_the_connection_ends(
    received: bytes, closes: bool
) -> None:
    def end() -> Door:
        door = open_door()
        door._state, door._received = State.ANSWERING, received
        door.eof_received()
        door._next()
        return door

    door = in_a_loop(end)
    assert door.transport.close.called == closes
    assert door.transport.resume_reading.called != closes


@pytest.mark.parametrize(
    ("peer", "name"),
    [(("10.0.0.1", 5), "10.0.0.1:5"), (("::1", 5, 0, 0), "::1:5"), ("", "unknown"), (None, "unknown")],
    ids=["v4", "v6", "unix", "gone"],
)
def test_a_reader_that_is_dropped_is_named(caplog: pytest.LogCaptureFixture, peer: object, name: str) -> None:
    def drop() -> Door:
        door = open_door(peer=peer)
        door.transport.get_write_buffer_size.return_value = 300
        door._watch_reader(300)
        return door

    door = in_a_loop(drop)
    assert [each.getMessage() for each in caplog.records] == [
        f"dropped a reader that took nothing for 5 s: {name}"
    ]
    door.transport.abort.assert_called_once_with()


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ReadFailed("bad disk"), ["read-failed: bad disk; a response under way was cut"]),
        (ValueError("what"), ["a response under way was cut"]),
        (ClientLeft(), []),
    ],
    ids=["of the server", "a mistake", "the client's"],
)
def test_a_response_that_failed_under_way_is_cut(
    caplog: pytest.LogCaptureFixture, failure: Exception, said: list[str]
) -> None:
    """The client sees that it is shorter than was announced."""

    def fail() -> Door:
        door = open_door()
        exchange = Mock(done=False, waiting=None)
        door._state, door._exchange, door._in_thread = State.ANSWERING, exchange, True
        door._worked(exchange, (b"more",), failure)
        exchange.finish.assert_called_once_with()
        return door

    door = in_a_loop(fail)
    door.transport.abort.assert_called_once_with()
    assert sent(door) == b""
    assert door._exchange is None
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.getMessage() for each in errors] == said
    assert [bool(each.exc_info) for each in errors] == [isinstance(failure, ValueError)] * len(said)


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_end_of_a_connection_stops_its_response(in_thread: bool) -> None:
    """A thread that is at work for it finishes it later."""

    def lose() -> None:
        door = open_door()
        exchange = Mock(cancelled=False)
        door._state, door._exchange, door._in_thread = State.ANSWERING, exchange, in_thread
        door.connection_lost(None)
        assert exchange.cancelled is True
        assert exchange.finish.called is not in_thread
        if in_thread:
            door._worked(exchange, (), None)
            exchange.finish.assert_called_once_with()
        assert sent(door) == b""

    in_a_loop(lose)


def test_a_response_that_waited_for_shards_is_given_up_with_its_connection() -> None:
    """The shards come later, and nobody may begin to send then."""

    async def lose() -> None:
        door = open_door()
        exchange = Mock(cancelled=False)
        door._state, door._exchange = State.ANSWERING, exchange
        with patch.object(Door, "_work") as work:
            door._wake(exchange)
            await asyncio.sleep(0.01)
            work.assert_called_once_with()
            door.connection_lost(None)
            door._wake(exchange)
            await asyncio.sleep(0.01)
            work.assert_called_once_with()

    asyncio.run(lose())


@pytest.mark.parametrize(
    ("received", "error", "detail"),
    [
        (b"GET /x HTTP/1.1\n", HeadTooLarge, f"a request's head must have at most {MAX_HEAD_BYTES} bytes"),
        (b"x" * MAX_URL_BYTES + b"\nmore\n", HeadTooLarge, "a request's head must have at most 65536 bytes"),
        (b"x" * (MAX_URL_BYTES + 1) + b"\n", UrlTooLong, f"the URL must have at most {MAX_URL_BYTES} bytes"),
        (b"x" * 10, UrlTooLong, f"the URL must have at most {MAX_URL_BYTES} bytes"),
    ],
    ids=["a short line", "the longest line", "a long line", "no line"],
)
def test_what_is_too_large_is_told_by_the_first_line(
    received: bytes, error: type[Exception], detail: str
) -> None:
    found = too_large(received)
    assert (type(found), found.detail) == (error, detail)


def test_what_is_too_slow_says_in_which_time_it_had_to_come() -> None:
    found = too_slow(2.5)
    assert isinstance(found, RequestTimeout)
    assert found.detail == "a request's head must arrive within 2.5 s of its first byte"
