"""The sockets of a server and their TLS, made before any worker starts, so that a mistake is one line.

A Unix socket is a file. It outlives a killed server, and bind(2) refuses a path that exists. So a socket file
on which nobody listens is replaced, one with a live server is not, and our own file is removed at exit.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import ssl
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from corpus_server.errors import InvalidParameter
from corpus_server.settings import Settings
from corpus_server.user_files import locked_folder, open_fd

BACKLOG = 2048

_SO_ATTACH_FILTER = 26  # socket(7); the module `socket` does not have it
_DROP_SYN = (
    (0x30, 0, 0, 13),  # load the flags of the TCP header
    (0x54, 0, 0, 0x12),  # of these SYN and ACK
    (0x15, 0, 1, 0x02),  # unless it is SYN alone, skip one
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # take it: a half-open connection is completed
)
"""Instructions of a classic BPF filter: code, jump if true, jump if false, operand (linux/filter.h)."""

_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Bind the addresses of the settings; at the end, close the sockets and remove the Unix socket's file."""
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        if settings.tcp_address is not None:
            host, port = settings.tcp_address
            try:
                sockets += _bind_tcp(stack, host, port)
            except (OSError, UnicodeError) as error:  # the latter for what cannot be a name
                reason = error.strerror if isinstance(error, OSError) else "no such name"
                raise InvalidParameter(
                    f"cannot listen on host {host}, port {port}: {reason}; give others with --host, --port",
                    parameter="port",
                ) from error
        if settings.uds is not None:
            sockets.append(stack.enter_context(_unix_socket(settings.uds)))
        yield sockets


def url(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL for clients on this host: `http://127.0.0.1:8000`, `uds:///run/corpus.sock`."""
    if listener.family == socket.AF_UNIX:
        return f"uds://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the context of a server's TCP sockets; None without TLS."""
    if settings.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files = [settings.tls_certificate, settings.tls_key, settings.tls_client_ca]
    try:
        for path in filter(None, files):
            os.close(open_fd(path)[0])  # OpenSSL would wait for whoever writes into a named pipe
        # The password is asked for at a terminal otherwise, which a server may not have.
        context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=lambda: "")
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # of ssl, too
        named = ", ".join(str(path) for path in files if path is not None)
        raise InvalidParameter(
            f"TLS cannot use {named}: {error}; expected PEM files: a key without password, its certificate",
            parameter="tls_certificate",
        ) from error
    return context


def take_no_more(listener: socket.socket) -> None:
    """Have the kernel drop new connections, for all processes; those that are queued can still be accepted.

    Closing a socket resets the queued connections, although their clients may have sent a request. A client
    that connects now finds the port closed: on TCP when it tries again after a second.
    """
    with contextlib.suppress(OSError):  # without this, a client or two may see a reset
        if listener.family == socket.AF_UNIX:
            listener.shutdown(socket.SHUT_RD)
            return
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in _DROP_SYN))
        program = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(code))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _bind_tcp(stack: ExitStack, host: str, port: int) -> list[socket.socket]:
    """Bind every address of a host name.

    The workers call listen(2) when they are ready: until then, clients are refused instead of kept waiting.
    """
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
            missing = error  # localhost may resolve to ::1 on a host without IPv6
        else:
            bound.append(listener)
            port = listener.getsockname()[1]  # for port 0: the other addresses take the port picked here
    if missing is not None and not bound:
        raise missing
    return bound


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with locked_folder(path.parent):  # one server at a time checks and replaces sockets there
                _remove_stale(path)
                listener.bind(str(path))
                # Under the lock: a socket that is bound but not listening looks like that of a dead server.
                listener.listen(BACKLOG)
            path.chmod(0o666)  # for every user, as a loopback port is; its folder can restrict that
            ours = path.stat()
        except OSError as error:
            raise _refusal(f"cannot listen on uds {path}: {error.strerror};", path) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), ours):  # a later server may have replaced the file
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a dead server; refuse a live one, and what is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _refusal(f"uds {path} is not a socket; remove it or", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # connect(2) waits while the queue of the listener is full
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
            return
    raise _refusal(f"uds {path}: a server listens there already; stop it or", path)


def _refusal(problem: str, path: Path) -> InvalidParameter:
    detail = f"{problem} give another path with --uds"
    return InvalidParameter(detail, parameter="uds", received=str(path))
