"""The processes below the supervisor: the template, and the workers that are copies of it.

supervisor                        template                        worker
starts the template          ->   imports everything
binds the sockets
asks for a worker            ->   forks                      ->   sends its process id; reads its settings,
                                                                  opens the corpora, listens
the worker is ready          <-   ---------------------------     BEAT, then every second
replaces it when beats stop  <-   ---------------------------     end of file: the process ended
prints the reason once       <-   ---------------------------     text: why it cannot start
RETIRE, TERMINATE            ---------------------------     ->   completes what is in flight, exits
end of file: the supervisor ended, so do the template and the workers
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corpus_server.settings import Settings

PID: Final = b"p"
"""What the first message of a worker begins with; its process id follows."""
BEAT: Final = b"\0"
BEAT_SECONDS: Final = 1.0
RETIRE: Final = b"r"
"""Another worker has taken over: listen no longer, and let the clients close their connections."""
TERMINATE: Final = b"t"
"""The server ends: say so at /readyz for a while, then listen no longer."""

EXIT_SECONDS = 5  # from the end of the channel to the end of the process
KILL_SECONDS: Final = 1.0  # from SIGKILL to the end of the process
IMPORT_SECONDS: Final = 120  # until a new template has forked a worker; a cold network disk takes a minute
FORK_SECONDS: Final = 2  # the same of a template that has imported everything: it takes 0.01 s
MAX_MESSAGE_BYTES: Final = 65536
LATE_SECONDS: Final = 0.5  # a supervisor that wakes so late was not given the CPU, and others neither
MAX_DESCRIPTORS: Final = 253  # of one message (SCM_MAX_FD of the kernel)
TEMPLATE_MODULE = "corpus_server.run.template"

_OF_THE_PROCESSOR = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
    signal.SIGABRT,
}
"""Errors of the program, which would fail at the same instruction again; SIGABRT asks for a core file."""

_HARMLESS = {
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGPIPE, signal.SIGXFSZ),  # Python ignores them
}
"""Their default does not end a process."""

ENDING_SIGNALS: Final = (
    signal.valid_signals() - _OF_THE_PROCESSOR - _HARMLESS - {signal.SIGKILL, signal.SIGHUP}
)
"""All that end a process by default and can be heeded; SIGHUP has a meaning of its own."""

_PR_SET_NAME = 15  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def name_process(name: str) -> None:
    """Name this process, for `ps -o comm` and `top`, in at most 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a worker is told when it starts.

    Args:
        metrics_folder: that the workers share.
        names_corpora: whether it says in the log what is served: one of them does.
    """

    settings: Settings
    metrics_folder: Path
    names_corpora: bool


class Children:
    """How processes ended that this one started, or that the kernel gave to it."""

    def __init__(self) -> None:
        self._ends: dict[int, asyncio.Future[int]] = {}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def end_of(self, pid: int) -> asyncio.Future[int]:
        """Return what becomes the exit code of a child, negative for a signal."""
        if pid not in self._ends:
            self._ends[pid] = asyncio.get_running_loop().create_future()
        return self._ends[pid]

    def adopt(self, pid: int) -> asyncio.Future[int]:
        """Return the same of a child that has just begun, or begun and ended."""
        end = self.end_of(pid)
        if end.done() and Path(f"/proc/{pid}").exists():  # that was another one with its number
            del self._ends[pid]
        return self.end_of(pid)

    def close(self) -> None:
        """Hear of no more ends."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if self.end_of(pid).done():  # of one before that had its number
                    del self._ends[pid]
                self.end_of(pid).set_result(os.waitstatus_to_exitcode(status))


