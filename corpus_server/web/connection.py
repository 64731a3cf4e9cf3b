"""The connection beneath an answer, written to by the thread that read the tokens.

The event loop's own `write` copies into the kernel with the GIL held, up to megabytes at a time, and
keeps every gather of the process waiting for as long. A thread releases it, and saves the way back.

    gather thread                     loop thread
    read, hash, send for PATIENCE
    still not all taken         ->    write the rest, wait until the kernel has it
    read, send the next piece   <-

So a slow reader costs no thread, only the loop's attention, and memory for one piece.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Sequence

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

PATIENCE_SECONDS = 0.02
"""How long a thread waits for one reader. A fast one has taken 8 MiB in less than half of it."""

UNIX_BUFFER_BYTES = 1 << 20

_SO_SNDBUFFORCE = 32  # socket(7), for who may administer the network; Python does not name it
_EXTENSION = "corpus_server.connection"


class ReaderGone(Exception):
    """Whoever asked has hung up, or takes nothing any more.

    Args:
        stalled: the latter.
    """

    def __init__(self, message: str, *, stalled: bool = False) -> None:
        super().__init__(message)
        self.stalled = stalled


class Descriptor:
    """A second descriptor of an open socket that does not block; closed when nobody holds it any more."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = -1
        self.number = os.dup(number)

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()  # at once: an error keeps its frames, and what they hold, for a while

    def close(self) -> None:
        """Close it; idempotent."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    __del__ = close


class Connection:
    """One answer's use of its connection.

    Args:
        protocol: uvicorn's, of the connection.
        text: the head of the request as it came; something else if it did not come in one piece.

    Attributes:
        text: as given.
        cycle: uvicorn's, of the request; None while one that was recognised by its text needs none.
        sent_bytes: of an answer's body that went past uvicorn.
    """

    def __init__(self, protocol: HttpToolsProtocol, text: bytes) -> None:
        self._protocol = protocol
        self.text = text
        self.cycle: RequestResponseCycle | None = None
        self.sent_bytes = 0

    def attach(self, scope: Scope) -> None:
        """Let the application find it."""
        scope["extensions"] = {_EXTENSION: self}

    def head(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """Return status line and headers of a good answer, as uvicorn would send them."""
        return self.head_of(b"".join([name + b": " + value + b"\r\n" for name, value in headers]))

    def head_of(self, lines: bytes) -> bytes:
        """Return the same for headers that are lines already."""
        headers = self._protocol.server_state.default_headers
        more = b"".join([name + b": " + value + b"\r\n" for name, value in headers])
        stays = self.cycle is None or self.cycle.keep_alive
        end = b"\r\n" if stays else b"connection: close\r\n\r\n"
        return b"HTTP/1.1 200 OK\r\n" + more + lines + end

    def open(self) -> Descriptor:
        """Return the connection for one thread, which closes it.

        The loop may close its own descriptor at any time, whose number would then soon mean another file.

        Raises:
            ReaderGone: the connection is closed already.
        """
        self._check_open()
        return Descriptor(self._protocol.transport.get_extra_info("socket").fileno())

    async def push(self, parts: Sequence[bytes | memoryview], timeout_seconds: float) -> None:
        """Send from the loop; return when the kernel has everything that was ever written.

        Raises:
            ReaderGone: nothing was taken for `timeout_seconds`, or the connection was closed.
        """
        transport, flow = self._protocol.transport, self._protocol.flow
        self._check_open()
        for part in parts:
            transport.write(part)
        while left := transport.get_write_buffer_size():
            try:
                async with asyncio.timeout(timeout_seconds):
                    await flow.drain()
            except TimeoutError:
                if transport.get_write_buffer_size() == left:
                    address = ":".join(map(str, self._protocol.client or ("unknown",)))
                    raise ReaderGone(
                        f"took nothing for {timeout_seconds:g} s: {address}", stalled=True
                    ) from None
            self._check_open()

    def _check_open(self) -> None:
        gone = self.cycle is not None and self.cycle.disconnected
        if gone or self._protocol.transport.is_closing():
            raise ReaderGone("hung up")

    def complete(self) -> None:
        """Do what uvicorn does after the last byte of an answer: go on to the next request."""
        cycle = self.cycle
        if cycle is None:
            self._protocol.on_response_complete()
            return
        if cycle.disconnected:
            return
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self._protocol.transport.close()
        cycle.on_response()

    def cut(self) -> None:
        """Cut the connection, whatever its reader does."""
        self._protocol.transport.abort()

    async def abort(self) -> None:
        """Cut it, and return when uvicorn has heard of that, and misses no rest of the answer."""
        self.cut()
        await asyncio.sleep(0)


def widen(connection: socket.socket) -> None:
    """Let the kernel take a megabyte at a time from a Unix socket, whose buffer does not grow by itself.

    As much as `net.core.wmem_max` allows where that is not ours to exceed.
    """
    if connection.family == socket.AF_UNIX:
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, UNIX_BUFFER_BYTES)
        except OSError:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)


def connection_of(scope: Scope) -> Connection | None:
    """Return the connection of a request; None: under another server's protocol."""
    connection: Connection | None = (scope.get("extensions") or {}).get(_EXTENSION)
    return connection


def send(to: Descriptor, parts: Sequence[bytes | memoryview], until: float) -> Sequence[bytes | memoryview]:
    """Send until the `time.monotonic` second `until`; return what was not taken.

    Args:
        to: is left open.
        parts: of single bytes each.

    Raises:
        ReaderGone: the connection is closed.
    """
    rest = parts
    while rest:
        try:
            rest = _without(rest, os.writev(to.number, rest))
        except BlockingIOError:
            if not _wait_writable(to, until - time.monotonic()):
                break
        except OSError as error:
            raise ReaderGone("hung up") from error
    return rest


def _without(parts: Sequence[bytes | memoryview], num_bytes: int) -> list[bytes | memoryview]:
    """Return what is left after the first `num_bytes` bytes."""
    left: list[bytes | memoryview] = []
    for part in parts:
        if num_bytes < len(part):
            left.append(memoryview(part)[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return left


def _wait_writable(to: Descriptor, seconds: float) -> bool:
    if seconds <= 0:
        return False
    waiting = select.poll()
    waiting.register(to.number, select.POLLOUT)
    return bool(waiting.poll(seconds * 1e3))
