"""Requests by name: in the log, and as OpenTelemetry spans where the program has set a tracer provider.

A program that has one has imported the API of OpenTelemetry. Where nobody has, nothing is imported and
nothing is sent.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from typing import Any

REQUEST_ID_HEADER = "x-request-id"

log = logging.getLogger("corpus_client")


class SentRequest(AbstractContextManager["SentRequest"]):
    """A request from when it is sent to when its response is there; as a context it ends with the block."""

    def __init__(self, server: str, method: str, path: str, request_id: str) -> None:
        self.id = request_id
        log.debug("%s: %s %s, request %s", server, method, path, request_id)
        self._span: Any = None  # `opentelemetry.trace.Span`; None where nothing is recorded
        if (api := sys.modules.get("opentelemetry.trace")) is not None:
            route = path.partition("?")[0]
            attributes = {"http.request.method": method, "url.path": route}
            span = api.get_tracer("corpus_client").start_span(
                f"{method} {route}", kind=api.SpanKind.CLIENT, attributes=attributes
            )
            self._span = span if span.get_span_context().is_valid else None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def headers(self) -> dict[str, str]:
        """Return the request's id, and the W3C `traceparent` by which the server's span becomes a child."""
        headers = {REQUEST_ID_HEADER: self.id}
        if self._span is not None:
            context = self._span.get_span_context()
            trace, span = f"{context.trace_id:032x}", f"{context.span_id:016x}"
            headers["traceparent"] = f"00-{trace}-{span}-{context.trace_flags:02x}"
        return headers

    def end(self, error: BaseException | None = None) -> None:
        """End the span, if there is one."""
        if self._span is None:
            return
        self._span.set_attribute("corpus.request_id", self.id)
        if error is not None:
            api = sys.modules["opentelemetry.trace"]
            self._span.set_status(api.StatusCode.ERROR, type(error).__name__)
        self._span.end()
