"""The server of a path: started by a loader, shared by the loaders of this host, ended with the last.

A folder that only this user may enter has three files:

    loaders   each loader holds a shared lock on it; the server ends when it gets the lock for itself alone
    log       what the server writes. Its processes inherit the file, and with it the lock of whoever started
              them: who can take that lock knows that no server runs, and starts one
    socket    where the server listens

Beside these folders lies the file `lock`, see `_remove_left`.

The kernel releases the locks of a process however it ends. So no process is special: whichever needs the
server first starts it, and one that lives on starts it again after it was killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from corpus_client import errors

MAX_LOG_BYTES = 1 << 20
"""A longer log of earlier servers is emptied before the next one starts."""

POLL_SECONDS = 0.02
PROBE_SECONDS = 1.0
TELL_SECONDS = 10.0
"""How often the log says that a server has not started yet: it may be downloading a corpus."""

LEFT_SECONDS = 86_400.0
"""After which the folder of a server that ended is removed; its log may say why a job failed last night."""

log = logging.getLogger("corpus_client")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnServer:
    """How `corpus-server serve` is started for a path, and where it is found.

    what: as the user wrote it, for messages.
    command: begins with the program.
    cwd: to which relative paths belong.
    folder: of lock, log and socket.
    """

    what: str
    command: tuple[str, ...]
    cwd: str
    folder: Path

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"uds://{quote(str(self.folder / 'socket'))}"

    def hold(self) -> Hold:
        """Keep the server from ending until what is returned is closed or dropped."""
        return Hold(self)

    def has_ended(self) -> bool:
        """Wait for the end of a server that no loader holds; return False at once if one does."""
        for _ in self.until("end"):
            with closing(FileLock(self.folder / "loaders")) as loaders:
                # Not even together with others: the server has it, to end.
                if loaders.take(alone=False) and not loaders.take(alone=True):
                    return False
            with closing(FileLock(self.folder / "log")) as running:
                if running.take(alone=True):
                    break
        return True

    def start(self) -> None:
        """Return once the server responds; start it if no process has.

        Raises:
            ServerNotStarted: it ended, and why.
        """
        with closing(FileLock(self.folder / "log")) as lock:
            for _ in self.until("start"):
                if self._responds():
                    return
                if lock.take(alone=True):
                    self._start(lock.fd)
                    return

    def revive(self) -> None:
        """Start the server again if it was killed; for whoever is about to connect.

        Raises:
            ConnectionFailed: it does not start.
        """
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_SECONDS)
                probe.connect(str(self.folder / "socket"))
        except OSError:
            try:
                self.start()
            except errors.ServerNotStarted as error:
                raise errors.ConnectionFailed(str(error)) from error

    def _start(self, output: int) -> None:
        written = os.fstat(output).st_size
        if written > MAX_LOG_BYTES:
            os.ftruncate(output, written := 0)
        log.info("starting a server for %s; its log is %s", self.what, self.folder / "log")
        try:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.cwd,
                env={**os.environ, "NO_COLOR": "1"},
                start_new_session=True,  # Ctrl-C is meant for the training loop
            )
        except OSError as error:
            raise errors.ServerNotStarted(f"{self.what}: {self.command[0]}: {error}") from error
        process.returncode = 0  # a thread waits for it: `Popen` need not, and must not complain
        ended = threading.Event()
        threading.Thread(target=_reap, args=(process.pid, ended), name="corpus-server", daemon=True).start()
        for _ in self.until("start"):
            if self._responds():
                _remove_left(self.folder.parent)
                return
            if ended.is_set():
                raise errors.ServerNotStarted(f"{self.what}: {self._reason(written)}")

    def _responds(self) -> bool:
        """Return whether a server responds; one that starts listens already, and does not respond yet."""
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_SECONDS)
                probe.connect(str(self.folder / "socket"))
                probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return probe.recv(5) == b"HTTP/"
        except OSError:
            return False

    def _reason(self, written: int) -> str:
        """Return the line by which the server said why it ended."""
        path = self.folder / "log"
        said = path.read_bytes()[written:].decode(errors="replace").strip().splitlines()
        found = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        return (found or said or ["the server ended without a word"])[-1]

    def until(self, what: str) -> Iterator[None]:
        """Yield until the caller has what it waits for, which the log says every ten seconds."""
        told = time.monotonic()
        while True:
            yield
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                path = self.folder / "log"
                log.warning("waiting for the server of %s to %s; its log is %s", self.what, what, path)
            time.sleep(POLL_SECONDS)


def _remove_left(parent: Path) -> None:
    """Remove the folders of servers that ended a day ago; the log of a younger one may still be read.

    A folder of which nobody has a lock belongs to nobody, and nobody begins while the one of all is taken.
    """
    with closing(FileLock(parent / "lock")) as lock, suppress(OSError):
        if not lock.take(alone=True):
            return  # somebody begins; who starts the next server removes them
        for folder in parent.iterdir():
            if not folder.is_dir() or time.time() - folder.stat().st_mtime < LEFT_SECONDS:
                continue
            with (
                closing(FileLock(folder / "loaders")) as loaders,
                closing(FileLock(folder / "log")) as running,
            ):
                if loaders.take(alone=True) and running.take(alone=True):
                    shutil.rmtree(folder)


def _reap(pid: int, ended: threading.Event) -> None:
    """Wait for the server, so that it leaves no zombie whenever it ends."""
    with suppress(ChildProcessError):  # the training program waits for all of its children
        os.waitpid(pid, 0)
    ended.set()


class FileLock:
    """A file that may be locked; the lock is of this process alone, and ends with it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _FORKING:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._close = weakref.finalize(self, os.close, self.fd)
            _LOCKS.add(self)

    def take(self, *, alone: bool) -> bool:
        """Lock the file, or return False: a process has it that goes not together with that."""
        import fcntl  # Windows has none

        try:
            fcntl.flock(self.fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go of it; idempotent."""
        self._close()


class Hold(FileLock):
    """Keeps an `OwnServer` from ending; a process that it is sent to gets one of its own."""

    def __init__(self, server: OwnServer) -> None:
        self.server = server
        with closing(FileLock(server.folder.parent / "lock")) as kept:
            for _ in server.until("start"):
                if kept.take(alone=False):  # else somebody removes folders
                    break
            super().__init__(server.folder / "loaders")
            for _ in server.until("end"):
                if self.take(alone=False):  # else a server is about to end
                    return

    def __reduce__(self) -> tuple[Callable[[OwnServer], Hold], tuple[OwnServer]]:
        return Hold, (self.server,)


_LOCKS: weakref.WeakSet[FileLock] = weakref.WeakSet()
_FORKING = threading.RLock()
"""Held while a descriptor is opened and noted, and during a fork."""


def _after_fork() -> None:
    """Let go of the parent's locks in a forked child: a worker that outlives it would keep the server."""
    for each in list(_LOCKS):
        each.close()
    _FORKING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_after_fork)
