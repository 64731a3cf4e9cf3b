"""One HTTP connection that fills a buffer it is handed: no copy in Python, no torch.

Sending and receiving are two calls, so that one thread keeps several requests on the wire: it sends the
next one before it reads the response to the one before it (pipelining, RFC 9112, 9.3.2). The server
answers them in order, each from end to end, and is never without work.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from corpus_client import errors
from corpus_client.network import wire
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import TRAINED_STEP_HEADER, Network
from corpus_client.observe.recorder import Recorder
from corpus_client.observe.telemetry import SentRequest

MAX_ERROR_BYTES = 65_536

HEAD_PIECE_BYTES = 2048
"""Most heads fit; what comes with them of the body is copied once more."""

PIECE_BYTES = 512 * 1024
"""What is received at once stays in the processor's cache until it is hashed."""

LOOK_SECONDS = 1.0
"""After which a silent response makes `Connection` ask how much longer to wait."""

KEEP_ALIVE_SECONDS = 15
"""Idle time before TCP probes the peer; firewalls forget a silent connection after a few minutes."""

KEEP_ALIVE: list[tuple[int, int, int]] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):
    KEEP_ALIVE += [
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]


Buffer = memoryview | Callable[[int], memoryview]
"""Where an array is received: memory, or what gives so many bytes of it."""


