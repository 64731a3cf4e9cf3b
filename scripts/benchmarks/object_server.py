"""Serve a folder as an S3 bucket, fast: `python -m scripts.benchmarks.object_server FOLDER`.

It knows lists, heads and ranges, which is what staging asks for, and sends files without copying them. Test
servers that read a whole object for each range would be what is measured.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

PARTS = "parts"
"""In the bucket of this name, all objects were put in several parts: their ETags are no MD5."""

FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()


@functools.cache
def md5(path: Path) -> str:
    """Return the MD5 of a file; once, because it takes longer than to send it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One connection; the first part of each path is the bucket, which is there whatever its name."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send an object, a range of one, or the list of all."""
        parts = urlsplit(self.path)
        self.bucket, _, key = parts.path.lstrip("/").partition("/")
        if key:
            self._object(FOLDER / key)
        else:
            self._list(parse_qs(parts.query).get("prefix", [""])[0])

    def _etag(self, path: Path) -> str:
        return f'"{md5(path)}{"-8" if self.bucket == PARTS else ""}"'

    def do_HEAD(self) -> None:
        """Send the head of the same answer."""
        self.do_GET()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def _list(self, prefix: str) -> None:
        entries = "".join(
            f"<Contents><Key>{escape(path.name)}</Key><Size>{path.stat().st_size}</Size><ETag>{self._etag(path)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path in sorted(FOLDER.iterdir())
            if path.name.startswith(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
        self._head(200, len(body), {"Content-Type": "application/xml"})
        self.wfile.write(body)

    def _object(self, path: Path) -> None:
        if not path.is_file():
            self._head(404, 0, {})
            return
        size = path.stat().st_size
        headers = {"ETag": self._etag(path), "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
        if found:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._head(206 if found else 200, stop - start, headers)
        if self.command == "GET":
            with path.open("rb") as file:
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    def _head(self, status: int, num_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(num_bytes)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    for each in FOLDER.iterdir():
        md5(each)
    print(server.server_address[1], flush=True)
    server.serve_forever()
