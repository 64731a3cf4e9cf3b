"""How the workers of a server share the connections that come to one socket.

All workers wait at the same listening socket, and the kernel wakes all of them. Whoever takes all that waits,
as event loops do by themselves, leaves nothing to the others: 12 to 14 of 16 connections that were opened at
once went to one of 8 workers. So each worker waits a little longer for each connection that it has, and
takes few at a time:

    connections of a worker    0       1       2       5       8       40
    waits, milliseconds        0       1       2       5       5       5
    then takes at most         1       1       1       1       2       10
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable
from typing import Final

from corpus_server.run.listening import BACKLOG

SECONDS_EACH: Final = 0.001
MOST_SECONDS: Final = 0.005
"""A worker waits for so long for each connection that it has, and no longer: far beyond what the processes of
an idle machine need to wake up, and little beside what a client needs to begin."""

PART_TAKEN: Final = 4
"""Of so many connections that a worker has it takes one more at a time, so that thousands need few turns."""

PAUSE_SECONDS: Final = 0.1
"""Until another try, where connections cannot be taken: mostly for want of descriptors."""

_log = logging.getLogger("corpus_server")


class Acceptor:
    """Takes connections of a listening socket from now on; for the event loop's thread.

    Args:
        listener: that is bound; closed by `close`.
        connect: makes the protocol of a connection.
        tls: of the connections.
        num_connections: how many connections the process has.
        shares: whether other processes wait at the same socket; else all that wait are taken at once.

    Attributes:
        taken_at: by the loop's clock, when the last connection was taken.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        num_connections: Callable[[], int],
        *,
        shares: bool,
    ) -> None:
        self._listener, self._connect, self._tls = listener, connect, tls
        self._num_connections, self._shares = num_connections, shares
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._fails = False
        self.taken_at = -math.inf
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._come)

    def hurry(self) -> None:
        """Leave nothing to other processes: the socket is about to be closed."""
        self._shares = False

    def close(self) -> None:
        """Take no more, and close the socket; idempotent."""
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()
        self._listener.close()

    @property
    def _number(self) -> int:
        return self._num_connections() + len(self._opening)

    def _come(self) -> None:
        """Take connections, or let others take them first."""
        seconds = min(self._number * SECONDS_EACH, MOST_SECONDS) if self._shares else 0.0
        if seconds:
            self._wait(seconds)
        else:
            self._take()

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._take_again)

    def _take_again(self) -> None:
        self._loop.add_reader(self._listener, self._come)
        self._take()

    def _take(self) -> None:
        """Take connections that wait, if others have left some."""
        for _ in range(max(1, self._number // PART_TAKEN) if self._shares else BACKLOG):
            try:
                taken, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # the client has left
                continue
            except OSError as error:
                if not self._fails:
                    _log.error("connections cannot be taken: %s", error.strerror)
                self._fails = True
                self._wait(PAUSE_SECONDS)
                return
            self._fails = False
            self.taken_at = self._loop.time()
            taken.setblocking(False)
            task = self._loop.create_task(self._open(taken))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, taken: socket.socket) -> None:
        """Begin a connection; one whose handshake fails is closed."""
        with contextlib.suppress(OSError):  # of TLS, too
            await self._loop.connect_accepted_socket(self._connect, taken, ssl=self._tls)
