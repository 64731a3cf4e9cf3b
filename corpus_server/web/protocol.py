"""uvicorn's HTTP protocol with the socket settings that token answers need.

With both water marks at zero the transport is "paused" as long as one byte is unsent, and uvicorn's
`send` waits while it is: so a `send` that returns means that everything sent before has left, and
the buffer it was sent from may be reused.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "corpus_server.transport"


class CorpusProtocol(HttpToolsProtocol):
    """`uvicorn --http corpus_server.web.protocol:CorpusProtocol`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the water marks of a new connection."""
        transport.set_write_buffer_limits(high=0, low=0)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """Let the application find the transport."""
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {_EXTENSION: self.transport}


def drains_fully(scope: Scope) -> bool:
    """Tell whether a send that returns means that everything before it has left."""
    return _EXTENSION in (scope.get("extensions") or {})


def abort_connection(scope: Scope) -> None:
    """Cut the connection at once, whatever its reader does; without our protocol, do nothing."""
    transport = (scope.get("extensions") or {}).get(_EXTENSION)
    if transport is not None:
        transport.abort()
