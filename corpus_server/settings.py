"""One frozen `Settings`, read at the edge and passed down as plain values."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus_server.errors import InvalidParameter

MIB = 2**20
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_SOCKET_PATH_BYTES = 107
"""What a `sockaddr_un` holds, but for the NUL at its end (unix(7))."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TEXTS = {"path", "dtype", "tokenizer", "host", "uds", "state_dir"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSpec:
    """A corpus to serve: `NAME=PATH` on the command line, `[corpora.NAME]` in the file.

    Args:
        name: letters, digits, `.`, `_`, `-`; what URLs and plans call it.
        path: a token file or a folder of shards.
        dtype: token type of headerless files; None takes the format's default.
        tokenizer: `bytes`, the path of a tokenizer.json, or None to look beside the shards.
    """

    name: str
    path: Path
    dtype: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidParameter(
                f"corpus name {self.name!r} must be 1 to 128 letters, digits, '.', '_' or '-', starting with "
                "a letter or digit; give one with NAME=PATH",
                parameter="name",
                received=self.name,
            )

    @classmethod
    def parse(cls, text: str, *, dtype: str | None = None, tokenizer: str | None = None) -> CorpusSpec:
        """Read `NAME=PATH` or `PATH`, whose last part without its extension is then the name."""
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = "", text
        resolved = Path(path).expanduser().resolve()
        return cls(name=name or resolved.stem, path=resolved, dtype=dtype, tokenizer=tokenizer)


def default_state_dir() -> Path:
    """Return the XDG state folder of the user."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "corpus-server"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything a server is told.

    Args:
        corpora: what is served.
        host, port: where; port 8000 of loopback by default, since the API has no authentication of its own.
        uds: path of a Unix socket; without a host and a port beside it, the only place to listen.
        workers: processes over one page cache.
        state_dir: keeps the plans that were seen; losing it loses no training run.
        max_answer_bytes: largest body; 64 MiB is 32 steps of 512 x 2,049 uint16 tokens.
        max_text_tokens: largest JSON or text answer; those cost about a microsecond per token.
        max_concurrent_answers: token answers under way per process; more get 503 and `Retry-After`.
        gather_threads: threads that touch the maps; they wait for the disk so that the loop never does.
        read_ahead_bytes: page cache per process for windows that are read before they are asked for, shared
            by all ranks that read; 0: none are, nor those of one answer all at once.
        send_timeout_seconds: a reader that takes nothing for so long is dropped.
        keep_alive_seconds: idle connections; longer than usual client pools keep theirs.
    """

    corpora: tuple[CorpusSpec, ...]
    host: str | None = None
    port: int | None = None
    uds: Path | None = None
    workers: int = 1
    state_dir: Path = field(default_factory=default_state_dir)
    max_answer_bytes: int = 64 * MIB
    max_text_tokens: int = MIB
    max_concurrent_answers: int = 64
    gather_threads: int = 4
    read_ahead_bytes: int = 256 * MIB
    send_timeout_seconds: float = 30.0
    keep_alive_seconds: int = 75

    def __post_init__(self) -> None:
        if not self.corpora:
            raise InvalidParameter("no corpus to serve; give at least one PATH or NAME=PATH")
        names = [spec.name for spec in self.corpora]
        for name in names:
            if names.count(name) > 1:
                raise InvalidParameter(f"two corpora are named {name!r}; give each a name with NAME=PATH")
        for name, low, high in (
            ("port", 0, 65535),
            ("workers", 1, 256),
            ("max_answer_bytes", 1, 2**40),
            ("max_text_tokens", 1, 2**40),
            ("max_concurrent_answers", 1, 2**20),
            ("gather_threads", 1, 256),
            ("read_ahead_bytes", 0, 2**50),
            ("send_timeout_seconds", 0.1, 86400),
            ("keep_alive_seconds", 1, 86400),
        ):
            value = getattr(self, name)
            if name == "port" and value is None:
                continue
            expected = float if name == "send_timeout_seconds" else int
            if isinstance(value, bool) or not isinstance(value, expected | int) or not low <= value <= high:
                raise InvalidParameter(
                    f"{name} must be in [{low}, {high}], got {value!r}",
                    parameter=name,
                    received=value,
                    accepted=f"[{low}, {high}]",
                )

        if self.uds is not None and (length := len(os.fsencode(self.uds))) > MAX_SOCKET_PATH_BYTES:
            raise InvalidParameter(
                f"uds must be a path of at most {MAX_SOCKET_PATH_BYTES} bytes, which is all that the system "
                f"takes for a socket, got {length}: {self.uds}",
                parameter="uds",
                received=str(self.uds),
                accepted=f"at most {MAX_SOCKET_PATH_BYTES} bytes",
            )

    @property
    def tcp_address(self) -> tuple[str, int] | None:
        """Host and port to listen on; None: only on the Unix socket."""
        if self.uds is not None and self.host is None and self.port is None:
            return None
        host = DEFAULT_HOST if self.host is None else self.host
        return host, DEFAULT_PORT if self.port is None else self.port

    def to_json(self) -> str:
        """Return the settings as one line for a worker process."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        specs = tuple(CorpusSpec(**{**spec, "path": Path(spec["path"])}) for spec in values.pop("corpora"))
        uds = None if values["uds"] is None else Path(values["uds"])
        return cls(**{**values, "corpora": specs, "state_dir": Path(values["state_dir"]), "uds": uds})

    @classmethod
    def from_toml(cls, path: Path, *, corpora: tuple[CorpusSpec, ...] = (), **overrides: Any) -> Settings:
        """Read a configuration file; what the command line says goes before what the file says.

            [server]
            port = 8000
            workers = 4
            [corpora.web]
            path = "/data/web"
            dtype = "uint32"

        Raises:
            InvalidParameter: an unknown table, key or value, named.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidParameter(f"cannot read {path}: {error}", parameter="config") from error
        known = {f.name for f in dataclasses.fields(cls)} - {"corpora"}
        _check_table(f"{path}", tables, {"server", "corpora"})
        server, listed = tables.get("server", {}), tables.get("corpora", {})
        _check_table(f"{path} [server]", server, known)
        _check_table(f"{path} [corpora]", listed)
        specs = []
        for name, table in listed.items():
            where = f"{path} [corpora.{name}]"
            _check_table(where, table, {"path", "dtype", "tokenizer"})
            if "path" not in table:
                raise InvalidParameter(f"{where}: path is missing", parameter="config")
            resolved = (path.parent / Path(table["path"]).expanduser()).resolve()
            specs.append(CorpusSpec(**{**table, "name": name, "path": resolved}))
        if "uds" in server:
            server["uds"] = (path.parent / Path(server["uds"]).expanduser()).absolute()
        merged = {**server, **{name: value for name, value in overrides.items() if value is not None}}
        if "state_dir" in merged:
            merged["state_dir"] = Path(merged["state_dir"])
        return cls(corpora=(*specs, *corpora), **merged)


def _check_table(where: str, table: object, known: set[str] | None = None) -> None:
    """Refuse what is no table, keys that are not `known`, and other values than strings under _TEXTS."""
    if not isinstance(table, dict):
        raise InvalidParameter(f"{where} must be a table, got {table!r}", parameter="config")
    if known is not None and (unknown := sorted(set(table) - known)):
        raise InvalidParameter(
            f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}",
            parameter="config",
        )
    for name in _TEXTS & (known or set()) & set(table):
        if not isinstance(table[name], str):
            raise InvalidParameter(
                f"{where}: {name} must be a string, got {table[name]!r}", parameter="config"
            )
