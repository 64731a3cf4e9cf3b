"""One worker process, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from corpus_server.run.common import settings_file
from corpus_server.settings import Settings

EXIT_SECONDS = 5  # from the end of the channel to the end of the process
WORKER_MODULE = "corpus_server.run.worker"

SUPERVISED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class WorkerProcess:
    """A worker process and the channel to it.

    Args:
        sockets: where it listens.
        environment: its environment variables.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self, sockets: list[socket.socket], settings: Settings, environment: Mapping[str, str]
    ) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            with theirs, settings_file(settings) as file:
                handed = [theirs.fileno(), file.fileno(), *(each.fileno() for each in sockets)]
                command = [sys.executable, "-P", "-m", WORKER_MODULE, *map(str, handed)]
                # The worker inherits the mask: Ctrl+C and systemd signal the whole group, but only the
                # supervisor decides when a worker ends.
                signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISED_SIGNALS)
                try:
                    self._process = subprocess.Popen(command, pass_fds=handed, env=environment)
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISED_SIGNALS)
        except BaseException:
            self._channel.close()
            raise
        self.pid = self._process.pid

    async def hear(self, seconds: int) -> bytes:
        """Wait for a message; b"": the process ended, or was killed since none came for so many seconds."""
        # One reading for all the seconds: a timeout would cancel it, and a beat that comes in that moment
        # would be lost. Both come every second, so the same would happen to the next thirty.
        receiving = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(self._channel, 65536))
        # Counted second by second: a supervisor that was stopped for a minute must not take that for silence.
        for _ in range(seconds):
            await asyncio.wait({receiving}, timeout=1)
            if receiving.done():
                with contextlib.suppress(OSError):
                    return receiving.result()
                return b""
        receiving.cancel()
        self.kill()
        return b""

    def tell(self, command: bytes) -> None:
        """Send a command; a process that has ended misses it."""
        with contextlib.suppress(OSError):
            self._channel.send(command)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def reap(self) -> int:
        """Wait for the process to end and kill it if need be; return its exit code, negative for a signal."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + EXIT_SECONDS
        while (code := self._process.poll()) is None:
            if loop.time() > deadline:
                self.kill()
            await asyncio.sleep(0.01)
        self._channel.close()
        return code


def name_of_end(code: int) -> str:
    """Return what ended a process, as people read it: `2`, `SIGKILL`, `signal 35`."""
    try:
        return signal.Signals(-code).name if code < 0 else str(code)
    except ValueError:  # Python names no real-time signals but the first and the last
        return f"signal {-code}"
