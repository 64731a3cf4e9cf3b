"""uvicorn's HTTP protocol, with a way past it for token answers and a limit on heads.

With both water marks at zero the transport is "paused" as long as one byte is unsent: who waits for it
knows that everything has left for the kernel.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from corpus_server.web.connection import Connection, widen
from corpus_server.web.lane import Lane

MAX_HEAD_BYTES = 64 * 1024
"""What uvicorn's other parser takes; this one has no limit, and would keep whatever comes."""


class CorpusProtocol(HttpToolsProtocol):
    """`uvicorn --http corpus_server.web.protocol:CorpusProtocol`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up a new connection."""
        transport.set_write_buffer_limits(high=0, low=0)
        widen(transport.get_extra_info("socket"))
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
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """Start the application."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Begin to count the next head."""
        self._head_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Answer the short way, or let the application do it, which finds the connection in its scope."""
        connection = Connection(self, cycle)
        connection.attach()
        lane: Lane | None = getattr(app, "lane", None)
        asked = None if lane is None else lane.recognise(cast("Scope", cycle.scope))
        if lane is None or asked is None:
            super()._start_asgi_task(cycle, app)
            return

        async def answer() -> None:
            if not await lane.answer(asked, connection):
                await cycle.run_asgi(app)

        task = self.loop.create_task(answer())
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        if self._answer_under_way():
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def _answer_under_way(self) -> bool:
        """Whether something is being sent, into whose midst nothing may come."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse_head(self) -> None:
        if self._answer_under_way():
            self.transport.abort()
            return
        title = "Request header fields too large"
        document = {"type": "head-too-large", "title": title, "status": 431}
        body = json.dumps({**document, "detail": f"a request's head holds at most {MAX_HEAD_BYTES} bytes"})
        self.transport.write(
            f"HTTP/1.1 431 {title}\r\nContent-Type: application/problem+json\r\nCache-Control: no-store\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()
