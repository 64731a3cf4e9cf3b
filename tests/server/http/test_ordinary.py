"""The ordinary protocol without a network: a refusal while the application is at work."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from corpus_server.errors import BadRequest
from corpus_server.http.ordinary import OrdinaryProtocol


def refuse(*, response_started: bool, response_complete: bool = False) -> OrdinaryProtocol:
    """Return a protocol that has met nonsense behind the request that it is answering."""
    protocol = OrdinaryProtocol.__new__(OrdinaryProtocol)
    protocol.cycle = Mock(
        response_started=response_started, response_complete=response_complete, disconnected=False
    )
    protocol.transport = Mock()
    protocol.server_state = SimpleNamespace(default_headers=[])
    protocol._requests = Mock()
    protocol._head = b""
    protocol._refuse(BadRequest("nonsense"))
    return protocol


def test_what_the_application_answers_after_a_refusal_is_thrown_away() -> None:
    protocol = refuse(response_started=False)
    assert protocol.cycle.disconnected is True
    protocol.cycle.message_event.set.assert_called_once_with()
    (written,) = protocol.transport.write.call_args.args
    assert written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    protocol.transport.close.assert_called_once_with()


def test_a_refusal_never_comes_into_a_response() -> None:
    protocol = refuse(response_started=True)
    protocol.transport.abort.assert_called_once_with()
    assert not protocol.transport.write.called


@pytest.mark.parametrize("response_started", [False, True])
def test_a_whole_response_is_left_as_it_is(response_started: bool) -> None:
    protocol = refuse(response_started=response_started, response_complete=True)
    assert protocol.cycle.disconnected is False
    assert protocol.transport.write.called
