"""Around the application: the gate, the metrics and the header that says which path answered.

ASGI middleware of our own, outside FastAPI: as a middleware inside, each would add two layers to every
request.
"""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corpus_server import metrics
from corpus_server.admission.access import ANYONE
from corpus_server.admission.request import REQUEST_ID, RequestHead, request_id
from corpus_server.answers.access_log import Answered
from corpus_server.answers.queries import parameters
from corpus_server.answers.service import Service
from corpus_server.errors import BadRequest, CorpusServerError
from corpus_server.http.connection import VIA
from corpus_server.web.responses import EVENTS_TYPE, PROBLEM_KEY, REQUEST_ID_KEY, refused

_CALLER = "corpus_server.caller"
"""Key of a request's scope: who asks, as the gate has found."""

_CLOSE = (b"connection", b"close")
_NO_STORE = (b"cache-control", b"no-store")
_VIA_APPLICATION = (VIA.lower().encode(), b"application")


class Gateway:
    """ASGI application that asks the gate before it passes a request on.

    Args:
        app: the FastAPI application; its `state.service` is set before the first request.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, sent_bytes = 500, 0
        began = time.perf_counter()
        counted = False
        given = dict(scope["headers"]).get(REQUEST_ID.lower().encode())
        named = scope[REQUEST_ID_KEY] = request_id(None if given is None else given.decode("latin-1"))
        service: Service = self.app.state.service
        body_comes = _announces_body(scope)

        async def received() -> Message:
            nonlocal body_comes
            message = await receive()
            body_comes = body_comes and message.get("more_body", False)
            return message

        def count() -> None:
            nonlocal counted
            if counted:
                return
            counted = True
            metrics.ACTIVE.number -= 1
            answered = Answered(
                request=request_head(scope),
                route=getattr(scope.get("route"), "path", "unknown"),
                via="application",
                status=status,
                sent_bytes=sent_bytes,
                seconds=time.perf_counter() - began,
                problem_type=scope.get(PROBLEM_KEY, ""),
            )
            service.requests.done(answered)

        async def observed(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                # Counted when it begins: one who watches for hours is no slow request, and none under way.
                if (b"content-type", EVENTS_TYPE.encode()) in message["headers"]:
                    count()
                about = (REQUEST_ID.lower().encode(), named.encode())
                message["headers"] = [*message["headers"], about, _VIA_APPLICATION]
                # Descriptions have no tag by which a cache could ask again, and may have needed a token.
                if not any(name == b"cache-control" for name, _ in message["headers"]):
                    message["headers"].append(_NO_STORE)
                # A body that nobody has read ends the connection: else it would be received and dropped.
                if (service.admission.closing or body_comes) and _CLOSE not in message["headers"]:
                    message["headers"].append(_CLOSE)
            elif scope["method"] != "HEAD":  # the server drops the body of those
                sent_bytes += len(message.get("body", b""))
            await send(message)

        metrics.ACTIVE.number += 1
        try:
            await self._checked(service, scope)(scope, received, observed)
        finally:
            count()

    def _checked(self, service: Service, scope: Scope) -> ASGIApp:
        """Return the application, or the refusal of the request."""
        head = request_head(scope)
        try:
            service.admission.check(head)
            if scope["http_version"] not in ("1.0", "1.1"):  # h11 takes any digits
                raise BadRequest(f"the request must be HTTP/1.0 or 1.1, got {scope['http_version']}")
            _check_unambiguous([name for name, _ in scope["headers"]])
            # Monitoring adds parameters of its own to the routes outside /v1, twice or not.
            if scope["path"].startswith("/v1/"):
                parameters(scope["query_string"])
        except CorpusServerError as error:
            # What comes next from such a client may be anything.
            return refused(scope, error, {"Connection": "close"})
        finally:
            scope[_CALLER] = head.caller
        return self.app


def _check_unambiguous(names: list[bytes]) -> None:
    """Raise BadRequest for headers that a proxy in front may have read in another way; h11 takes them."""
    if names.count(b"authorization") > 1:
        raise BadRequest("a request must have one Authorization header, got several")
    if b"transfer-encoding" in names and b"content-length" in names:
        raise BadRequest("a request must not have both Transfer-Encoding and Content-Length (RFC 9112, 6.1)")


def _announces_body(scope: Scope) -> bool:
    """Tell whether a request has a body, of whatever length."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )


def request_head(scope: Scope) -> RequestHead:
    """Return the head of a request, as the door parses it."""
    query = scope["query_string"]
    target = scope.get("raw_path", scope["path"].encode()) + (b"?" + query if query else b"")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return RequestHead(
        scope["method"],
        target,
        headers,
        address=(scope.get("client") or ("",))[0],
        caller=scope.get(_CALLER, ANYONE),
        request_id=scope[REQUEST_ID_KEY],
        trace_parent=headers.get("traceparent", ""),
    )
