"""uvicorn's HTTP protocol with the socket settings that token answers need, and a limit on heads.

With both water marks at zero the transport is "paused" as long as one byte is unsent, and uvicorn's
`send` waits while it is: so a `send` that returns means that everything sent before has left, and
the buffer it was sent from may be reused.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""What uvicorn's other parser takes; this one has no limit, and would keep whatever comes."""

_EXTENSION = "corpus_server.transport"


class CorpusProtocol(HttpToolsProtocol):
    """`uvicorn --http corpus_server.web.protocol:CorpusProtocol`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the water marks of a new connection."""
        transport.set_write_buffer_limits(high=0, low=0)
        super().connection_made(transport)
        self._in_head = False
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what came; a head that grows beyond the limit ends the connection."""
        # Counted by what is read at once (256 KiB): a head that is complete by then may be larger.
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Let the application find the transport."""
        super().on_message_begin()
        self._in_head = True
        scope: Any = self.scope
        scope["extensions"] = {_EXTENSION: self.transport}

    def on_headers_complete(self) -> None:
        """Start the application."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Begin to count the next head."""
        self._head_bytes = 0
        super().on_message_complete()

    def _refuse_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # another answer is under way: nothing may come into its midst
            return
        title = "Request header fields too large"
        document = {"type": "head-too-large", "title": title, "status": 431}
        body = json.dumps({**document, "detail": f"a request's head holds at most {MAX_HEAD_BYTES} bytes"})
        self.transport.write(
            f"HTTP/1.1 431 {title}\r\nContent-Type: application/problem+json\r\nCache-Control: no-store\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()


def drains_fully(scope: Scope) -> bool:
    """Tell whether a send that returns means that everything before it has left."""
    return _EXTENSION in (scope.get("extensions") or {})


async def abort_connection(scope: Scope) -> None:
    """Cut the connection, whatever its reader does; without our protocol, do nothing."""
    transport = (scope.get("extensions") or {}).get(_EXTENSION)
    if transport is not None:
        transport.abort()
        await asyncio.sleep(0)  # now uvicorn has heard of it, and misses no rest of the answer
