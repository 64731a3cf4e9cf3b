"""One frozen `Settings`, read at the edge and passed down as plain values.

A setting is one field below. Its type, default, help text and accepted range stand there and nowhere else.
The checks, the keys of the TOML file, the options of `serve` and the table in the docs are derived from it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.user_files import parse_toml, read_small_file, reason_of

MIB = 2**20
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_CACHE_BYTES = 64 * 2**30
DEFAULT_EXTENT_BYTES = 16 * MIB  # a block of recorded hashes, so that each extent can be checked as it comes
_PAGE_BYTES = 4096
_MAX_SOCKET_PATH_BYTES = 107  # what a `sockaddr_un` holds without the NUL at its end (unix(7))


def default_state_dir() -> Path:
    """Return the XDG state folder of the user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "corpus-server"


def default_cache_dir() -> Path:
    """Return the XDG cache folder of the user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corpus-server"


def _setting(default: Any, help_text: str, *, accepted: Any = None, shown: str | None = None) -> Any:
    """Declare a setting: see `Setting`; `shown` is the default as people read it, if its value says less."""
    text = shown or ("" if default is None else str(default))
    metadata = {"help": help_text, "accepted": accepted, "default": text}
    return field(**{"default_factory" if callable(default) else "default": default}, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The configuration of a server: the corpora it serves, and settings that their help texts describe."""

    corpora: tuple[CorpusSpec, ...]
    # Loopback until somebody says otherwise. None: not given, which matters beside `uds`.
    host: str | None = _setting(None, "Address to listen on.", shown=DEFAULT_HOST)
    port: int | None = _setting(
        None, "Port; 0 picks a free one.", accepted=(0, 65535), shown=str(DEFAULT_PORT)
    )
    uds: Path | None = _setting(
        None, "Unix socket to listen on instead of a port; with --host or --port, on both."
    )
    workers: int = _setting(1, "Worker processes; they share one page cache.", accepted=(1, 256))
    tokens: Path | None = _setting(
        None, "TOML file of access tokens; without one, everybody who can connect may read everything."
    )
    allow_anyone: bool = _setting(
        False, "Listen beyond loopback without tokens: for a network where everybody may read everything."
    )
    allow: str | None = _setting(
        None,
        "Networks and addresses of clients, with commas between them; others get 403, but for /healthz and "
        "/readyz.",
    )
    exposed: bool = _setting(
        False, "Strict limits, for a server that strangers reach without a proxy in front."
    )
    tls_certificate: Path | None = _setting(None, "PEM file with the certificate chain; turns TLS on.")
    tls_key: Path | None = _setting(None, "PEM file with the certificate's key.")
    tls_client_ca: Path | None = _setting(
        None, "PEM file of certificate authorities; clients must have a certificate from one of them."
    )
    state_dir: Path = _setting(
        default_state_dir,
        "Folder for the plans that were posted; a run survives its loss.",
        shown="~/.local/state/corpus-server",
    )
    while_locked: Path | None = _setting(
        None,
        "Serve the processes of this host that hold a lock (flock) on this file: tell them where the shards "
        "lie, and end when none is left. With `uds` nothing else is listened on.",
    )
    record_dir: Path | None = _setting(
        None,
        "Folder of losses that training runs recorded, or of one such folder a run; the page shows them.",
    )
    report_dir: Path | None = _setting(
        None,
        "Folder of reports that `find --out` wrote, or of one such folder a report; the page shows them.",
    )
    # 64 MiB are 32 steps of 512 x 2,049 uint16 tokens.
    max_response_bytes: int = _setting(
        64 * MIB, "Largest response body.", accepted=(1, 2**40), shown="64 MiB"
    )
    # JSON and text cost about a microsecond per token.
    max_text_tokens: int = _setting(MIB, "Most tokens of a JSON or text response.", accepted=(1, 2**40))
    # Two requests of each of 1,000 ranks in step. Of large responses, `load.MAX_BYTES` allows fewer.
    max_concurrent_responses: int = _setting(
        2048, "Token responses in flight per process; more get 503 and Retry-After.", accepted=(1, 2**20)
    )
    gather_threads: int = _setting(
        4, "Threads per process that read the shards, so that the event loop never does.", accepted=(1, 256)
    )
    read_ahead_bytes: int = _setting(
        256 * MIB,
        "Page cache that a process may fill by prefetching, for all its readers; 0 turns prefetching off.",
        accepted=(0, 2**50),
        shown="256 MiB",
    )
    send_timeout_seconds: float = _setting(
        30.0, "A reader that takes nothing for this long is dropped.", accepted=(0.1, 86400)
    )
    # Longer than usual client pools keep theirs: the side that closes first should be the client.
    keep_alive_seconds: int = _setting(75, "Idle timeout of a connection.", accepted=(1, 86400))
    # A head is one packet; a client that was swapped out meanwhile gets its time.
    head_timeout_seconds: float = _setting(
        20.0,
        "A request head that is not complete this long after its first byte gets 408.",
        accepted=(0.1, 86400),
    )
    # 32 MiB, the largest plan, at 0.5 MB/s.
    body_timeout_seconds: float = _setting(
        60.0, "A request body that is not complete by then gets 408.", accepted=(0.1, 86400)
    )
    # An idle connection takes about 30 kB and one descriptor.
    max_connections: int = _setting(8192, "Connections per process; more get 503.", accepted=(1, 2**20))
    # Behind a proxy all connections have one address, so by default this is no limit of its own.
    max_connections_per_address: int = _setting(
        8192, "Connections per process and client address; more get 503.", accepted=(1, 2**20)
    )
    # One probe of a load balancer that asks every second.
    drain_seconds: float = _setting(
        1.0,
        "Time from SIGTERM during which /readyz says 503 while requests are still answered.",
        accepted=(0, 3600),
    )
    # Half of the 30 s that Kubernetes waits before SIGKILL.
    grace_seconds: float = _setting(
        15.0,
        "Time from SIGTERM until responses in flight are cut off, drain_seconds included.",
        accepted=(0, 3600),
    )
    cache_dir: Path = _setting(
        default_cache_dir,
        "Folder for extents of object stores, read now or next; several servers may share it.",
        shown="~/.cache/corpus-server",
    )
    cache_bytes: int = _setting(
        DEFAULT_CACHE_BYTES, "Most bytes of extents in cache_dir.", accepted=(1, 2**60), shown="64 GiB"
    )
    extent_bytes: int = _setting(
        DEFAULT_EXTENT_BYTES,
        "Bytes of a shard in an object store that are fetched and removed as one; a multiple of 4,096.",
        accepted=(_PAGE_BYTES, 2**30),
        shown="16 MiB",
    )
    log_level: str = _setting(
        "info",
        "Lowest level of messages that are logged.",
        accepted=("critical", "error", "warning", "info", "debug"),
    )
    log_format: str = _setting(
        "auto",
        "How the log is written: text on a terminal, else JSON, one object a line.",
        accepted=("auto", "json", "text"),
    )
    access_log: str = _setting(
        "notable",
        "Which requests are logged: none, those that failed or took over a second, or all.",
        accepted=("off", "notable", "all"),
    )

    def __post_init__(self) -> None:
        if not self.corpora:
            raise InvalidParameter("no corpus to serve; give at least one PATH or NAME=PATH")
        for name, number in Counter(spec.name for spec in self.corpora).items():
            if number > 1:
                raise InvalidParameter(f"two corpora are named {name!r}; give each a name with NAME=PATH")
        for setting in all_settings():
            setting.check(getattr(self, setting.name))
        if self.uds is not None and (length := len(os.fsencode(self.uds))) > _MAX_SOCKET_PATH_BYTES:
            accepted = f"a path of at most {_MAX_SOCKET_PATH_BYTES} bytes, as the system demands"
            detail = f"uds must be {accepted}, got {length}: {self.uds}"
            raise InvalidParameter(detail, parameter="uds", received=str(self.uds), accepted=accepted)
        if self.extent_bytes % _PAGE_BYTES:
            raise InvalidParameter.expected("extent_bytes", "a multiple of 4096", self.extent_bytes)
        if self.allow is not None:
            networks(self.allow)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidParameter("tls_certificate and tls_key belong together, got one of them")
        if self.tls_client_ca is not None and self.tls_key is None:
            raise InvalidParameter("tls_client_ca needs tls_certificate and tls_key, got neither")
        if self.while_locked is not None:
            self._check_serves_this_host()
        if (self.exposed or self.reaches_beyond_loopback) and self.tokens is None and not self.allow_anyone:
            parameter, why = "host", f"host {self.host} is reached from other machines"
            if self.host is not None and not _addresses(self.host) and not self.exposed:
                detail = f"host {self.host} is no address, and no name that is known here"
                raise InvalidParameter(detail, parameter="host", received=self.host, remedy="give an address")
            if self.exposed:
                parameter, why = "exposed", "exposed is for servers that strangers reach"
            remedy = "name a file with --tokens (`corpus-server token` makes it), or say --allow-anyone"
            raise InvalidParameter(f"{why}, and no tokens are asked for; {remedy}", parameter=parameter)

    def _check_serves_this_host(self) -> None:
        """Refuse what is for servers that others reach."""
        others = ("tokens", "tls_certificate", "exposed", "allow_anyone", "allow")
        given = [name for name in others if getattr(self, name)]
        if given or self.reaches_beyond_loopback:
            what = " and ".join(given) if given else f"host {self.host}"
            raise InvalidParameter(
                f"while_locked is for processes of this host, and {what} for servers that others reach; "
                "leave one of them out, or start a server and give its URL",
                parameter=given[0] if given else "host",
            )

    @property
    def reaches_beyond_loopback(self) -> bool:
        """Whether other machines may connect."""
        address = self.tcp_address
        if address is None or address[0] == "localhost":
            return False
        addresses = _addresses(address[0])
        return not addresses or not all(each.is_loopback for each in addresses)

    @property
    def tcp_address(self) -> tuple[str, int] | None:
        """Host and port to listen on; None: only on the Unix socket."""
        if self.uds is not None and ((self.host is None and self.port is None) or self.while_locked):
            return None  # a loader's own server is for its user: the port of a configuration is for another
        host = DEFAULT_HOST if self.host is None else self.host
        return host, DEFAULT_PORT if self.port is None else self.port

    @classmethod
    def read(
        cls, path: Path | None = None, *, corpora: tuple[CorpusSpec, ...] = (), **given: Any
    ) -> Settings:
        """Read a configuration file, if there is one; the command line has priority over the file.

        Paths of the file are relative to the file, those of the command line to the current folder. Corpora
        of both are served. A value of None in `given` stands for an option that was left out.
        """
        listed, values = _read_file(path) if path is not None else ([], {})
        values |= _with_paths({k: v for k, v in given.items() if v is not None}, Path.cwd())
        strict = EXPOSED if values.get("exposed") is True else {}
        return cls(corpora=(*listed, *corpora), **{**strict, **values})


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses of a host, which may be one; none of a name that is not known."""
    with suppress(ValueError):
        return [ipaddress.ip_address(host)]
    try:
        known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for what cannot be a name
        return []
    return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in known]


EXPOSED: Mapping[str, Any] = {
    # A client that needs longer for a head is not on a network that trains.
    "head_timeout_seconds": 5.0,
    "body_timeout_seconds": 20.0,
    "send_timeout_seconds": 10.0,
    # Loaders ask several times a second; one that was busy for longer connects again.
    "keep_alive_seconds": 15,
    "max_connections": 1024,
    # Eight ranks of a host with two connections each, twice for those that a restart left half open.
    "max_connections_per_address": 32,
    # 32 responses of at most 16 MiB, which is what loaders ask for.
    "max_concurrent_responses": 32,
    "max_response_bytes": 16 * MIB,
    "max_text_tokens": MIB // 8,
}
"""Defaults under `exposed`; the file and the command line have priority."""


class Setting(NamedTuple):
    """One field of `Settings`, as the command line and the docs see it."""

    name: str
    kind: type  # str, int, float, bool or Path
    optional: bool
    help: str
    default: str  # for people; "" if there is none
    accepted: tuple[Any, ...] | None  # lowest and highest number, or the choices of a text

    @property
    def expected(self) -> str:
        """What is accepted, in words: `in [0, 65535]`, `one of info, debug`, `a string`."""
        if self.accepted is None:
            return {Path: "a path", bool: "true or false"}.get(self.kind, "a string")
        if self.kind is str:
            return f"one of {', '.join(self.accepted)}"
        return f"in [{self.accepted[0]}, {self.accepted[1]}]"

    def check(self, value: Any) -> None:
        """Raise `InvalidParameter` if a value has another type or lies outside what is accepted."""
        good = isinstance(value, int | float if self.kind is float else self.kind) and "\0" not in str(value)
        if self.kind is str and self.accepted is not None:
            good = value in self.accepted
        elif good and self.accepted is not None:
            # A bool is an int to isinstance; nan fails the comparison.
            good = not isinstance(value, bool) and self.accepted[0] <= value <= self.accepted[1]
        if not good and not (value is None and self.optional):
            raise InvalidParameter.expected(self.name, self.expected, value)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting but the corpora, in the order of the fields."""
    hints = get_type_hints(Settings)
    found = []
    for each in dataclasses.fields(Settings)[1:]:  # the first are the corpora
        kind, *none = get_args(hints[each.name]) or (hints[each.name],)
        found.append(Setting(name=each.name, kind=kind, optional=bool(none), **each.metadata))
    return tuple(found)


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@cache
def networks(allow: str) -> tuple[Network, ...]:
    """Return the networks of the setting `allow`; an address is a network of one.

    Raises:
        InvalidParameter: one of them is none, or its address has bits beyond its prefix.
    """
    found = []
    for text in (each.strip() for each in allow.split(",")):
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError:
            accepted = "networks such as 10.0.0.0/8,127.0.0.1, without bits beyond their prefix"
            raise InvalidParameter.expected("allow", accepted, text) from None
    return tuple(found)


