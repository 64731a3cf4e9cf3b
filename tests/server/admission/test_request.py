"""Heads of requests, and how a request is named."""

from __future__ import annotations

import re

import pytest

from corpus_server.admission.request import ANYONE, RequestHead, request_id, request_id_in


def test_a_head_is_kept_alive_and_anyone_s_unless_it_says_more() -> None:
    head = RequestHead("GET", b"/a?b?c", {})
    assert (head.keep_alive, head.caller, head.request_id, head.trace_parent) == (True, ANYONE, "", "")
    assert head.charge(2**40) is None
    assert (head.path, head.query_string) == (b"/a", b"b?c")
    assert head == RequestHead("GET", b"/a?b?c", {}, charge=print)


@pytest.mark.parametrize("given", ["a", "A-z_0.9", "x" * 128])
def test_a_good_id_stays(given: str) -> None:
    assert request_id(given) == given
    assert request_id_in(b"GET / HTTP/1.1\r\nX-Request-Id: %b\r\n\r\n" % given.encode()) == given


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "\xe9", "a\n"])
def test_another_id_is_replaced_by_a_new_one(given: str | None) -> None:
    one, other = request_id(given), request_id(given)
    assert re.fullmatch("[0-9a-f]{12}-[0-9a-f]+", one)
    assert one != other
    assert one.split("-")[0] == other.split("-")[0]


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
