"""One request as it arrives: httptools parses it, and the checks that httptools lacks are here.

httptools accepts a missing or second `Host`, versions such as HTTP/2.0 and RTSP/1.0, and a head without end.
It refuses bare line feeds, folded lines, white space before a colon, two lengths, and whatever else may be
read in two ways.
"""

from __future__ import annotations

import re

import httptools

from corpus_server.admission.admission import MAX_URL_BYTES, max_body_bytes
from corpus_server.admission.request import MAX_HEAD_BYTES, RequestHead, check_unambiguous
from corpus_server.errors import BadRequest, BodyTooLarge, CorpusServerError, HeadTooLarge, UrlTooLong

END = b"\r\n\r\n"

MAX_FRAMING_BYTES = 64 * 1024
"""Bytes of chunk sizes, extensions and trailers beyond one per byte of the body: chunks of a single byte cost
much more than they bring."""

_CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_ABSOLUTE = re.compile(rb"(?i)https?://[^/?#]+")


class Message:
    """One request: its head, and as much of its body as has come.

    Args:
        text: the head, with the empty line that ends it.
        address: IP address of the client.

    Attributes:
        head: of the request.
        lines: its headers in order, names in lower case.
        version: of HTTP.
        complete: whether the body has come as a whole.

    Raises:
        BadRequest: the head is not HTTP/1.1, or could be read in two ways.
    """

    def __init__(self, text: bytes, address: str) -> None:
        self.lines: list[tuple[bytes, bytes]] = []
        self.version = ""
        self.complete = False
        self._keep_alive = False
        self._target = b""
        self._body: list[bytes] = []
        self._left = 0  # bytes of the body, or of its chunk, that are to come
        self._error: CorpusServerError | None = None  # of a callback
        self._num_body = 0
        self._num_framing = 0
        self._size_line: bytes | None = None  # of a chunk, as far as it has come; None: no more are parsed
        self._parser = httptools.HttpRequestParser(self)
        self._parse(text)
        names = [name for name, _ in self.lines]
        if not text.partition(b"\r\n")[0].endswith((b" HTTP/1.1", b" HTTP/1.0")):
            raise BadRequest("the request must be HTTP/1.0 or 1.1")
        check_unambiguous(self.version, names)
        if found := _ABSOLUTE.match(self._target):  # RFC 9112, 3.2.2
            rest = self._target[found.end() :]
            self._target = rest if rest.startswith(b"/") else b"/" + rest
        if not self._target.startswith((b"/", b"*")):
            raise BadRequest("the request's target must be a path, or an http:// URL")
        method = self._parser.get_method().decode("ascii")
        self.head = RequestHead.of(method, self._target, self.lines, address=address)
        self.head.keep_alive = self._keep_alive and self.version == "1.1"
        self._begin_body()

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take what came; return what belongs to the body, and what follows the message.

        Raises:
            BadRequest: the framing of the body is wrong.
            BodyTooLarge: the body exceeds what its route takes.
        """
        if self._size_line is None:
            body, rest = data[: self._left], data[self._left :]
            self._left -= len(body)
            self.complete = not self._left
            return body, rest
        at = 0
        while at < len(data) and not self.complete:
            at = self._feed_chunk(data, at)
            if self.complete:
                del self._parser
        body, self._body = b"".join(self._body), []
        return body, data[at:]

    def _begin_body(self) -> None:
        """Find out what body follows the head."""
        encoding = self.head.headers.get("transfer-encoding")
        length = self.head.headers.get("content-length") or "0"
        if encoding is None:
            if not length.isdecimal():
                raise BadRequest(f"Content-Length must be a number, got {length[:100]!r}")
            self._left = int(length)
            self.complete = not self._left
            del self._parser  # it holds this object: such circles would wait for the garbage collector
        elif encoding.lower() == "chunked" and self.version == "1.1":
            if self._parser.should_upgrade():  # it would read no chunks
                self._parser = httptools.HttpRequestParser(self)
                self._parse(_CHUNKED)
            self._size_line = b""
        else:
            raise BadRequest(f"Transfer-Encoding must be chunked, of HTTP/1.1, got {encoding[:100]!r}")

    def _feed_chunk(self, data: bytes, at: int) -> int:
        """Parse some bytes of a chunked body from `at` on, never beyond its end; return where they end."""
        if self._left:
            end = min(len(data), at + self._left)
            self._left -= end - at
        else:
            end = data.find(b"\n", at) + 1 or len(data)
            assert self._size_line is not None
            self._size_line += data[at:end]
            self._num_framing += end - at
            if self._num_framing > MAX_FRAMING_BYTES + self._num_body:
                raise BadRequest("the chunks of the body are too small, or their extensions too long")
        self._parse(data[at:end])
        return end

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to no protocol: the request is answered as if it had not asked
        except httptools.HttpParserCallbackError as error:
            # Not its context: that is whatever is handled now, such as the 404 that is the response.
            raise self._error or error from None
        except httptools.HttpParserError as error:
            raise BadRequest(f"the request must be HTTP/1.1 (RFC 9112): {error}") from error

    # -- callbacks of the parser

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if not self.version:  # else it is a trailer
            self.lines.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note what the parser knows of the head."""
        self.version = self._parser.get_http_version()
        # Asked here: with the end of the message the parser forgets what the headers said.
        self._keep_alive = self._parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        """Begin a chunk, whose size the parser has checked."""
        assert self._size_line is not None
        size = int(self._size_line.partition(b";")[0], 16)
        self._size_line = b""
        self._left = size + 2 if size else 0  # with the line's end behind the chunk
        self._num_body += size
        if self._num_body > (most := max_body_bytes(self.head)):
            self._error = BodyTooLarge(f"the body of this request must have at most {most} bytes")
            raise self._error

    def on_body(self, body: bytes) -> None:
        """Take some of a chunk."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the last chunk."""
        if self._size_line is not None:
            self.complete = True


def too_large(received: bytes) -> CorpusServerError:
    """Return the error for a head that did not end within `MAX_HEAD_BYTES`: its first line, or all of it."""
    line, end, _ = received.partition(b"\n")
    if end and len(line) <= MAX_URL_BYTES:
        return HeadTooLarge(f"a request's head must have at most {MAX_HEAD_BYTES} bytes")
    return UrlTooLong(f"the URL must have at most {MAX_URL_BYTES} bytes")
