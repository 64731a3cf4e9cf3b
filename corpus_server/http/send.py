"""How threads send to a connection, past the event loop's transport.

The transport's own `write` copies into the kernel with the GIL held, up to megabytes at a time, and every
gather of the process waits for that long. `writev` releases the GIL.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Sequence

from corpus_server.responses.response import Buffer
from corpus_server.work import ClientLeft

UNIX_BUFFER_BYTES = 1 << 20
"""Bytes that the kernel takes at once on a Unix socket; its buffer does not grow by itself as TCP's does."""

_SO_SNDBUFFORCE = 32  # socket(7); Python does not name it


def writable(transport: asyncio.Transport) -> int | None:
    """Return a second descriptor of a connection, for threads; None if there is no descriptor left.

    The loop may close its own descriptor at any time, and the number would soon mean another file.
    """
    try:
        return os.dup(transport.get_extra_info("socket").fileno())
    except OSError:
        return None


def write(to: int, parts: Sequence[Buffer], seconds: float) -> Sequence[Buffer]:
    """Send until everything is taken or the reader falls behind; return what was not taken.

    Args:
        to: descriptor that does not block.
        parts: buffers of single bytes.
        seconds: to wait for the reader; below zero: what it takes at once is sent all the same.

    Raises:
        ClientLeft: the connection is closed.
    """
    until = time.monotonic() + seconds
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


def _without(parts: Sequence[Buffer], num_bytes: int) -> list[Buffer]:
    """Return what is left after the first `num_bytes` bytes."""
    left: list[Buffer] = []
    for part in parts:
        if num_bytes < len(part):
            left.append(memoryview(part)[num_bytes:])
        num_bytes = max(0, num_bytes - len(part))
    return left


def widen(connection: socket.socket) -> None:
    """Enlarge the send buffer of a Unix socket: 1.4 times the throughput at 64 x 1,025. TCP grows by itself.

    Goes up to `net.core.wmem_max` where the process may not exceed that.
    """
    if connection.family == socket.AF_UNIX:
        try:
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, UNIX_BUFFER_BYTES)
        except OSError:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
