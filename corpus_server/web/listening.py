"""The sockets of a server: bound before any worker starts, so that a mistake is one line.

A Unix socket is a file that outlives a killed server, and a bind refuses a file that is there. So one
that nobody listens on any more is replaced, one that answers is not, and ours is removed at exit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from corpus_server.errors import InvalidParameter
from corpus_server.settings import Settings

BACKLOG = 2048

SOCKET_MODE = 0o666
"""Open to every user of the host, as a port of loopback is; permissions of its folder can close it."""

_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Bind what the settings name; close the sockets and remove the Unix socket's file at the end.

    Raises:
        InvalidParameter: nothing can listen there.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        if settings.tcp_address is not None:
            host, port = settings.tcp_address
            try:
                sockets += _bind_tcp(stack, host, port)
            except OSError as error:
                raise InvalidParameter(
                    f"cannot listen on host {host}, port {port}: {error.strerror}; "
                    "give others with --host, --port",
                    parameter="port",
                ) from error
        if settings.uds is not None:
            sockets.append(stack.enter_context(_unix_socket(settings.uds)))
        yield sockets


def url(listener: socket.socket) -> str:
    """Return what a client here would call it: `http://127.0.0.1:8000`, `uds:///run/corpus.sock`."""
    if listener.family == socket.AF_UNIX:
        return f"uds://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_tcp(stack: ExitStack, host: str, port: int) -> list[socket.socket]:
    """Bind every address of a host name; workers listen there when they are up."""
    bound: list[socket.socket] = []
    missing: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                raise
            missing = error  # localhost may stand for ::1 on a host without IPv6
        else:
            bound.append(listener)
            port = listener.getsockname()[1]  # a free one that was picked is the same for all
    if missing is not None and not bound:
        raise missing
    return bound


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with _locked(path.parent):
                _remove_stale(path)
                listener.bind(str(path))
                # At once, under the lock: bound and not listening looks like the socket of a dead server.
                listener.listen(BACKLOG)
            path.chmod(SOCKET_MODE)
            ours = path.stat()
        except OSError as error:
            raise InvalidParameter(
                f"cannot listen on uds {path}: {error.strerror}; give another path with --uds",
                parameter="uds",
                received=str(path),
            ) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), ours):  # not that of a server which came after
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Make way for a new socket.

    Raises:
        InvalidParameter: a server listens there, or the file is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidParameter(
            f"uds {path} is a file, or a folder, and no socket; remove it or give another path with --uds",
            parameter="uds",
            received=str(path),
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # with a full queue, connecting would wait
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise InvalidParameter(
        f"uds {path}: a server listens there already; stop it or give another path with --uds",
        parameter="uds",
        received=str(path),
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let only one server at a time look at the sockets of a folder and replace one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
