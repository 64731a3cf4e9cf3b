"""Heads of requests, and how a request is named."""

from __future__ import annotations

from corpus_server.admission.request import RequestHead, request_id_in


def test_the_id_of_bytes_is_that_of_their_first_head_alone() -> None:
    behind = b"GET / HTTP/9\r\n\r\nGET / HTTP/1.1\r\nX-Request-Id: other\r\n\r\n"
    assert request_id_in(behind) != "other"
    continued = b"GET / HTTP/1.1\r\nX-Request-Id: my-1\r\n more\r\n\r\n"
    assert request_id_in(continued) != "my-1"


def test_headers_that_came_twice_are_one_list() -> None:
    lines = [(b"accept", b"a"), (b"x-request-id", b"my-1"), (b"accept", b"b "), (b"traceparent", b"00-1")]
    head = RequestHead.of("GET", b"/", lines, address="::1")
    assert head.headers["accept"] == "a, b"
    assert (head.request_id, head.trace_parent, head.address) == ("my-1", "00-1", "::1")
