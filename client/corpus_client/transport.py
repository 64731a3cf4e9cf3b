"""One HTTP connection that fills a buffer it is handed: no copy in Python, no torch.

Sending and receiving are two calls, so that one thread keeps several requests on the wire: it sends the
next one before it reads the answer to the one before it (pipelining, RFC 9112, 9.3.2). The server
answers them in order, each from end to end, and is never without work.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import xxhash

from corpus_client import errors, heads, wire
from corpus_client.attribution import Stopwatch
from corpus_client.endpoint import Endpoint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_ERROR_BYTES = 65_536

HEAD_PIECE_BYTES = 2048
"""Most heads; what comes with them of the body is copied once more."""

PIECE_BYTES = 512 * 1024
"""What is received at once stays in the processor's cache until it is hashed."""


class Connection:
    """One keep-alive connection; answers come in the order of the requests.

    Everything but `abort` belongs to one thread. After any error but `ServerError` the connection is
    closed, for good, and what else was on it is lost.

    Attributes:
        num_waiting: requests whose answers were not received yet.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_seconds: float = 10.0,
        progress_timeout_seconds: float = 30.0,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._stopwatch = stopwatch if stopwatch is not None else Stopwatch()
        self.endpoint = endpoint
        self._request_lines = heads.request_lines(endpoint.authority, headers or {})
        self._connect_timeout = connect_timeout_seconds
        self._progress_timeout = progress_timeout_seconds
        self._wait_seconds = 0.0
        self._socket: socket.socket | None = None
        self._num_answers = 0
        self._surplus = b""  # of the next answer: it came with the end of the one before
        self._closed = False
        self.num_waiting = 0

    @property
    def usable(self) -> bool:
        """Whether it can carry requests, and their answers; it is opened by the first one."""
        return not self._closed

    def send(self, path: str, *, deadline: float) -> None:
        """Put a GET for `path` on the wire; `deadline` is in `time.monotonic` seconds."""
        request = heads.request_line(self.endpoint.prefix + path) + self._request_lines
        try:
            if self._socket is None:
                self._open(deadline)
            self._limit_wait(deadline)
            self._open_socket.sendall(request)
        except OSError as error:
            raise self._failed(error) from error
        self.num_waiting += 1

    def receive_into(
        self, buffer: memoryview, request: wire.ArrayRequest, *, deadline: float
    ) -> wire.Headers:
        """Receive the answer to the oldest request that has none.

        Args:
            buffer: at least `request.num_bytes` writable bytes; the array lies at its start afterwards.
                After an error its content is undefined.
            request: what the answer must be; status, headers, length and checksum are checked.
            deadline: `time.monotonic` seconds; no wait goes beyond it.

        Returns:
            The answer's headers.
        """
        self._stopwatch.enter("answer")
        self.num_waiting -= 1
        head = b""
        try:
            head, rest = self._receive_head(deadline)
            headers = heads.good_answer(head)
            if headers is None:
                raise self._error_answer(head + rest)
            self._stopwatch.enter("receive", server_seconds=wire.server_seconds(headers))
            wire.check_headers(headers, request)
            length = request.num_bytes + (wire.TAIL_BYTES if request.verify else 0)
            rest, self._surplus = rest[:length], rest[length:]
            if self._surplus and not self.num_waiting:
                raise errors.AnswerCorrupt(f"the body must end after {length} bytes, more came")
            self._receive_body(buffer[: request.num_bytes], rest, deadline, verify=request.verify)
            self._stopwatch.enter("host")
        except errors.AnswerCorrupt as error:
            self.close()
            raise errors.AnswerCorrupt(f"{self.endpoint.url}: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            # stale: nothing came, and it had served before; the server closed it while idle.
            raise self._failed(error, stale=not head and self._num_answers > 0) from error
        self._num_answers += 1
        if "close" in (headers.get("Connection") or "").lower():
            self.close()
        return headers

    def abort(self) -> None:
        """Wake the thread that uses the connection; from any thread, for good."""
        self._closed = True
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):  # it may not be connected any more
                # The base class's method: SSLSocket.shutdown takes the TLS state from under the reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; idempotent."""
        self._closed = True
        self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open(self, deadline: float) -> None:
        """Connect, with the socket in reach of `abort` from its first moment."""
        timeout = min(self._connect_timeout, max(deadline - time.monotonic(), 0.001))
        last: OSError = OSError("the host name has no address")
        for family, kind, protocol, address in self.endpoint.addresses():
            self._socket = socket.socket(family, kind, protocol)
            try:
                self._socket.settimeout(timeout)
                if self._closed:
                    raise ConnectionAbortedError("closed")
                self._socket.connect(address)
                if family != socket.AF_UNIX:
                    self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.endpoint.tls is not None:
                    self._socket = self.endpoint.tls.wrap_socket(
                        self._socket, server_hostname=self.endpoint.host
                    )
            except OSError as error:
                self._close_socket()
                last = error
            else:
                return
        raise last

    @property
    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionAbortedError("closed")
        return self._socket

    @property
    def _fills_whole(self) -> bool:
        """Whether the kernel fills a buffer in one call, and limits its own waits."""
        return self.endpoint.tls is None and sys.platform != "win32"

    def _limit_wait(self, deadline: float) -> None:
        """Let no single wait pass the progress timeout or the deadline."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        seconds = min(left, self._progress_timeout)
        if 0.9 * seconds <= self._wait_seconds <= 1.05 * seconds:
            return  # near enough; setting it anew costs as much as receiving
        self._wait_seconds = seconds
        if self._fills_whole:
            whole, part = divmod(seconds, 1.0)
            limit = struct.pack("ll", int(whole), max(int(part * 1e6), 1))  # a zero would mean for ever
            self._open_socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._open_socket.setsockopt(socket.SOL_SOCKET, option, limit)
        else:
            self._open_socket.settimeout(seconds)

    def _receive(self, part: memoryview, flags: int = 0) -> int:
        """Receive something at the start of `part`; return the number of bytes, 0 at the end."""
        try:
            return self._open_socket.recv_into(part, 0, flags)
        except BlockingIOError:
            raise TimeoutError("timed out") from None

    def _receive_head(self, deadline: float) -> tuple[bytes, bytes]:
        """The head of an answer, and what came with it of the body."""
        received, self._surplus = bytearray(self._surplus), b""
        part = memoryview(bytearray(HEAD_PIECE_BYTES))
        while (end := received.find(heads.END)) < 0:
            if len(received) > heads.MAX_BYTES:
                raise errors.AnswerCorrupt(f"the head must have at most {heads.MAX_BYTES} bytes")
            self._limit_wait(deadline)
            num_bytes = self._receive(part)
            if not num_bytes:
                raise http.client.RemoteDisconnected(
                    f"closed connection after {len(received)} bytes of the answer's head"
                )
            received += part[:num_bytes]
        end += len(heads.END)
        return bytes(received[:end]), bytes(received[end:])

    def _receive_body(self, array: memoryview, rest: bytes, deadline: float, *, verify: bool) -> None:
        """Receive exactly `len(array)` bytes, of which `rest` came already, and their checksum."""
        size = len(array)
        array[: min(len(rest), size)] = rest[:size]
        digest = xxhash.xxh3_64(rest[:size])
        self._fill(array, len(rest[:size]), deadline, digest if verify else None)
        if verify:
            tail = memoryview(bytearray(rest[size:].ljust(wire.TAIL_BYTES, b"\0")))
            self._fill(tail, len(rest[size:]), deadline)
            wire.check_tail(digest, bytes(tail))

    def _fill(
        self, part: memoryview, received: int, deadline: float, digest: xxhash.xxh3_64 | None = None
    ) -> None:
        """Receive from `received` to the end of `part`, straight from the socket; hash it as it comes."""
        flags = socket.MSG_WAITALL if self._fills_whole else 0
        while received < len(part):
            self._limit_wait(deadline)
            num_bytes = self._receive(part[received : received + PIECE_BYTES], flags)
            if not num_bytes:
                raise errors.AnswerCorrupt(
                    f"the body must have {len(part)} bytes here, it ended after {received}"
                )
            if digest is not None:
                digest.update(part[received : received + num_bytes])
            received += num_bytes

    def _error_answer(self, received: bytes) -> errors.ServerError:
        """What an answer other than 200 says, read to its end by the standard library, or farther."""
        with http.client.HTTPResponse(_Replayed(received, self._open_socket), method="GET") as response:  # type: ignore[arg-type]
            response.begin()
            body = response.read(MAX_ERROR_BYTES)
            if not response.isclosed() or response.will_close or self.num_waiting:
                self.close()
        return wire.error_from_answer(response.status, response.headers, body)

    def _failed(self, error: Exception, *, stale: bool = False) -> errors.TransportError:
        self.close()
        if isinstance(error, TimeoutError):
            return errors.NoProgress(f"{self.endpoint.url}: nothing came in time ({error})")
        return errors.ConnectionFailed(f"{self.endpoint.url}: {type(error).__name__}: {error}", stale=stale)


class _Replayed(io.RawIOBase):
    """A socket as the standard library reads it, with what was received already in front."""

    def __init__(self, received: bytes, rest: socket.socket) -> None:
        self._received = memoryview(received)
        self._rest = rest

    def makefile(self, mode: str) -> io.BufferedReader:
        """As a socket's."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, part: WriteableBuffer, /) -> int:
        """Read something."""
        view = memoryview(part).cast("B")
        if not self._received:
            return self._rest.recv_into(view)
        num_bytes = min(len(view), len(self._received))
        view[:num_bytes] = self._received[:num_bytes]
        self._received = self._received[num_bytes:]
        return num_bytes
