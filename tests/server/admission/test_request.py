"""Heads: which ones the door takes, and that no other is ever read as one of those."""

from __future__ import annotations

import re

import pytest

from corpus_server.admission.access import ANYONE
from corpus_server.admission.request import (
    RequestHead,
    parse_simple_get,
    request_id,
    request_id_in,
    without_ids,
)

PLAIN = b"GET /v1/batches?plan=ab&step=7 HTTP/1.1\r\nHost: x:1\r\nAccept: a, b\r\n\r\n"


def test_a_plain_get_is_parsed() -> None:
    head = parse_simple_get(PLAIN)
    assert head == RequestHead("GET", b"/v1/batches?plan=ab&step=7", {"host": "x:1", "accept": "a, b"}, True)
    assert head is not None
    assert (head.path, head.query_string) == (b"/v1/batches", b"plan=ab&step=7")


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


TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("lines", "rest", "found_id", "trace_parent"),
    [
        (b"A: b\r\nX-Request-Id: my-1\r\nC: d", b"A: b\r\nC: d", "my-1", b""),
        (b"A: b\r\nx-REQUEST-id:\t my-1 \r\nC: d", b"A: b\r\nC: d", "my-1", b""),
        (b"A: b\r\nX-Request-Id: my-1", b"A: b", "my-1", b""),
        (b"A: b\r\ntraceparent: %b\r\nC: d" % TRACE, b"A: b\r\nC: d", None, TRACE),
        (
            b"A: b\r\nX-Request-Id: my-1\r\ntraceparent: %b\r\nC: d" % TRACE,
            b"A: b\r\nC: d",
            "my-1",
            TRACE,
        ),
        (b"A: b\r\nX-Request-Id: my 1\r\nC: d", None, None, b""),
        (b"A: b\r\nX-Request-Id: my-1\r\n more\r\nC: d", None, None, b""),
        (b"A: b\r\nC: d", None, None, b""),
    ],
    ids=["id", "any spelling", "last", "trace", "both", "bad id", "continued", "none"],
)
def test_what_names_one_request_is_taken_out(
    lines: bytes, rest: bytes | None, found_id: str | None, trace_parent: bytes
) -> None:
    start = b"GET / HTTP/1.1\r\n"
    text, one_id, parent = without_ids(start + lines + b"\r\n\r\n")
    assert text == start + (lines if rest is None else rest) + b"\r\n\r\n"
    assert parent == trace_parent.decode()
    if found_id is not None:
        assert one_id == found_id
    elif rest is None:
        assert re.fullmatch("[0-9a-f]{12}-[0-9a-f]+", one_id)


@pytest.mark.parametrize("value", [b"close", b"Close", b"keep-alive, close"])
def test_it_says_whether_the_connection_is_kept(value: bytes) -> None:
    head = parse_simple_get(PLAIN.replace(b"Accept: a, b", b"Connection: " + value))
    assert head is not None
    assert not head.keep_alive


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace(b"GET", b"HEAD"),
        PLAIN.replace(b"GET", b"get"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/1.1 "),
        PLAIN.replace(b"HTTP/1.1", b"HTTP/2.0"),
        PLAIN.replace(b"Host: x:1\r\n", b""),
        PLAIN.replace(b"Accept: a, b", b"HOST: y"),
        PLAIN.replace(b"Accept: a, b", b"Accept: a\r\nAccept: b"),
        PLAIN.replace(b"Accept: a, b", b"Content-Length: 3"),
        PLAIN.replace(b"Accept: a, b", b"Content-Length: 0"),
        PLAIN.replace(b"Accept: a, b", b"Transfer-Encoding: chunked"),
        PLAIN.replace(b"Accept: a, b", b"Expect: 100-continue"),
        PLAIN.replace(b"Accept: a, b", b"Connection: Upgrade\r\nUpgrade: websocket"),
        PLAIN.replace(b"Accept: a, b", b"Accept : a"),
        PLAIN.replace(b"Accept: a, b", b" folded"),
        PLAIN.replace(b"Accept: a, b", b"Accept: a\0b"),
        PLAIN.replace(b"\r\n", b"\n"),
        PLAIN + PLAIN,
        PLAIN[:-2],
        b"\x16\x03\x01\r\n\r\n",
        b"\r\n\r\n",
        b"",
    ],
)
def test_everything_else_is_left_to_the_ordinary_protocol(text: bytes) -> None:
    assert parse_simple_get(text) is None
