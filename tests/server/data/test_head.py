"""Heads: which ones the door takes, and that no other is ever read as one of those."""

from __future__ import annotations

import pytest

from corpus_server.data.head import RequestHead, parse_simple_get

PLAIN = b"GET /v1/batches?plan=ab&step=7 HTTP/1.1\r\nHost: x:1\r\nAccept: a, b\r\n\r\n"


def test_a_plain_get_is_parsed() -> None:
    head = parse_simple_get(PLAIN)
    assert head == RequestHead("GET", b"/v1/batches?plan=ab&step=7", {"host": "x:1", "accept": "a, b"}, True)
    assert head is not None
    assert (head.path, head.query_string) == (b"/v1/batches", b"plan=ab&step=7")


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