def _read_file(path: Path) -> tuple[list[CorpusSpec], dict[str, Any]]:
    """Return the corpora and the values of a configuration file."""
    try:
        tables = parse_toml(read_small_file(path)[0])
    except (OSError, ValueError) as error:
        raise InvalidParameter(f"cannot read {path}: {reason_of(error)}", parameter="config") from error
    _check_table(f"{path}", tables, {"server", "corpora"})
    server, corpora = tables.get("server", {}), tables.get("corpora", {})
    _check_table(f"{path} [server]", server, {each.name for each in all_settings()})
    _check_table(f"{path} [corpora]", corpora)
    specs = []
    for name, table in corpora.items():
        where = f"{path} [corpora.{name}]"
        _check_table(where, table)
        if "path" not in table:
            raise InvalidParameter(f"{where}: path is missing", parameter="config")
        specs.append(CorpusSpec.from_table(name, table, folder=path.parent, where=f"{where}: "))
    return specs, _with_paths(server, path.parent)


def _with_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return values whose paths are made of text, relative to a folder."""
    paths = {each.name for each in all_settings() if each.kind is Path}
    return {
        # A value of another type is refused when the settings are made.
        name: (folder / os.path.expanduser(value)).absolute()  # noqa: PTH111 - Path's fails on unknown users
        if name in paths and isinstance(value, str | Path) and value != ""
        else value
        for name, value in values.items()
    }


def _check_table(where: str, table: object, known: Set[str] | None = None) -> None:
    """Refuse what is no table, and keys that are not known."""
    if not isinstance(table, dict):
        raise InvalidParameter(f"{where} must be a table, got {table!r}", parameter="config")
    if known is not None and (unknown := sorted(set(table) - known)):
        names = f"unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        raise InvalidParameter(f"{where}: {names}", parameter="config")
