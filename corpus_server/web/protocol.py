"""uvicorn's HTTP protocol, with a way past it for token answers and a limit on heads.

With both water marks at zero the transport is "paused" as long as one byte is unsent: who waits for it
knows that everything has left for the kernel.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import cast

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from corpus_server.web.connection import Connection, connection_of, widen
from corpus_server.web.lane import Lane

MAX_HEAD_BYTES = 64 * 1024
"""What uvicorn's other parser takes; this one has no limit, and would keep whatever comes."""

MAX_TOGETHER_BYTES = 16 * 1024
"""Requests that come together in more than this are left to the parser."""

_END = b"\r\n\r\n"


class CorpusProtocol(HttpToolsProtocol):
    """`uvicorn --http corpus_server.web.protocol:CorpusProtocol`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up a new connection."""
        transport.set_write_buffer_limits(high=0, low=0)
        widen(transport.get_extra_info("socket"))
        super().connection_made(transport)
        self._text = b""
        self._in_head = self._in_message = False
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Answer requests that are known by their text, and parse all others."""
        while data and not self.transport.is_closing():
            text, data = self._cut(data)
            if self._in_message:
                self._parse(text)
            elif not (self._is_idle and self._answer_known(Connection(self, text))):
                self._text = text
                self._parse(text)

    def _cut(self, data: bytes) -> tuple[bytes, bytes]:
        """Return what may be the text of one request, and the rest; requests may come several at a time."""
        if self._in_message or len(data) > MAX_TOGETHER_BYTES:
            return data, b""
        end = data.find(_END) + len(_END)
        return (data[:end], data[end:]) if end >= len(_END) else (data, b"")

    def _parse(self, data: bytes) -> None:
        """Parse; a head that grows beyond the limit ends the connection."""
        # Counted by what is read at once (256 KiB): a head that is complete by then may be larger.
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = self._in_message = True

    def on_headers_complete(self) -> None:
        """Start the application, which finds the connection in its scope."""
        self._in_head = False
        Connection(self, self._text).attach(cast("Scope", self.scope))
        self._text = b""
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Begin to count the next head."""
        self._in_message = False
        self._head_bytes = 0
        super().on_message_complete()

    @property
    def _is_idle(self) -> bool:
        """Whether a request that comes now is the next one to be answered."""
        return not self._answer_under_way() and not self.transport.get_write_buffer_size()

    def _answer_known(self, connection: Connection) -> bool:
        """Answer a request that is known by its text; return whether it is."""
        lane: Lane | None = getattr(self.app, "lane", None)
        asked = None if lane is None else lane.recognise(connection.text)
        if lane is None or asked is None:
            return False
        self._unset_keepalive_if_required()
        answer = lane.answer(asked, connection)
        if answer is not None:
            if connection.cycle is None:  # requests that come meanwhile wait behind it
                self.cycle = connection.cycle = self._new_cycle()
            self._start(self._await(answer, connection))
        return True

    async def _await(self, answer: Coroutine[None, None, bool], connection: Connection) -> None:
        """Wait for an answer; if there is none, let the application give it."""
        cycle = connection.cycle
        if await answer or cycle is None or self.transport.is_closing():
            return
        if cycle.scope:
            await cycle.run_asgi(self.app)
        elif self._in_message:
            self.transport.abort()  # the parser is in the midst of the next one
        else:
            self.cycle = None
            self._text = b""
            self._parse(connection.text)

    def _new_cycle(self) -> RequestResponseCycle:
        """Return uvicorn's notion of an answer that is under way, for a request that it never saw."""
        return RequestResponseCycle(
            scope={},  # type: ignore[typeddict-item]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Answer the short way, or let the application do it."""
        connection = connection_of(cast("Scope", cycle.scope))
        assert connection is not None
        connection.cycle = cycle
        if not self._answer_known(connection):
            super()._start_asgi_task(cycle, app)

    def _start(self, answer: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(answer)
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
