"""One HTTP connection that fills a buffer it is handed: no copy in Python, no torch.

Sending and receiving are two calls, so that one thread keeps several requests on the wire: it sends
on B before it reads A.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from corpus_client import errors, wire

MAX_ERROR_BYTES = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server is.

    Args:
        url: as written, without a slash at its end; the replica's name in messages.
        prefix: path in front of every route ("" or "/data").
    """

    url: str
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read `http://host[:port][/prefix]` or its https form."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise errors.InvalidArgument(f"url must be http://host:port, got {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise errors.InvalidArgument(f"url must be http://host:port or https://host:port, got {url!r}")
        if parts.username is not None:
            raise errors.InvalidArgument("url must not hold a password; pass it with headers=")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(
            url=url.rstrip("/"),
            host=parts.hostname,
            port=port if port is not None else (443 if tls else 80),
            prefix=parts.path.rstrip("/"),
            tls=tls,
        )


class Connection:
    """One keep-alive connection with at most one request on it.

    Everything but `abort` belongs to one thread. After any error but `ServerError` the connection is
    closed; `usable` says whether it can carry another request.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_seconds: float = 10.0,
        progress_timeout_seconds: float = 30.0,
    ) -> None:
        self.endpoint = endpoint
        self._headers = dict(headers or {})
        self._connect_timeout = connect_timeout_seconds
        self._progress_timeout = progress_timeout_seconds
        self._http = http.client.HTTPConnection(endpoint.host, endpoint.port)
        self._socket: socket.socket | None = None
        self._num_answers = 0
        self._aborted = False

    @property
    def usable(self) -> bool:
        """Whether the connection is open and free."""
        return self._socket is not None and not self._aborted

    def send(self, path: str, *, deadline: float) -> None:
        """Put a GET for `path` on the wire; `deadline` is in `time.monotonic` seconds."""
        try:
            if self._socket is None:
                self._open(deadline)
            self._http.request("GET", self.endpoint.prefix + path, headers=self._headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error

    def receive_into(
        self, buffer: memoryview, request: wire.ArrayRequest, *, deadline: float
    ) -> wire.Headers:
        """Receive the answer to what was sent.

        Args:
            buffer: at least `request.num_bytes` writable bytes; the body lies at its start afterwards.
                After an error its content is undefined.
            request: what the answer must be; status, headers, length and checksum are checked.
            deadline: `time.monotonic` seconds; no wait goes beyond it.

        Returns:
            The answer's headers.
        """
        stale = self._num_answers > 0
        try:
            self._limit_wait(deadline)
            response = self._http.getresponse()
            stale = False
            if response.status != 200:
                raise self._error_answer(response)
            wire.check_headers(response.headers, request)
            body = buffer[: request.num_bytes]
            self._fill(response, body, deadline)
            if request.verify:
                wire.check_body(response.headers, body)
        except errors.AnswerCorrupt as error:
            self.close()
            raise errors.AnswerCorrupt(f"{self.endpoint.url}: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            # stale: nothing came, and it had served before; the server closed it while idle.
            raise self._failed(error, stale=stale) from error
        self._num_answers += 1
        if response.will_close:
            self.close()
        return response.headers

    def abort(self) -> None:
        """Wake the thread that uses the connection; from any thread, for good."""
        self._aborted = True
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):  # it may not be connected any more
                # The base class's method: SSLSocket.shutdown takes the TLS state from under the reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; sending opens a new one."""
        self._http.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._num_answers = 0

    def _open(self, deadline: float) -> None:
        """Connect, with the socket in reach of `abort` from its first moment."""
        timeout = min(self._connect_timeout, max(deadline - time.monotonic(), 0.001))
        last: OSError = OSError("the host name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM
        ):
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._socket.settimeout(timeout)
                if self._aborted:
                    raise ConnectionAbortedError("closed")
                self._socket.connect(address)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.endpoint.tls is not None:
                    self._socket = self.endpoint.tls.wrap_socket(
                        self._socket, server_hostname=self.endpoint.host
                    )
            except OSError as error:
                self.close()
                last = error
            else:
                self._http.sock = self._socket
                return
        raise last

    def _limit_wait(self, deadline: float) -> None:
        """Let no single wait pass the progress timeout or the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        if self._socket is not None:
            self._socket.settimeout(min(left, self._progress_timeout))

    def _fill(self, response: http.client.HTTPResponse, body: memoryview, deadline: float) -> None:
        """Receive exactly `len(body)` bytes, straight from the socket into `body`."""
        received = 0
        while received < len(body):
            # One recv per turn: readinto() would loop inside and never look at the deadline.
            num_bytes = response.fp.readinto1(body[received:])
            if not num_bytes:
                raise errors.AnswerCorrupt(f"the body must have {len(body)} bytes, it ended after {received}")
            received += num_bytes
            self._limit_wait(deadline)
        response.close()

    def _error_answer(self, response: http.client.HTTPResponse) -> errors.ServerError:
        body = response.read(MAX_ERROR_BYTES)
        if not response.isclosed() or response.will_close:
            self.close()
        return wire.error_from_answer(response.status, response.headers, body)

    def _failed(self, error: Exception, *, stale: bool = False) -> errors.TransportError:
        self.close()
        if isinstance(error, TimeoutError):
            return errors.NoProgress(f"{self.endpoint.url}: nothing came in time ({error})")
        return errors.ConnectionFailed(f"{self.endpoint.url}: {type(error).__name__}: {error}", stale=stale)
