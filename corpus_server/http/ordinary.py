"""uvicorn's h11 protocol with limits: problem documents, time-outs for heads and readers, unread bodies.

h11 refuses what could be read in two ways: a missing or second `Host`, white space before a colon, two
lengths that differ. uvicorn answers that with plain text, or with nothing while the application is at work.
"""

from __future__ import annotations

import asyncio
import re
import sys
from itertools import chain
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from corpus_server.admission.request import MAX_HEAD_BYTES, RequestHead, request_id_in
from corpus_server.answers.access_log import Answered
from corpus_server.answers.response import problem
from corpus_server.answers.service import Service
from corpus_server.errors import BadRequest, CorpusServerError
from corpus_server.http.connection import too_large, too_slow
from corpus_server.http.lingering import leave

_HEAD_END = re.compile(rb"\n\r?\n")  # h11 takes both

TRANSPORT = "transport"
"""Key of the connection's transport in a request's `scope["state"]`."""


class OrdinaryProtocol(H11Protocol):
    """The protocol of a connection that the door has handed over.

    A reader that takes nothing for `send_timeout_seconds` is dropped.

    Args:
        config, shared: uvicorn's.
        service: its gate has counted the connection.
    """

    def __init__(self, config: Config, shared: ServerState, service: Service) -> None:
        super().__init__(config, shared, app_state={})
        self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._admission = service.admission
        self._settings = service.settings
        self._requests = service.requests
        self._watch: asyncio.TimerHandle | None = None
        self._head = b""  # of the request, and what came behind it; h11 keeps nothing of what it refuses
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over a connection."""
        super().connection_made(transport)
        self.app_state[TRANSPORT] = transport
        self.transport = cast("asyncio.Transport", _Closing(transport, self))

    def data_received(self, data: bytes) -> None:
        """Take what came; empty lines before a request are to be ignored (RFC 9112, 2.2)."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")
            if not data:
                return  # h11 would take nothing for the end of the stream
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        """Take what has come so far; called for each request, pipelined or not."""
        if self.conn.their_state is h11.IDLE:
            self._head = self.conn.trailing_data[0]
            if self._head.startswith((b"\r", b"\n")):  # behind the request before; h11 refuses it
                self._head = self._head.lstrip(b"\r\n")
                self.conn = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
                if not self._head:
                    return
                self.conn.receive_data(self._head)
            # h11 counts the bytes of a head only while its end has not come.
            is_long = len(self._head) > MAX_HEAD_BYTES
            if is_long and not _HEAD_END.search(self._head, 0, MAX_HEAD_BYTES):
                self._refuse(too_large(self._head))
                return
        super().handle_events()

    def on_response_complete(self) -> None:
        """Go on to the next request."""
        super().on_response_complete()
        self._watch_head()  # of a pipelined request

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_watch()
        self._stop_head_timer()
        self._admission.disconnect(self.app_state[TRANSPORT])
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Watch a reader that has fallen behind."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on: the reader has caught up."""
        self._stop_watch()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not parse; called while its error is handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            self._refuse(too_large(self.conn.trailing_data[0]))
        else:
            self._refuse(BadRequest(f"the request must be HTTP/1.1 (RFC 9112): {error or msg}"))

    def _refuse(self, refusal: CorpusServerError) -> None:
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and self.cycle.response_started:
            self.transport.abort()  # into the middle of a response nothing may be written
            return
        if under_way:
            self.cycle.disconnected = True  # what the application still answers is thrown away
            self.cycle.message_event.set()
        request_id = request_id_in(self._head)
        response = problem(refusal, request_id)
        answered = Answered(
            request=RequestHead("", b"", {}, request_id=request_id),
            route="refused",
            via="application",
            status=response.status,
            sent_bytes=response.num_bytes,
            problem_type=response.problem_type,
        )
        self._requests.done(answered)
        head = response.head(self.server_state.default_headers, request_id=request_id, close=True)
        self.transport.write(b"".join((head, *chain.from_iterable(response.body))))
        self.transport.close()

    def _watch_head(self) -> None:
        """Begin to wait for the end of a head when some of it is there; it may not come byte by byte."""
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun:
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            seconds = self._settings.head_timeout_seconds
            self._head_timer = self.loop.call_later(seconds, self._refuse, too_slow(seconds))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_reader(self, before: int | None = None) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent == before:
            self.transport.abort()
        else:
            self._watch = self.loop.call_later(
                self._settings.send_timeout_seconds, self._watch_reader, unsent
            )

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


class _Closing:
    """The transport of a connection as uvicorn sees it: who is still sending learns why it ends."""

    def __init__(self, transport: asyncio.Transport, protocol: OrdinaryProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Tell whether the connection ends."""
        return self._is_leaving or self._transport.is_closing()

    def close(self) -> None:
        """Close at once, unless a request was received in part."""
        conn = self._protocol.conn
        if self._is_leaving:
            return
        if conn.their_state in (h11.SEND_BODY, h11.ERROR) or conn.trailing_data[0]:
            leave(self._transport, self._protocol)
        else:
            self._transport.close()

    @property
    def _is_leaving(self) -> bool:
        return self._transport.get_protocol() is not self._protocol
