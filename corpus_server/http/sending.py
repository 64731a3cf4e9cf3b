"""Write to a connection from a thread, past the event loop's transport.

The transport's own `write` copies into the kernel with the GIL held, up to megabytes at a time, and every
gather of the process waits for that long. `os.writev` releases the GIL, and saves a round trip to the loop.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence

from corpus_server.answers.response import Buffer, ClientLeft

UNIX_BUFFER_BYTES = 1 << 20
"""Bytes that the kernel takes at once on a Unix socket; its buffer does not grow by itself as TCP's does."""

_SO_SNDBUFFORCE = 32  # socket(7); Python does not name it


PATIENCE_SECONDS = 0.02
"""How long a thread waits for one reader before it leaves the rest to the loop. A fast reader has taken 8 MiB
in less than half of it."""


class Descriptor:
    """A second descriptor of a connection, for one thread; a context manager that closes it.

    The loop may close its own descriptor at any time, and the number would soon mean another file.
    """

    __slots__ = ("_number", "_patience")

    def __init__(self, number: int) -> None:
        self._number = -1
        self._number = os.dup(number)
        self._patience = PATIENCE_SECONDS

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *error: object) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    __del__ = __exit__

    def take(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Send until everything is taken or the reader falls behind; return what was not taken.

        Args:
            parts: buffers of single bytes.

        Raises:
            ClientLeft: the connection is closed.
        """
        began = time.monotonic()
        rest = _send(self._number, parts, began + self._patience)
        # The time for reading the disk, between two calls, does not count.
        self._patience -= time.monotonic() - began
        return rest


def _send(to: int, parts: Sequence[Buffer], until: float) -> Sequence[Buffer]:
    rest = parts
    while rest:
        try:
            rest = _without(rest, os.writev(to, rest))
        except BlockingIOError:
            if (seconds := until - time.monotonic()) <= 0:
                break
            poll = select.poll()
            poll.register(to, select.POLLOUT)
            if not poll.poll(seconds * 1000):
                break
        except OSError as error:
            raise ClientLeft("the connection is closed") from error
    return rest


def widen(connection: socket.socket) -> None:
    """Enlarge the send buffer of a Unix socket: 1.4 times the throughput at 64 x 1,025. TCP grows by itself.

    Goes up to `net.core.wmem_max` where the process may not exceed that.
    """
    if connection.family == socket.AF_UNIX:
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, UNIX_BUFFER_BYTES)
        except OSError:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)


def _without(parts: Sequence[Buffer], num_bytes: int) -> list[Buffer]:
    """Return what is left after the first `num_bytes` bytes."""
    left: list[Buffer] = []
    for part in parts:
        if num_bytes < len(part):
            left.append(memoryview(part)[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return left
