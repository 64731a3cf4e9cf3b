"""The server of a path: started by a loader, shared by the loaders of this host, ended with the last.

A folder that only this user may enter has three files:

    loaders   each loader holds a shared lock on it; the server ends when it gets the lock for itself alone
    log       what the server writes. Its processes inherit the file, and with it the lock of whoever started
              them: who can take that lock knows that no server runs, and starts one
    socket    where the server listens

The kernel releases the locks of a process however it ends. So no process is special: whichever needs the
server first starts it, and one that lives on starts it again after it was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from corpus_client import errors
from corpus_client.network.endpoint import HOST_AND_PORT, MAX_SOCKET_PATH_BYTES, URL_FORMS
from corpus_client.network.options import Network

CorpusPath = str | os.PathLike[str]

MAX_LOG_BYTES = 1 << 20
"""A longer log of earlier servers is emptied before the next one starts."""

POLL_SECONDS = 0.02
PROBE_SECONDS = 1.0
TELL_SECONDS = 10.0
"""How often the log says that a server has not started yet: it may be downloading a corpus."""

_STORES = ("hf", "s3", "gs", "az")
_URL = re.compile(r"(https?|uds):", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_NAMED = re.compile(rf"{_NAME.pattern}=", re.ASCII)
_SPECIAL = re.compile(r"[\\,#*?[]")
"""What has a meaning in the path of a corpus, and is escaped where it belongs to a name."""

FORMS = (
    f"{URL_FORMS}, or name files here: /data/web, ./web.bin, hf://datasets/ORG/NAME, corpus.toml, "
    "{'web': '/data/web', ...}"
)

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


def resolved(given: Servers, network: Network) -> str | Sequence[str] | OwnServer:
    """Return URLs as they are, and for a path how its server is started; say what was expected of others.

    Raises:
        InvalidArgument: the text is no URL and no path, or there cannot be a server here.
    """
    if isinstance(given, OwnServer):
        return given
    arguments = _arguments(given)
    if arguments is not None and "\0" in "".join(arguments):
        raise errors.InvalidArgument(f"a path must have no NUL, got {_shown(given)!r:.200}")
    if arguments is None:
        return given  # type: ignore[return-value]  # URLs, which `Endpoint` checks
    what = _shown(given)
    for name in ("auth", "ca_file", "cert_file", "key_file"):
        if getattr(network, name) is not None:
            raise errors.InvalidArgument(
                f"{name}= is for a server at a URL, got it with {what}: the server of a path is of this "
                "process's user alone; leave it out"
            )
    if sys.platform != "linux":
        raise errors.InvalidArgument(
            f"{what} would need a server on this machine, and corpus-server runs on Linux alone, got "
            f"{sys.platform}; give the URL of a server"
        )
    program = _program(what)
    texts = [each for each in arguments if not each.startswith("--")]
    is_relative = any(not (each.startswith("/") or "://" in each) for each in texts)
    cwd = str(Path.cwd()) if is_relative else "/"
    identity = json.dumps([program, arguments, cwd, socket.gethostname()])
    folder = _private_folder() / hashlib.sha256(identity.encode()).hexdigest()[:16]
    command = (
        *(program, "serve", "--uds", str(folder / "socket"), "--while-locked", str(folder / "loaders")),
        *("--drain-seconds", "0", "--log-format", "text", *_state_dir(arguments, folder), *arguments),
    )
    return OwnServer(what=what, command=command, cwd=cwd, folder=folder)


def _arguments(given: Any) -> list[str] | None:
    """Return what `corpus-server serve` is told of the corpora; None for URLs."""
    if isinstance(given, os.PathLike):
        return _of_path(given)
    if isinstance(given, str):
        return _of_text(given)
    if isinstance(given, Mapping):
        if not given:
            raise errors.InvalidArgument("a mapping must name at least one corpus, got {}")
        return ["--", *(f"{_checked_name(name)}={_corpus(name, path)}" for name, path in given.items())]
    if isinstance(given, Sequence) and any(
        isinstance(each, str | os.PathLike) and not _is_url(each) for each in given
    ):
        raise errors.InvalidArgument(
            "a list must hold URLs of one server's replicas; several corpora go by name, "
            f"{{'web': '/data/web', ...}}, got {given!r}"
        )
    return None


def _is_url(text: CorpusPath) -> bool:
    return isinstance(text, str) and bool(_URL.match(text) or HOST_AND_PORT.fullmatch(text))


def _of_text(text: str) -> list[str] | None:
    if _is_url(text):
        return None
    if scheme := _SCHEME.match(text):
        if scheme[1] not in _STORES:
            raise errors.InvalidArgument(f"url must be {FORMS}, got {text!r}")
        return ["--", text]
    path = text[_NAMED.match(text).end() :] if _NAMED.match(text) else text  # type: ignore[union-attr]
    is_plain = path.startswith(("/", "./", "../", "~")) or path in (".", "..") or _SCHEME.match(path)
    # A bare word could be a host: it is a path only where there is such a file.
    if not is_plain and not Path(_SPECIAL.split(path)[0] or "\0").exists():
        raise errors.InvalidArgument(
            f"url must be {FORMS}, got {text!r}, which is no URL and no file or folder in {Path.cwd()}"
        )
    if path is text and text.endswith(".toml"):
        return _of_path(text)
    return ["--", text]


def _of_path(path: CorpusPath) -> list[str]:
    whole = os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - Path's fails on unknown users
    return ["--config", whole] if whole.endswith(".toml") else ["--", _SPECIAL.sub(r"\\\g<0>", whole)]


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise errors.InvalidArgument(
            f"corpora must be named by letters, digits, '.', '_' and '-', got {name!r}"
        )
    return name


def _corpus(name: str, path: object) -> str:
    if isinstance(path, os.PathLike):
        return _of_path(path)[-1]
    if not isinstance(path, str) or not path:
        raise errors.InvalidArgument(f"corpus {name!r} must be a path, got {path!r}")
    return path


def _shown(given: Any) -> str:
    if isinstance(given, Mapping):
        return ", ".join(f"{name}={os.fspath(path)}" for name, path in given.items())
    return str(os.fspath(given))


def _program(what: str) -> str:
    scripts: str = sysconfig.get_path("scripts")  # of this environment, whether or not it is activated
    found = shutil.which("corpus-server", path=os.pathsep.join((scripts, os.environ.get("PATH", os.defpath))))
    if found is None:
        raise errors.InvalidArgument(
            f"{what} needs corpus-server, which is not installed here; pip install corpus-server, or give "
            "the URL of a server"
        )
    return found


def _private_folder() -> Path:
    """Return a folder on this machine that only this user may enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parents = [Path(runtime, "corpus-server")] if runtime and os.access(runtime, os.W_OK) else []
    parents += [Path(each, f"corpus-server-{os.getuid()}") for each in (tempfile.gettempdir(), "/tmp")]
    # A sockaddr_un holds no longer path.
    longest = MAX_SOCKET_PATH_BYTES - len("/0123456789abcdef/socket")
    folder = next(each for each in parents if len(os.fsencode(each)) <= longest)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise errors.InvalidArgument(
            f"{folder} must be a folder that can be made, for the lock and the socket of a server: "
            f"{error.strerror}; set XDG_RUNTIME_DIR or TMPDIR to another"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise errors.InvalidArgument(
            f"{folder} must be a folder of this user that nobody else may enter: a server listens in it; "
            "remove it, or set XDG_RUNTIME_DIR to another folder"
        )
    return folder


def _state_dir(arguments: Sequence[str], folder: Path) -> list[str]:
    """Return the option for the server's state, which outlives it; none where a configuration says it.

    One for each host: a home folder may be shared by many, and SQLite's log is of one.
    """
    tables: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # which the server reports
        tables = tomllib.loads(Path(arguments[1]).read_text("utf-8")) if arguments[0] == "--config" else {}
    said = tables.get("server", {})
    if given := [name for name in ("uds", "while_locked") if name in said]:
        raise errors.InvalidArgument(
            f"{arguments[1]} must leave out {given[0]}, which loaders decide, got {said[given[0]]!r}"
        )
    if "state_dir" in said:
        return []
    try:
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
        state = home / "corpus-server" / f"on-{socket.gethostname()}"
        state.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        state = folder / "state"
        log.warning("the plans of this run are kept in %s: %s", state, error)
    return ["--state-dir", str(state)]


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
        super().__init__(server.folder / "loaders")
        self._server = server
        for _ in server.until("end"):
            if self.take(alone=False):  # else a server is about to end
                return

    def __reduce__(self) -> tuple[Callable[[OwnServer], Hold], tuple[OwnServer]]:
        return Hold, (self._server,)


Servers = CorpusPath | Sequence[str] | Mapping[str, CorpusPath] | OwnServer
"""What a loader takes: URLs of one server's replicas, or what a server is started for."""

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
