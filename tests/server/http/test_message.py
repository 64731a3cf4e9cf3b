"""Requests as bytes, and what they are parsed into; whole, byte by byte, and with other bytes behind them."""

from __future__ import annotations

import pytest

from corpus_server.errors import BadRequest, BodyTooLarge, CorpusServerError
from corpus_server.http.message import MAX_FRAMING_BYTES, Message

HOST = b"Host: x\r\n"
BEHIND = b"GET /behind HTTP/1.1\r\nHost: x\r\n\r\n"

GOOD = {
    "plain": (b"GET /a?b=c HTTP/1.1\r\n" + HOST, b"", "GET", b"/a?b=c", True, b""),
    "old": (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", b"", "GET", b"/", False, b""),
    "close": (b"HEAD / HTTP/1.1\r\nConnection: close\r\n" + HOST, b"", "HEAD", b"/", False, b""),
    "absolute": (b"GET http://h:1/a?b HTTP/1.1\r\n" + HOST, b"", "GET", b"/a?b", True, b""),
    "absolute without a path": (b"GET HTTPS://h?b HTTP/1.1\r\n" + HOST, b"", "GET", b"/?b", True, b""),
    "upgrade": (
        b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\n" + HOST,
        b"",
        "GET",
        b"/",
        True,
        b"",
    ),
    "length": (b"POST / HTTP/1.1\r\nContent-Length: 3 \r\n" + HOST, b"abc", "POST", b"/", True, b"abc"),
    "chunks": (
        b"POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n" + HOST,
        b"2;a=b\r\nab\r\n00000A\r\n0123456789\r\n0\r\nHost: y\r\n\r\n",
        "POST",
        b"/",
        True,
        b"ab0123456789",
    ),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_a_message_ends_where_it_ends(name: str, size: int) -> None:
    head, sent, method, target, keep_alive, body = GOOD[name]
    message = Message(head + b"\r\n", "::1")
    assert (message.head.method, message.head.target) == (method, target)
    assert (message.head.keep_alive, message.head.address) == (keep_alive, "::1")
    stream, received = sent + BEHIND, b""
    assert message.complete is not bool(sent)
    while not message.complete:
        part, rest = message.feed(stream[:size])
        stream = rest + stream[size:]
        received += part
    assert (received, stream) == (body, BEHIND)
    assert b"host" not in dict(message.lines) or message.head.headers["host"] == "x"


BAD_HEADS = [
    b"GET / HTTP/1.1\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nhost: x\r\n",
    b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n",
    b"GET / HTTP/2.0\r\nHost: x\r\n",
    b"GET / HTTP/1.2\r\nHost: x\r\n",
    b"GET / RTSP/1.0\r\nHost: x\r\n",
    b"GET /\r\n",
    b"PRI * HTTP/2.0\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nHost: x\r\n",
    b"get / HTTP/1.1\r\nHost: x\r\n",
    b"GET / HTTP/1.1\nHost: x\r\n",
    b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: a\0b\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nNo colon\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: a\r\nAuthorization: b\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 1\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n",
    b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n",
]


@pytest.mark.parametrize("head", BAD_HEADS)
def test_a_head_that_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(BadRequest):
        Message(head + b"\r\n", "")


@pytest.mark.parametrize(
    ("target", "sent", "error"),
    [
        (b"/", b"no size\r\n", BadRequest),
        (b"/", b"1\r\nab\r\n", BadRequest),
        (b"/", b"1000000000000000000\r\n", BadRequest),  # 2^72
        (b"/", b"10001\r\n", BodyTooLarge),
        (b"/v1/plans", b"2000001\r\n", BodyTooLarge),
        (b"/v1/plans", b"1\r\na\r\n" * MAX_FRAMING_BYTES, BadRequest),
        (b"/v1/plans", b"1;" + b"a" * 2 * MAX_FRAMING_BYTES, BadRequest),
    ],
    ids=["no-size", "too-long", "2^72", "small-route", "plan", "tiny-chunks", "extension"],
)
def test_a_body_that_nobody_would_take_is_refused_at_once(
    target: bytes, sent: bytes, error: type[CorpusServerError]
) -> None:
    message = Message(b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % target, "")
    with pytest.raises(error):
        message.feed(sent)
