"""A connection that ends while its client may still be sending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from corpus_server.http import lingering as leaving
from corpus_server.http.lingering import MAX_DROPPED_BYTES, Leaving, leave


def in_a_loop(function: Callable[[], None]) -> None:
    async def run() -> None:
        function()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("can_write_eof", "is_closing", "calls"),
    [
        (False, False, ["close"]),
        (True, True, []),
        (True, False, ["write_eof", "set_protocol", "resume_reading"]),
    ],
    ids=["tls", "closing", "plain"],
)
def test_the_own_side_is_closed_first(can_write_eof: bool, is_closing: bool, calls: list[str]) -> None:
    transport, before = Mock(), Mock()
    transport.can_write_eof.return_value = can_write_eof
    transport.is_closing.return_value = is_closing
    in_a_loop(lambda: leave(transport, before))
    done = [call[0] for call in transport.method_calls if call[0] not in ("can_write_eof", "is_closing")]
    assert done == calls
    if calls[1:]:
        assert isinstance(transport.set_protocol.call_args.args[0], Leaving)


def test_what_comes_is_dropped_up_to_a_bound() -> None:
    transport = Mock()

    def receive() -> None:
        protocol = Leaving(transport, Mock())
        for _ in range(2):
            protocol.data_received(bytes(MAX_DROPPED_BYTES // 2))
        transport.abort.assert_not_called()
        protocol.data_received(b"x")
        transport.abort.assert_called_once_with()

    in_a_loop(receive)


def test_a_client_that_does_not_close_is_cut_off_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LINGER_SECONDS", 0.01)

    async def wait() -> None:
        cut = asyncio.Event()
        Leaving(Mock(abort=cut.set), Mock())
        await asyncio.wait_for(cut.wait(), 60)

    asyncio.run(wait())


def test_the_protocol_before_learns_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LINGER_SECONDS", 0.01)
    transport, before, error = Mock(), Mock(), OSError()

    async def lose() -> None:
        later = asyncio.Event()
        Leaving(transport, before).connection_lost(error)
        asyncio.get_running_loop().call_later(0.02, later.set)  # behind the timer
        await later.wait()

    asyncio.run(lose())
    before.connection_lost.assert_called_once_with(error)
    transport.abort.assert_not_called()
