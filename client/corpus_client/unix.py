"""httpx over a Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import socket

import httpx


class UnixTransport(httpx.BaseTransport):
    """Sends each request over a connection of its own, which costs microseconds on the same host.

    httpx has a transport for this too, but it leaves the socket of every attempt that fails to the
    garbage collector: descriptors would grow while a server is away.

    Args:
        path: of the server's socket.
        timeout_seconds: for every wait.
    """

    def __init__(self, path: str, *, timeout_seconds: float) -> None:
        self._path = path
        self._timeout_seconds = timeout_seconds

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The whole answer."""
        target = request.url.raw_path.decode("ascii")
        with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
            try:
                connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.sock.settimeout(self._timeout_seconds)
                connection.sock.connect(self._path)
                connection.request(request.method, target, request.read() or None, dict(request.headers))
                answer = connection.getresponse()
                content = answer.read()
            except TimeoutError as error:
                raise httpx.ReadTimeout(str(error), request=request) from error
            except (OSError, http.client.HTTPException) as error:
                raise httpx.NetworkError(f"{type(error).__name__}: {error}", request=request) from error
        return httpx.Response(answer.status, headers=answer.getheaders(), content=content)