class Template:
    """The process that is forked for each worker: started when it is needed, and again if it ended.

    Attributes:
        pid: of the last one; 0 before the first.
        has_forked: whether it has imported everything.
    """

    def __init__(self) -> None:
        self.has_forked = False
        self.pid = 0
        self._requests: socket.socket | None = None

    def ask(self, handed: list[int]) -> None:
        """Ask for a worker with these descriptors, the channel first.

        Raises:
            OSError: the process cannot be started.
        """
        if self._requests is not None:
            try:
                socket.send_fds(self._requests, [b"f"], handed)
            except OSError:  # it was killed
                self.close()
            else:
                return
        self._start()
        assert self._requests is not None
        socket.send_fds(self._requests, [b"f"], handed)

    def _start(self) -> None:
        environment = {
            # One heap for all threads. With one each, as glibc gives them, a worker takes 83 MiB, not 72,
            # after an hour of mixed load, and goes on growing while pieces reach ever more of these heaps.
            "MALLOC_ARENA_MAX": "1",
            # No thread for linear algebra, of which a server has none: a template must have one thread.
            "OPENBLAS_NUM_THREADS": "1",
            **os.environ,
            # With `-P`: workers import from where this process did, and not from the current folder.
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                command = [sys.executable, "-P", "-m", TEMPLATE_MODULE, str(theirs.fileno())]
                # Workers inherit the mask: Ctrl+C and systemd signal the whole group, but only the supervisor
                # decides when a worker ends.
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING_SIGNALS, signal.SIGHUP})
                try:
                    started = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
            except BaseException:
                ours.close()
                raise
        started.returncode = 0  # `Children` waits for it: Popen need not
        ours.setblocking(False)
        self._requests, self.pid, self.has_forked = ours, started.pid, False

    def close(self) -> None:
        """End the template; workers go on. Idempotent."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
            with contextlib.suppress(ProcessLookupError):  # it was killed
                os.kill(self.pid, signal.SIGKILL)


class WorkerProcess:
    """A worker process and the channel to it.

    Attributes:
        pid: 0 until the process has said its own.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._was_killed = False
        self._end: asyncio.Future[int]
        self.pid = 0
        # Packets, so that no two messages become one.
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)

    async def start(self, template: Template, sockets: list[socket.socket], orders: Orders) -> None:
        """Have the template fork the process.

        Raises:
            OSError: there is none, and why.
        """
        # The orders are a file in memory: a packet holds 200 KiB, about 1,000 corpora.
        with self._theirs, open(os.memfd_create("orders"), "w+b") as file:  # noqa: PTH123
            pickle.dump(orders, file)
            file.seek(0)
            handed = [self._theirs.fileno(), file.fileno(), *(each.fileno() for each in sockets)]
            template.ask(handed)
        heard = await self.hear(FORK_SECONDS if template.has_forked else IMPORT_SECONDS)
        if self._was_killed:
            template.close()  # another one is started for the next worker
            raise ChildProcessError("the template of workers does not answer")
        if not heard.startswith(PID):
            raise ChildProcessError(heard.decode(errors="replace") or "the template of workers has ended")
        template.has_forked = True
        self.pid = int(heard[1:])
        self._end = self._children.adopt(self.pid)

    async def hear(self, seconds: int) -> bytes:
        """Wait for a message; b"": the process ended, or was killed since none came for so many seconds."""
        # One reading for all the seconds: a timeout would cancel it, and a beat that comes in that moment
        # would be lost. Both come every second, so the same would happen to the next ones.
        loop = asyncio.get_running_loop()
        receiving = asyncio.ensure_future(loop.sock_recv(self._channel, MAX_MESSAGE_BYTES))
        while seconds > 0:
            began = loop.time()
            await asyncio.wait({receiving}, timeout=1)
            if receiving.done():
                with contextlib.suppress(OSError):
                    return receiving.result()
                return b""
            # A supervisor that was stopped, or not given the CPU, must not take that for silence.
            seconds -= loop.time() - began < 1 + LATE_SECONDS
        receiving.cancel()
        self.kill()
        return b""

    def tell(self, command: bytes) -> None:
        """Send a command; a process that has ended misses it."""
        with contextlib.suppress(OSError):
            self._channel.send(command)

    def kill(self) -> None:
        """End the process at once, if there is one."""
        self._was_killed = True
        if self.pid and not self._end.done():
            os.kill(self.pid, signal.SIGKILL)

    async def reap(self) -> int | None:
        """Wait for the process to end and kill it if need be; return its exit code, negative for a signal.

        None: it does not end, because the kernel waits for a disk on its behalf, and will when that answers.
        """
        if not self._was_killed:
            await asyncio.wait({self._end}, timeout=EXIT_SECONDS)
        self.kill()
        await asyncio.wait({self._end}, timeout=KILL_SECONDS)
        self._channel.close()
        return self._end.result() if self._end.done() else None

    def close(self) -> None:
        """Close the channel of a process that was not started."""
        self._theirs.close()
        self._channel.close()


def name_of_end(code: int) -> str:
    """Return what ended a process, as people read it: `2`, `SIGKILL`, `signal 35`."""
    try:
        return signal.Signals(-code).name if code < 0 else str(code)
    except ValueError:  # Python names no real-time signals but the first and the last
        return f"signal {-code}"
