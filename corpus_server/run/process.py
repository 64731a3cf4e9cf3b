"""One worker process: what the supervisor hands to it, and the channel between them.

supervisor                                    worker
binds the sockets, starts a process     ->    reads its settings, opens the corpora, listens
the worker is ready                     <-    BEAT, then every second
restarts it when beats stop             <-    end of file: the process died
prints the reason once                  <-    text: why it cannot start
RETIRE, TERMINATE                       ->    completes what is in flight, exits
end of file: the supervisor died        ->    the same
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

from corpus_server.metrics import shared
from corpus_server.settings import Settings

BEAT = b"\0"
BEAT_SECONDS = 1.0
RETIRE = b"r"
"""Another worker has taken over: listen no longer, and let the clients close their connections."""
TERMINATE = b"t"
"""The server ends: say so at /readyz for a while, then listen no longer."""

EXIT_SECONDS = 5  # from the end of the channel to the end of the process
WORKER_MODULE = "corpus_server.run.worker"

_SUPERVISED_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class WorkerProcess:
    """A worker process and the channel to it.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, sockets: list[socket.socket], settings: Settings, metrics_folder: Path) -> None:
        environment = {
            **os.environ,
            shared.FOLDER_VARIABLE: str(metrics_folder),
            # One heap for all threads. With one each, as glibc gives them, a worker takes 83 MiB, not 72,
            # after an hour of mixed load, and goes on growing while pieces reach ever more of these heaps.
            "MALLOC_ARENA_MAX": "1",
            # With `-P`: workers import from where this process did, and not from the current folder.
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        }
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        try:
            # The settings are a file in memory: an environment variable holds 128 KiB, about 700 corpora.
            with theirs, open(os.memfd_create("settings"), "w+b") as file:  # noqa: PTH123
                pickle.dump(settings, file)
                file.seek(0)
                handed = [theirs.fileno(), file.fileno(), *(each.fileno() for each in sockets)]
                command = [sys.executable, "-P", "-m", WORKER_MODULE, *map(str, handed)]
                # The worker inherits the mask: Ctrl+C and systemd signal the whole group, but only the
                # supervisor decides when a worker ends.
                signal.pthread_sigmask(signal.SIG_BLOCK, _SUPERVISED_SIGNALS)
                try:
                    self._process = subprocess.Popen(command, pass_fds=handed, env=environment)
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SUPERVISED_SIGNALS)
        except BaseException:
            self._channel.close()
            raise
        self.pid = self._process.pid
        self.kill = self._process.kill

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
