"""Close a connection whose client may still be sending, so that it reads the last response."""

from __future__ import annotations

import asyncio

LINGER_SECONDS = 2.0

MAX_DROPPED_BYTES = 64 * 2**20
"""Twice the largest plan: a client that sends all of a body before it reads learns why it was refused."""


class Leaving(asyncio.Protocol):
    """The last protocol of a connection: drops what comes, until the client closes or the time is over.

    Without it close(2) would reset a connection with unread bytes, and the reset overtakes the response.

    Args:
        before: the protocol of the connection so far; learns of its end.
    """

    def __init__(self, transport: asyncio.Transport, before: asyncio.BaseProtocol) -> None:
        self._transport = transport
        self._before = before
        self._num_dropped = 0
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Drop what came."""
        self._num_dropped += len(data)
        if self._num_dropped > MAX_DROPPED_BYTES:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        self._before.connection_lost(error)


def leave(transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
    """Send nothing more, and close when the client does, or soon.

    Args:
        protocol: of the connection.
    """
    if not transport.can_write_eof():  # TLS has no half-closed connections
        transport.close()
    elif not transport.is_closing():
        transport.write_eof()
        transport.set_protocol(Leaving(transport, protocol))
        transport.resume_reading()
