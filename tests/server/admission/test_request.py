"""Heads of requests, and how a request is named."""

from __future__ import annotations

from corpus_server.admission.request import RequestHead


def test_headers_that_came_twice_are_one_list() -> None:
    lines = [(b"accept", b"a"), (b"x-request-id", b"my-1"), (b"accept", b"b "), (b"traceparent", b"00-1")]
    head = RequestHead.of("GET", b"/", lines, address="::1")
    assert head.headers["accept"] == "a, b"
    assert (head.request_id, head.trace_parent, head.address) == ("my-1", "00-1", "::1")
