"""The core's responses as ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from types import MappingProxyType

import orjson
from starlette.requests import Request
from starlette.responses import Response as AsgiResponse
from starlette.types import Receive, Scope, Send

from corpus_server import live, metrics
from corpus_server.admission.request import RequestHead
from corpus_server.answers.response import Response, Slices, problem
from corpus_server.answers.service import Service
from corpus_server.errors import CorpusServerError
from corpus_server.http.exchange import log_error
from corpus_server.http.ordinary import TRANSPORT
from corpus_server.read import wire

REQUEST_ID_KEY = "corpus_server.request_id"
"""Key of a request's scope: its id, given by the client or made by the gateway."""

EVENTS_TYPE = "text/event-stream"

LOOK_SECONDS = 0.5
"""How often a stream of events looks for a sample, and whether the server drains or the client has left."""

PROBLEM_KEY = "corpus_server.problem"
"""Key of a request's scope: the type of the problem document that answers it."""


def refused(
    scope: Scope, error: Exception, headers: Mapping[str, str] = MappingProxyType({})
) -> AsgiResponse:
    """Return the problem document of an error as the framework's response."""
    response = problem(error, scope[REQUEST_ID_KEY])
    response.headers.update(headers)
    scope[PROBLEM_KEY] = response.problem_type
    return sent(response)


def sent(response: Response) -> AsgiResponse:
    """Return a response that is whole and in memory as the framework's."""
    content = b"".join(part for group in response.body for part in group)
    return AsgiResponse(content, response.status, response.headers)


class Made(AsgiResponse):
    """Makes a costly response in the gather threads and sends it, under any ASGI server."""

    def __init__(self, service: Service, request: Request, head: RequestHead, work: Slices[Response]) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._head = head
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the response and send it.

        Raises:
            CorpusServerError: before anything was sent; or in the middle of the body where only the server
                can cut the connection.
        """
        began = time.perf_counter()
        service, transport = self._service, scope.get("state", {}).get(TRANSPORT)
        slot = service.admission.admit(self._head, transport)
        self._head.charge = slot.charge
        try:
            response = await service.run_slices(self._work, self._request.is_disconnected)
            response.headers[wire.TIMING] = wire.timing_value(time.perf_counter() - began)
            headers = [
                (name.lower().encode(), value.encode("latin-1")) for name, value in response.headers.items()
            ]
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            making = time.perf_counter() - began
            try:
                making += await self._send_body(response, send)
                if response.source is not None and scope["method"] != "HEAD":
                    metrics.count_tokens(response.source, response.num_tokens)
                if response.reader is not None and scope["method"] != "HEAD":
                    sending = time.perf_counter() - began - making
                    response.reader.sent(response.num_steps, making_seconds=making, sending_seconds=sending)
            except CorpusServerError as error:
                if transport is None:
                    raise
                log_error(error)
                transport.abort()  # the client sees a body shorter than Content-Length
                await asyncio.sleep(0)  # the server learns of it, and misses no rest of the response
        finally:
            slot.release()

    async def _send_body(self, response: Response, send: Send) -> float:
        """Send the body; return for how many of the seconds its parts were read."""
        groups = iter(response.body)
        seconds = 0.0
        while True:
            began = time.perf_counter()
            group = await self._service.in_gather_thread(lambda: next(groups, None))
            seconds += time.perf_counter() - began
            if group is None:
                break
            while group:  # popped, so that no piece is held while the next one is read
                await send({"type": "http.response.body", "body": bytes(group.pop(0)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return seconds


class Events(AsgiResponse):
    """Sends `/v1/live` again and again, as server-sent events: first the whole hour, then what is new.

    Ends when the server drains or the token is no longer valid; whoever watches asks again.
    """

    def __init__(self, service: Service, request: Request, head: RequestHead) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until there is a reason to end.

        Raises:
            Overloaded: before anything was sent.
        """
        gate = self._service.admission
        # nginx would keep events back until its buffer is full.
        headers = {"content-type": EVENTS_TYPE, "cache-control": "no-store", "x-accel-buffering": "no"}
        with gate.following():
            named = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": named})
            sent_until = 0.0
            with contextlib.suppress(CorpusServerError):
                while scope["method"] != "HEAD" and not gate.closing:
                    gate.check(self._head)
                    newest = await self._service.run_probe(live.answer)
                    if newest["unix_seconds"] > sent_until:
                        event = orjson.dumps(live.after(newest, sent_until))
                        sent_until = newest["unix_seconds"]
                        body = b"data: %b\n\n" % event
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    await asyncio.sleep(LOOK_SECONDS)
                    if await self._request.is_disconnected():
                        return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
