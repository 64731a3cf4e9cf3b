"""Object stores for tests: an S3 server, and a web server that fails as it is told."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Self

from tests.serving import Response

_SERVE = (
    "import sys; from moto.server import ThreadedMotoServer as S; s = S('127.0.0.1', 0, verbose=False); "
    "s.start(); print(s.get_host_and_port()[1], flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run moto's S3 server in a process of its own; yield the environment in which clients find it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            while not (line := process.stdout.readline()).strip().isdigit():
                assert line, "moto's server did not start"
            yield {
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_REGION": "us-east-1",
                "AWS_ALLOW_HTTP": "true",
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(line)}",
            }
        finally:
            process.kill()


def s3_client(environment: dict[str, str]) -> Any:
    """Return a client of boto3 for `s3_server`."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name=environment["AWS_REGION"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


@dataclass
class Reply:
    """What a `WebServer` is about to send for a GET."""

    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool = False  # closes the connection in the middle of the body
    length: int | None = None  # of the body, if it is not there: that of a HEAD


Fault = Callable[[str, Reply], None]
"""Changes the reply to a GET of a path."""


@dataclass
class WebServer:
    """Files over HTTP with ranges and ETags, from entering to leaving.

    Attributes:
        files: bytes by path, "/web.bin".
        fault: changes what is sent; called by several threads.
        gets: ranges that were asked for: (path, first byte or 0).
    """

    files: dict[str, bytes]
    fault: Fault = lambda path, reply: None
    gets: list[tuple[str, int]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.handle_error = lambda *about: None  # type: ignore[method-assign]  # a client that was killed
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reply(self, path: str, headers: Message, method: str = "GET") -> Reply:
        """Return the right reply to a request with these headers, as if it were a GET."""
        wanted = headers.get("Range")
        if path not in self.files:
            return Reply(404, {}, b"")
        content = self.files[path]
        its = {"ETag": f'"{md5(content)}"'}
        if wanted is None:
            return Reply(200, its, content)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        assert found is not None
        start, stop = int(found[1]), min(int(found[2]) + 1, len(content))
        self.gets.append((path, start))
        its["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return Reply(206, its, content[start:stop])

    def send(self, file: BufferedIOBase, body: bytes) -> None:
        """Send a body."""
        file.write(body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                reply = server.reply(self.path, self.headers)
                if reply.status < 400:
                    server.fault(self.path, reply)
                self._send(reply)

            def do_HEAD(self) -> None:
                self._send(server.reply(self.path, self.headers, "HEAD"))

            def _send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header(
                    "Content-Length", str(len(reply.body) if reply.length is None else reply.length)
                )
                self.end_headers()
                if self.command == "GET":
                    server.send(self.wfile, reply.body[: len(reply.body) // 2] if reply.cut else reply.body)
                self.close_connection |= reply.cut

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


class Faults:
    """A fault for the first so many replies that it meets, or for all of them.

    Args:
        change: makes a wrong reply of a right one.
        most: replies to change.

    Attributes:
        num_met: replies that were changed.
    """

    def __init__(self, change: Callable[[Reply], None], most: int = 10**9) -> None:
        self._change = change
        self._most = most
        self.num_met = 0
        self._lock = threading.Lock()

    def __call__(self, path: str, reply: Reply) -> None:
        with self._lock:
            is_met = self.num_met < self._most
            self.num_met += is_met
        if is_met:
            self._change(reply)


def short(reply: Reply) -> None:
    """Send half of the range, as if that had been asked for."""
    start = int(reply.headers["Content-Range"].split()[1].partition("-")[0])
    total = reply.headers["Content-Range"].rpartition("/")[2]
    reply.body = reply.body[: len(reply.body) // 2]
    reply.headers["Content-Range"] = f"bytes {start}-{start + len(reply.body) - 1}/{total}"


def shifted(reply: Reply) -> None:
    """Send another range of the same size."""
    reply.headers["Content-Range"] = f"bytes 1-{len(reply.body)}/{len(reply.body) + 1}"


def whole(reply: Reply) -> None:
    """Send 200 and the bytes as if they were the whole object."""
    del reply.headers["Content-Range"]
    reply.status = 200


def cut(reply: Reply) -> None:
    """Close the connection in the middle of the body."""
    reply.cut = True


def flipped(reply: Reply) -> None:
    """Change one bit on the way."""
    reply.body = bytes([reply.body[0] ^ 1]) + reply.body[1:]


def unavailable(reply: Reply) -> None:
    """Send 503."""
    reply.status, reply.body = 503, b"<Error><Code>SlowDown</Code></Error>"


def broken(reply: Reply) -> None:
    """Send 500."""
    reply.status, reply.body = 500, b"<Error><Code>InternalError</Code></Error>"


def expired(reply: Reply) -> None:
    """Send what S3 sends where the session's token has expired."""
    reply.status, reply.body = 400, b"<Error><Code>ExpiredToken</Code></Error>"


def forbidden(reply: Reply) -> None:
    """Send 403."""
    reply.status, reply.body = 403, b"<Error><Code>AccessDenied</Code></Error>"


def changed(reply: Reply) -> None:
    """Send another version."""
    reply.headers["ETag"] = '"another"'


def after(seconds: float) -> Callable[[Reply], None]:
    """Return a fault that sends the right reply late."""
    return lambda reply: time.sleep(seconds)


def once_staged(ask: Callable[[], Response]) -> Response:
    """Ask until it is no more a matter of time: a busy machine may hold a store up for too long."""
    while (response := ask()).status == 503 and response.json()["type"] == "not-staged":
        pass
    return response


@functools.lru_cache(maxsize=1000)
def md5(content: bytes) -> str:
    """Return the MD5 of an object, computed once: each response says it."""
    return hashlib.md5(content).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, as objects."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
