"""An S3 bucket for tests, drills and the bench: large objects, a delay, a bandwidth, faults, and a count.

`tests.stores.s3_server` runs moto, which reads a whole object for every range. This one serves ranges of
objects of half a gigabyte that take no memory; a test compares what obstore sees of both.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
import time
from dataclasses import dataclass, field
from email.message import Message
from io import BufferedIOBase
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np

from tests.corpora import some_tokens
from tests.stores import Reply, WebServer, md5

NAME: Final = "bucket"

_PIECE_BYTES: Final = 256 << 10  # sent at a time where there is a bandwidth
_PERIOD: Final = 4_194_301  # tokens; a prime, so that no two extents are equal
_SECRET: Final = "secret"
_WRITTEN: Final = "2026-01-01T00:00:00.000Z"
_WRITTEN_HTTP: Final = "Thu, 01 Jan 2026 00:00:00 GMT"


class Repeated:
    """An object of uint16 tokens that repeat after 4,194,301, and that differ from shard to shard.

    Args:
        num_tokens: of the object.
        seed: of the tokens.
    """

    def __init__(self, num_tokens: int, seed: int) -> None:
        self._num_bytes = 2 * num_tokens
        self._shift = 7919 * seed % _PERIOD
        self.etag = f'"{hashlib.md5(f"{num_tokens} {seed}".encode()).hexdigest()}-1"'

    def __len__(self) -> int:
        return self._num_bytes

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes; both numbers are even."""
        return self.tokens(start // 2, stop // 2).tobytes()

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return `(stop - start,) uint16` tokens: what a response must hold."""
        first = (start + self._shift) % _PERIOD
        count = stop - start
        if count <= _PERIOD:  # a view: what the bucket computes is no part of what is measured with it
            return _block()[first : first + count]
        return np.resize(_block()[first : first + _PERIOD], count)


@dataclass
class Bucket(WebServer):
    """A bucket that speaks as much S3 as corpora need: lists, HEAD, ranges, `If-Match`.

    Attributes:
        objects: by key, without a slash before it; bytes have their MD5 as ETag, others were put in parts.
        delay_seconds: before each response.
        bytes_per_second: of all responses together; None: as fast as it goes.
        num_bytes: of bodies that were sent.
        num_requests: of all kinds.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes | Repeated] = field(default_factory=dict)
    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    num_bytes: int = 0
    num_requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0  # when the line has sent what it has taken

    @property
    def idle_seconds(self) -> float:
        """For how long nothing has been sent."""
        return time.monotonic() - self._free_at

    @property
    def environment(self) -> dict[str, str]:
        """How clients find it, and their credentials; requests without a signature are accepted, too."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": self.url,
        }

    def reply(self, path: str, headers: Message, method: str = "GET") -> Reply:
        """Return the right reply to a request with these headers, as if it were a GET."""
        with self._lock:
            self.num_requests += 1
        time.sleep(self.delay_seconds)
        if (refused := _check_signature(method, path, headers)) is not None:
            return refused
        parts = urlsplit(path)
        _, bucket, key = (unquote(parts.path) + "/").split("/", 2)
        key, query = key.rstrip("/"), parse_qs(parts.query)
        if bucket != NAME:
            return Reply(404, {}, b"<Error><Code>NoSuchBucket</Code></Error>")
        if "list-type" in query:
            return self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        if key not in self.objects:
            return Reply(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        content = self.objects[key]
        its = {"ETag": _etag(content), "Last-Modified": _WRITTEN_HTTP, "Accept-Ranges": "bytes"}
        if headers.get("If-Match", its["ETag"]) != its["ETag"]:
            return Reply(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
        wanted = headers.get("Range")
        if wanted is None:
            return Reply(200, its, b"", length=len(content))  # nobody reads an object as a whole
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(content))
        self.gets.append((key, start))
        its["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        body = content[start:stop] if isinstance(content, bytes) else content.read(start, stop)
        return Reply(206, its, body)

    def send(self, file: BufferedIOBase, body: bytes) -> None:
        """Send a body at the bandwidth that it shares with the others."""
        for start in range(0, len(body), _PIECE_BYTES):
            piece = memoryview(body)[start : start + _PIECE_BYTES]
            with self._lock:
                self.num_bytes += len(piece)
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(piece) / (self.bytes_per_second or float("inf"))
                wait = self._free_at - now
            time.sleep(wait)
            file.write(piece)

    def _list(self, prefix: str, delimiter: str) -> Reply:
        found = []
        for key, content in sorted(self.objects.items()):
            is_below = not delimiter or PurePosixPath(key).parent == PurePosixPath(prefix)
            if key.startswith(prefix) and is_below:
                found.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{_WRITTEN}</LastModified>"
                    f"<ETag>{escape(_etag(content))}</ETag><Size>{len(content)}</Size></Contents>"
                )
        text = f"<Name>{NAME}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount>"
        text += f"<IsTruncated>false</IsTruncated>{''.join(found)}"
        xml = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</ListBucketResult>'
        return Reply(200, {"Content-Type": "application/xml"}, xml.encode())


def _check_signature(method: str, target: str, headers: Message) -> Reply | None:
    """Return the refusal of a request whose signature is not that of its method, target and headers.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
    """
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=[^/]+/(\S+), ?SignedHeaders=(\S+), ?Signature=(\w+)",
        headers.get("Authorization", ""),
    )
    if found is None:
        return None
    scope, names, signature = found.groups()
    path, _, query = target.partition("?")
    its = [f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names.split(";")]
    content = headers["x-amz-content-sha256"]
    request = "\n".join([method, path, "&".join(sorted(query.split("&"))), "".join(its), names, content])
    hashed = hashlib.sha256(request.encode()).hexdigest()
    to_sign = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashed])
    key = f"AWS4{_SECRET}".encode()
    for part in [*scope.split("/"), to_sign]:
        key = hmac.digest(key, part.encode(), "sha256")
    if key.hex() == signature:
        return None
    return Reply(403, {}, b"<Error><Code>SignatureDoesNotMatch</Code></Error>")


def _etag(content: bytes | Repeated) -> str:
    return f'"{md5(content)}"' if isinstance(content, bytes) else content.etag


def _block() -> np.ndarray:
    """Return the tokens that all objects repeat, twice."""
    if not _blocks:
        _blocks.append(np.tile(some_tokens(_PERIOD), 2))
    return _blocks[0]


_blocks: list[np.ndarray] = []
