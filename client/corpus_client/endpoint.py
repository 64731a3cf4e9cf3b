"""Where a server is: its URL, read once."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from corpus_client import errors

MAX_SOCKET_PATH_BYTES = 107
"""What a `sockaddr_un` holds, but for the NUL at its end (unix(7))."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
URL_FORMS = "http://host:port, https://host:port or uds:///path/of.sock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server is.

    Args:
        url: as written, without a slash at its end; the replica's name in messages.
        prefix: path in front of every route ("" or "/data").
        socket_path: of a Unix socket on this host; None: TCP to host and port.
    """

    url: str
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    socket_path: str | None = None

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read `http://host[:port][/prefix]`, its https form, or `uds:///path/of.sock`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise errors.InvalidArgument(f"url must be {URL_FORMS}, got {url!r}: {error}") from error
        if parts.scheme == "uds":
            return cls._parse_unix(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise errors.InvalidArgument(f"url must be {URL_FORMS}, got {url!r}")
        if parts.username is not None:
            raise errors.InvalidArgument("url must not hold a password; pass it with headers=")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(
            url=url.rstrip("/"),
            host=parts.hostname,
            port=port if port is not None else (443 if tls else 80),
            prefix=parts.path.rstrip("/"),
            tls=tls,
        )

    @classmethod
    def _parse_unix(cls, url: str) -> Endpoint:
        """All that follows `uds://` is the path, percent-decoded; so no prefix can follow it."""
        parts = urlsplit(url)
        path = unquote(parts.path.rstrip("/"))
        absolute = url[3:].startswith(":///") and path.startswith("/")
        if not absolute or parts.query or parts.fragment or "\0" in path:
            raise errors.InvalidArgument(
                f"url must be uds:///absolute/path.sock, with three slashes and %3F for ?, got {url!r}"
            )
        if (length := len(os.fsencode(path))) > MAX_SOCKET_PATH_BYTES:
            raise errors.InvalidArgument(
                f"url must name a socket by at most {MAX_SOCKET_PATH_BYTES} bytes, which is all that the "
                f"system takes, got {length}: {path}"
            )
        return cls(url=url.rstrip("/"), host="localhost", port=80, prefix="", tls=None, socket_path=path)

    @property
    def http_url(self) -> str:
        """The base URL that a request spells; with a Unix socket it leads nowhere by itself."""
        return self.url if self.socket_path is None else "http://localhost"

    @property
    def authority(self) -> str:
        """What a request's `Host` says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def addresses(self) -> list[tuple[int, int, int, tuple[Any, ...] | str]]:
        """(family, kind, protocol, address) of each place to connect to, the first one first."""
        if self.socket_path is not None:
            return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, self.socket_path)]
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]