class Connection:
    """One keep-alive connection; responses come in the order of the requests.

    Everything but `abort` belongs to one thread at a time. After any error but `ServerError` the connection
    is closed, for good, and what else was on it is lost.

    `num_in_flight` is the pool's, under its lock: while it is not 0, a thread uses the connection.
    """

    def __init__(
        self, endpoint: Endpoint, network: Network | None = None, *, recorder: Recorder | None = None
    ) -> None:
        self.endpoint = endpoint
        self._network = network if network is not None else Network()
        self._recorder = recorder or Recorder()
        headers = {"Host": endpoint.authority, "Accept-Encoding": "identity", **self._network.headers}
        self._header_lines = wire.header_lines(headers)  # of every request
        self._look_seconds = min(LOOK_SECONDS, self._network.progress_seconds)
        self._patience: Callable[[], float]  # returns the longest wait for the next byte
        # By the kernel in one call, which also limits its waits; Windows has other units and errors for that.
        self._fills_whole = endpoint.tls is None and sys.platform != "win32"
        self._wait_seconds = 0.0
        self._socket: socket.socket | None = None
        self._num_responses = 0
        self._received = bytearray()  # of the next response: it came with the one before
        self.usable = True  # opened by the first request
        self.num_in_flight = 0
        self._id_prefix, self._num_named = secrets.token_hex(6), 0
        self._sent: deque[SentRequest] = deque()  # oldest first

    def open(self, deadline: float) -> None:
        """Connect to the endpoint's address; `deadline` is in `time.monotonic` seconds."""
        endpoint = self.endpoint
        assert endpoint.address is not None
        family, address = endpoint.address
        try:
            # In reach of `abort` from its first moment.
            self._socket = sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(min(self._network.connect_seconds, max(deadline - time.monotonic(), 0.001)))
            if not self.usable:
                raise ConnectionAbortedError("closed")
            sock.connect(address)
            if endpoint.socket_path is None:
                for option in (*KEEP_ALIVE, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)):
                    sock.setsockopt(*option)
            if self._fills_whole:
                sock.settimeout(None)
                limit = _timeval(self._network.connect_seconds)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            elif endpoint.tls is not None:
                self._socket = endpoint.tls.wrap_socket(sock, server_hostname=endpoint.host)
        except OSError as error:
            raise self._failed(error) from error

    def send(self, path: str, *, deadline: float) -> None:
        """Put a GET for `path` on the wire; `deadline` is in `time.monotonic` seconds."""
        head = wire.request_line(self.endpoint.prefix + path) + self._header_lines
        if (authorization := self._network.credentials.header()) is not None:
            head += wire.header_lines({"Authorization": authorization})
        try:
            if self._socket is None:
                self.open(deadline)
            self._limit_wait(deadline)
            self._num_named += 1
            sent = SentRequest(self.endpoint.name, "GET", path, f"{self._id_prefix}-{self._num_named}")
            self._sent.append(sent)
            more = sent.headers()
            if (step := self._recorder.yielded_step) is not None:
                more[TRAINED_STEP_HEADER] = str(step)
            self._open_socket.sendall(head + wire.header_lines(more) + b"\r\n")
        except OSError as error:
            raise self._failed(error, stale=self._num_responses > 0) from error

    def arrived(self) -> bool:
        """Return whether something came: of the next response, or the connection's end; never block."""
        return first_arrived([self], 0.0) is not None

    def receive_into(
        self,
        buffer: Buffer,
        request: wire.ArrayRequest,
        *,
        deadline: float,
        patience: Callable[[], float] | None = None,
    ) -> wire.Headers:
        """Receive the response to the oldest request that has none, and check it; return its headers.

        Args:
            buffer: at least `request.num_bytes` writable bytes; the array lies at its start afterwards.
                After an error its content is undefined. A request that is not exact needs a function.
            deadline: `time.monotonic` seconds; no wait goes beyond it.
            patience: returns the longest wait for the next byte, instead of the network's; asked again
                every second, as it may change meanwhile.
        """
        self._patience = patience or (lambda: self._network.progress_seconds)
        sent = self._sent.popleft()
        silent = True
        try:
            with sent:
                head = self._receive_head(deadline)
                silent = False
                while head.startswith(wire.INFORMATIONAL):
                    head = self._receive_head(deadline)
                status, headers = wire.read_head(head)
                if status != 200:
                    raise self._error_response(status, headers, deadline)
                staging_seconds = wire.server_seconds(headers, wire.STAGING_SECONDS)
                server_seconds = wire.server_seconds(headers)
                self._recorder.enter(
                    "receive", server_seconds=server_seconds, staging_seconds=staging_seconds
                )
                wire.check_headers(headers, request)
                digest = xxhash.xxh3_64() if request.verify else None
                num_bytes = wire.array_bytes(headers, request)
                self._fill(buffer(num_bytes) if callable(buffer) else buffer[:num_bytes], deadline, digest)
                if digest is not None:
                    tail = bytearray(wire.TAIL_BYTES)
                    self._fill(memoryview(tail), deadline)
                    wire.check_tail(digest, bytes(tail))
                if self._received and not self._sent:
                    raise errors.ResponseCorrupt("the body must end where the headers say, more came")
                self._recorder.enter("host")
        except errors.ResponseCorrupt as error:
            self.close()
            raise errors.ResponseCorrupt(f"{self.endpoint.name}: {error}; request {sent.id}") from error
        except OSError as error:
            # stale: nothing came, and it had served before; the server closed it while idle.
            stale = silent and self._num_responses > 0
            raise self._failed(error, stale=stale, request_id=sent.id) from error
        self._num_responses += 1
        self._close_if_asked(headers)
        return headers

    def give_up(self) -> errors.CorpusClientError:
        """Close it, because the oldest request gets no response in time; return that as an error."""
        return self._failed(TimeoutError("timed out"), request_id=self._sent[0].id)

    def abort(self) -> None:
        """Wake the thread that uses the connection; from any thread, for good."""
        self.usable = False
        if (sock := self._socket) is not None:
            with contextlib.suppress(OSError):  # it may not be connected any more
                # The base class's method: SSLSocket.shutdown takes the TLS state from under the reader.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; idempotent."""
        self.usable = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        while self._sent:  # their responses will not be read
            self._sent.popleft().end(ConnectionAbortedError())

    @property
    def _holds_some(self) -> bool:
        """Whether some of the next response was taken from the kernel already."""
        sock = self._socket
        return bool(self._received or (isinstance(sock, ssl.SSLSocket) and sock.pending()))

    def _close_if_asked(self, headers: wire.Headers) -> None:
        if "close" in headers.get("connection", "").lower():
            self.close()

    @property
    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionAbortedError("closed")
        return self._socket

    def _limit_wait(self, deadline: float) -> None:
        """Let no single wait pass the deadline, or the time after which `_receive` looks around."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for this attempt is over")
        seconds = min(left, self._look_seconds)
        if seconds == self._wait_seconds:
            return
        self._wait_seconds = seconds
        if self._fills_whole:
            self._open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        else:
            self._open_socket.settimeout(seconds)

    def _receive(self, part: memoryview, deadline: float, flags: int = 0) -> int:
        """Receive something at the start of `part`; return the number of bytes, 0 at the end."""
        since = time.monotonic()
        while True:
            self._limit_wait(deadline)
            try:
                return self._open_socket.recv_into(part, 0, flags)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() - since >= self._patience():
                    raise TimeoutError("timed out") from None

    def _receive_head(self, deadline: float) -> bytes:
        """Receive the head of a response; what came with it of the body stays in `_received`."""
        part = memoryview(bytearray(HEAD_PIECE_BYTES))
        while (end := self._received.find(wire.HEAD_END)) < 0:
            if len(self._received) > wire.MAX_HEAD_BYTES:
                raise errors.ResponseCorrupt(f"the head must have at most {wire.MAX_HEAD_BYTES} bytes")
            num_bytes = self._receive(part, deadline)
            if not num_bytes:
                raise ConnectionResetError(
                    f"closed connection after {len(self._received)} bytes of the response's head"
                )
            self._received += part[:num_bytes]
        return self._take(end + len(wire.HEAD_END))

    def _take(self, max_bytes: int) -> bytes:
        """Remove and return up to `max_bytes` bytes of what was received already."""
        taken = bytes(self._received[:max_bytes])
        del self._received[:max_bytes]
        return taken

    def _fill(self, part: memoryview, deadline: float, digest: xxhash.xxh3_64 | None = None) -> None:
        """Receive exactly `len(part)` bytes, straight from the socket; hash them as they come."""
        early = self._take(len(part))
        received = len(early)
        part[:received] = early
        if digest is not None:
            digest.update(early)
        flags = socket.MSG_WAITALL if self._fills_whole else 0
        while received < len(part):
            num_bytes = self._receive(part[received : received + PIECE_BYTES], deadline, flags)
            if not num_bytes:
                raise errors.ResponseCorrupt(
                    f"the body must have {len(part)} bytes here, it ended after {received}"
                )
            if digest is not None:
                digest.update(part[received : received + num_bytes])
            received += num_bytes

    def _error_response(self, status: int, headers: wire.Headers, deadline: float) -> errors.ServerError:
        """Receive the rest of a response other than 200; return the error that it stands for.

        The connection goes on only if the body has a plain length and nothing else is on the wire: a server
        that failed may have answered the next request out of turn.
        """
        length = headers.get("content-length", "")
        num_bytes = int(length) if length.isascii() and length.isdigit() else -1
        body = memoryview(bytearray(min(max(num_bytes, 0), MAX_ERROR_BYTES)))
        self._fill(body, deadline)
        self._close_if_asked(headers)
        if num_bytes != len(body) or self._sent:
            self.close()
        return wire.error_from_response(status, headers, bytes(body))

    def _failed(self, error: OSError, **told: Any) -> errors.CorpusClientError:
        self.close()
        return failure(self.endpoint, error, **told)


def first_arrived(connections: Sequence[Connection], seconds: float) -> Connection | None:
    """Return one on which something came, of its next response or its end; None: not within `seconds`."""
    held = next((each for each in connections if each._holds_some), None)
    if held is not None:
        return held
    # Windows has no poll. `select` takes no descriptor above 1,023, and epoll takes one more.
    with getattr(selectors, "PollSelector", selectors.SelectSelector)() as selector:
        for each in connections:
            selector.register(each._open_socket, selectors.EVENT_READ, each)
        came = selector.select(seconds)
    return came[0][0].data if came else None


def failure(
    endpoint: Endpoint, error: Exception, *, stale: bool = False, request_id: str = ""
) -> errors.CorpusClientError:
    """Return what an error of a connection means: whether asking again can help, and there or elsewhere."""
    named = f"; request {request_id}" if request_id else ""
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if "CERT" in reason or "UNKNOWN_CA" in reason:
        return errors.CertificateRefused(f"{endpoint.name}: {error}")
    if reason == "WRONG_VERSION_NUMBER":
        return errors.ReplicaUnusable(
            f"{endpoint.name}: the server does not speak TLS; does its URL begin with http://?"
        )
    if isinstance(error, TimeoutError):
        return errors.NoProgress(f"{endpoint.name}: nothing came in time ({error}){named}")
    why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return errors.ConnectionFailed(f"{endpoint.name}: {why}{named}", stale=stale)


def _timeval(seconds: float) -> bytes:
    """Return the time as socket options have it, where zero would mean for ever."""
    whole, part = divmod(seconds, 1.0)
    return struct.pack("ll", int(whole), max(int(part * 1e6), 1))
