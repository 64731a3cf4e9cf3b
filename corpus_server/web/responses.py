"""The core's responses as ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response as AsgiResponse
from starlette.types import Message, Receive, Scope, Send

from corpus_server import live
from corpus_server.admission.request import RequestHead
from corpus_server.errors import CorpusServerError
from corpus_server.http.bridge import LINE
from corpus_server.http.exchange import Exchange
from corpus_server.responses.problem import problem
from corpus_server.responses.question import Question
from corpus_server.responses.response import NO_STORE, Buffer, Response
from corpus_server.responses.service import Service
from corpus_server.work import Budget, ClientLeft

HEAD = "corpus_server.head"
"""Key of a request's scope: its `RequestHead`, set by the gateway."""

EVENTS_TYPE = "text/event-stream"

PIECE_BYTES: Final = 256 * 1024
"""Sent at once of a response that is in memory. 7 MB at once took 4 ms, for which all connections waited."""

LOOK_SECONDS = 0.5
"""How often a stream of events looks for a sample, and whether the server drains or the client has left."""

PROBLEM_KEY = "corpus_server.problem"
"""Key of a request's scope: the type of the problem document that answers it."""


def refused(
    scope: Scope, error: Exception, headers: Mapping[str, str] = MappingProxyType({})
) -> AsgiResponse:
    """Return the problem document of an error as the framework's response."""
    response = problem(error, scope[HEAD].request_id)
    response.headers.update(headers)
    scope[PROBLEM_KEY] = response.problem_type
    return sent(response)


def sent(response: Response) -> AsgiResponse:
    """Return a response that is whole and in memory as the framework's; a large one is sent in pieces."""
    if response.num_bytes > PIECE_BYTES:
        return Driven(partial(_in_pieces, response))
    content = b"".join(part for group in response.body for part in group)
    return AsgiResponse(content, response.status, response.headers)


async def _in_pieces(response: Response, _: Scope, send: Send) -> None:
    await send(_start(response.status, response.headers))
    for part in chain.from_iterable(response.body):
        for at in range(0, len(part), PIECE_BYTES):
            piece = bytes(part[at : at + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # other connections have their turn
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Driven(AsgiResponse):
    """A response that a coroutine function sends itself; it gets the scope and `send`."""

    def __init__(self, drive: Callable[[Scope, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._drive = drive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await self._drive(scope, send)


def made(
    service: Service,
    request: Request,
    head: RequestHead,
    question: Question,
    work: Callable[[Budget], Response],
) -> AsgiResponse:
    """Return a response that drives the exchange of a question, under any ASGI server.

    It raises ClientLeft; and CorpusServerError before anything was sent, or in the middle of the body, where
    only the server can cut the connection.
    """

    async def drive(scope: Scope, send: Send) -> None:
        line = scope.get("state", {}).get(LINE)
        gone = partial(has_left, request)
        is_token_path = question.is_token_path
        exchange = Exchange(service, head, work, question.limits, line, gone, is_token_path=is_token_path)
        is_begun = False

        async def send_body(parts: Sequence[Buffer], *, more: bool = True) -> None:
            nonlocal is_begun
            if await request.is_disconnected():
                raise ClientLeft("the client left before its response was sent")
            if (response := exchange.response) is not None and not is_begun:
                is_begun = True
                await send(_start(response.status, response.headers))
            await send({"type": "http.response.body", "body": b"".join(parts), "more_body": more})

        await exchange.run(send_body)
        await send_body((), more=False)

    return Driven(drive)


async def has_left(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def events(service: Service, request: Request, head: RequestHead) -> AsgiResponse:
    """Return `/v1/live` again and again, as server-sent events: first the whole hour, then what is new.

    Ends when the server drains or the token is no longer valid; whoever watches asks again. Raises Overloaded
    before anything was sent.
    """

    async def drive(scope: Scope, send: Send) -> None:
        gate = service.admission
        with gate.following():
            # nginx would keep events back until its buffer is full.
            about = {"Content-Type": EVENTS_TYPE, **NO_STORE, "X-Accel-Buffering": "no"}
            await send(_start(200, about))
            sent_until = 0.0
            with contextlib.suppress(CorpusServerError):
                while scope["method"] != "HEAD" and not gate.closing:
                    gate.check(head)
                    newest = await service.run_probe(live.response)
                    if newest["unix_seconds"] > sent_until:
                        event = orjson.dumps(live.after(newest, sent_until))
                        sent_until = newest["unix_seconds"]
                        body = b"data: %b\n\n" % event
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    await asyncio.sleep(LOOK_SECONDS)
                    if await request.is_disconnected():
                        return
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return Driven(drive)


def _start(status: int, headers: Mapping[str, str]) -> Message:
    named = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": named}
