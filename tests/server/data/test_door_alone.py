"""The door without a network: what no client of a whole server sees in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest

from corpus_server.data.ahead import MAX_BYTES, Ahead, Budget
from corpus_server.data.door import MAX_WAITING_BYTES, Door, State
from corpus_server.web.ordinary import OrdinaryProtocol


@pytest.fixture(autouse=True)
def no_socket() -> Iterator[None]:
    with patch("corpus_server.data.door.widen"):
        yield


def open_door(**settings: float) -> Door:
    """Return the door of a connection that was just accepted; call it in an event loop."""
    settings = {"keep_alive_seconds": 5, "send_timeout_seconds": 5, **settings}
    service = SimpleNamespace(ahead_budget=Budget(), settings=SimpleNamespace(**settings), gate=Mock())
    door = Door(service, SimpleNamespace(connections=set(), default_headers=[]), Mock())
    door.connection_made(Mock(**{"get_extra_info.return_value": None}))
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
