"""Where a server is: its URL, read once."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import sys
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from corpus_client import errors
from corpus_client.network.options import TLS_FILES, Network

MAX_SOCKET_PATH_BYTES = 107
"""What a `sockaddr_un` holds, but for the NUL at its end (unix(7))."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
URL_FORMS = "http://host:port, https://host:port or uds:///path/of.sock"

UNKNOWN_NAME = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}

Address = tuple[socket.AddressFamily, tuple[Any, ...] | str]

_last_found: dict[tuple[str, int], list[Address]] = {}
"""Addresses of each name, for when the name service fails in the middle of a run."""


HOST_AND_PORT = re.compile(r"([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}(/.*)?")
"""A URL without its scheme, as `localhost:8000`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server is: its URL as written, which messages call it by, and one of its addresses.

    address: of the host, or a Unix socket on this host; None: the host is a name for `resolve` to look up.
    """

    url: str
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    address: Address | None = None

    @classmethod
    def parse(cls, url: str, network: Network | None = None) -> Endpoint:
        """Read `http://host[:port][/prefix]`, its https form, or `uds:///path/of.sock`."""
        if not isinstance(url, str):
            raise errors.InvalidArgument(f"url must be {URL_FORMS}, got {url!r}")
        if HOST_AND_PORT.fullmatch(url):
            url = f"http://{url}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise errors.InvalidArgument(f"url must be {URL_FORMS}, got {url!r}: {error}") from error
        if parts.scheme != "https" and network is not None:
            for name in TLS_FILES:
                if getattr(network, name) is not None:
                    raise errors.InvalidArgument(f"{name}= is for https:// alone, got it with {url}")
        if parts.scheme == "uds":
            return cls._parse_unix(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise errors.InvalidArgument(f"url must be {URL_FORMS}, got {url!r}")
        if parts.username is not None:
            raise errors.InvalidArgument("url must not hold a password; pass a token with auth=")
        if not re.fullmatch("[!-~]*", parts.path):
            raise errors.InvalidArgument(f"url must be percent-encoded ASCII, got {url!r}")
        tls = (network or Network()).tls_context() if parts.scheme == "https" else None
        port = port if port is not None else (443 if tls else 80)
        return cls(
            url=url.rstrip("/"),
            host=parts.hostname,
            port=port,
            prefix=parts.path.rstrip("/"),
            tls=tls,
            address=_numeric_address(parts.hostname, port),
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
        if not hasattr(socket, "AF_UNIX"):
            raise errors.InvalidArgument(
                f"url must be http://host:port, as Python has no Unix sockets on {sys.platform}; got {url!r}"
            )
        address = (socket.AF_UNIX, path)
        return cls(url=url.rstrip("/"), host="localhost", port=80, prefix="", tls=None, address=address)

    @property
    def socket_path(self) -> str | None:
        """Path of a Unix socket; None: TCP to host and port."""
        return self.address[1] if self.address and isinstance(self.address[1], str) else None

    @property
    def is_here(self) -> bool:
        """Whether it is on this host by its address."""
        if self.address is None or self.socket_path is not None:
            return self.address is not None
        return ipaddress.ip_address(self.address[1][0].partition("%")[0]).is_loopback

    @property
    def name(self) -> str:
        """What messages call the server: its URL, with the address if the host is given by name."""
        if self.address is None or self.socket_path is not None or self.host == self.address[1][0]:
            return self.url
        return f"{self.url} ({self.address[1][0]})"

    @property
    def http_url(self) -> str:
        """The base URL by address, for httpx; with a Unix socket it leads nowhere by itself."""
        if self.socket_path is not None:
            return "http://localhost"
        assert self.address is not None
        scheme, address = "https" if self.tls else "http", self.address[1]
        return f"{scheme}://{_bracketed(str(address[0]))}:{address[1]}{self.prefix}"

    @property
    def authority(self) -> str:
        """What a request's `Host` says."""
        host = _bracketed(self.host)
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def resolve(self) -> list[Endpoint]:
        """Return one endpoint for each address of the host; looking them up may take seconds.

        Raises `HostNotFound`; or `ConnectionFailed` if the name service does not answer, and never did.
        """
        key = self.host, self.port
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            _last_found[key] = [(family, address) for family, _, _, _, address in found]
        except (socket.gaierror, UnicodeError) as error:
            if key not in _last_found:
                if isinstance(error, UnicodeError) or error.errno in UNKNOWN_NAME:
                    raise errors.HostNotFound(
                        f"{self.url}: no host is named {self.host!r} ({error}); is the URL right, and does "
                        "this machine's name service know the host?"
                    ) from error
                raise errors.ConnectionFailed(
                    f"{self.url}: the name {self.host!r} cannot be looked up: {error}"
                ) from error
        return [replace(self, address=address) for address in _last_found[key]]


def _numeric_address(host: str, port: int) -> Address | None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        return None
    return found[0][0], found[0][4]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
