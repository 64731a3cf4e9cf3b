"""Around the application: what every request of it needs, under whatever server it runs.

ASGI middleware of our own, outside Starlette: as a middleware inside, each would add two layers to every
request.
"""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from corpus_server import metrics
from corpus_server.admission.request import RequestHead, check_unambiguous
from corpus_server.errors import CorpusServerError
from corpus_server.responses.requests import CLIENT_LEFT
from corpus_server.responses.response import NO_STORE, Answered, common_headers
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import parameters
from corpus_server.web.responses import EVENTS_TYPE, HEAD, PROBLEM_KEY, refused
from corpus_server.work import ClientLeft


class Gateway:
    """ASGI application that checks, counts and completes each request of another one.

    Args:
        app: the Starlette application; its `state.service` is set before the first request.
    """

    def __init__(self, app: Starlette) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and count it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, sent_bytes = 500, 0
        began = time.perf_counter()
        counted = False
        service: Service = self.app.state.service
        head = scope[HEAD] = _head_of(scope)
        scope["path"] = head.decoded_path

        def count() -> None:
            nonlocal counted
            if counted:
                return
            counted = True
            metrics.ACTIVE.number -= 1
            answered = Answered(
                request=head,
                route=getattr(scope.get("route"), "path", "unknown"),
                via="application",
                status=status,
                sent_bytes=sent_bytes,
                seconds=time.perf_counter() - began,
                problem_type="" if status in (200, CLIENT_LEFT) else scope.get(PROBLEM_KEY, ""),
            )
            service.requests.done(answered)

        async def observed(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name for name, _ in message["headers"]}
                more = common_headers(head)
                # Descriptions have no tag by which a cache could ask again, and may have needed a token.
                if b"cache-control" not in names:
                    more |= NO_STORE
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode("latin-1")) for name, value in more.items()),
                ]
                # Counted when it begins: one who watches for hours is no slow request, and none under way.
                if (b"content-type", EVENTS_TYPE.encode()) in message["headers"]:
                    count()
            await send(message)
            if scope["method"] != "HEAD":  # the server drops the body of those
                sent_bytes += len(message.get("body", b""))

        metrics.ACTIVE.number += 1
        try:
            await self._checked(service, scope, head)(scope, receive, observed)
        except Exception as error:
            # The framework raises an error of its own where a response had begun.
            if isinstance(error, ClientLeft) or isinstance(error.__cause__, ClientLeft):
                status = CLIENT_LEFT
            raise
        finally:
            count()

    def _checked(self, service: Service, scope: Scope, head: RequestHead) -> ASGIApp:
        """Return the application, or the refusal of the request."""
        try:
            check_unambiguous(scope["http_version"], [name for name, _ in scope["headers"]])
            service.admission.check(head)
            # Monitoring adds parameters of its own to the routes outside /v1, twice or not.
            if scope["path"].startswith("/v1/"):
                parameters(head.query_string)
        except CorpusServerError as error:
            return refused(scope, error)
        return self.app


def _head_of(scope: Scope) -> RequestHead:
    query = scope["query_string"]
    target = scope.get("raw_path", scope["path"].encode()) + (b"?" + query if query else b"")
    address = (scope.get("client") or ("",))[0]
    return RequestHead.of(scope["method"], target, scope["headers"], address=address)
