"""Who may ask for what: bearer tokens, of which a file holds only the hashes.

    [tokens.training]
    sha256 = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
    scopes = ["read:web", "read:code", "plans"]
    expires = 2027-06-30T00:00:00Z
    max_requests = 64

A token is 32 random bytes, so its plain SHA-256 says nothing about it, and a look-up by the hash takes the
same time for every wrong token. `corpus-server token` makes tokens. The file is read again when it changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from corpus_server.admission.request import SCOPES, Caller
from corpus_server.daemon_thread import in_daemon_thread
from corpus_server.errors import InvalidParameter, Unauthorized
from corpus_server.user_files import parse_toml, read_small_file, reason_of

_SCOPE = re.compile(r"read:(\*|[A-Za-z0-9][A-Za-z0-9._-]{0,127})|" + "|".join(SCOPES))
_PREFIX = "corpus_"  # by which secret scanners can find a token that leaked

LOOK_SECONDS = 1.0
"""Between two looks at the file."""

SETTLE_SECONDS = 3.0
"""An editor, or a script that writes table by table, is done within so long."""

HANG_SECONDS = 5.0
"""Without a response of the file's disk, which is then said in the log and the metrics."""


class Key(NamedTuple):
    """A key of a token's table, which is a field of its `Caller`.

    Attributes:
        accepted: what it may be.
        keep: from its value, which may be of any type of TOML, to what the caller has; None if that is not
            accepted.
        meaning: for the docs.
        is_required: whether a table must have it.
    """

    accepted: str
    keep: Callable[[Any], Any]
    meaning: str
    is_required: bool = False


def _count(meaning: str) -> Key:
    """Return the key of a whole number of at least 1."""

    def keep(value: Any) -> int | None:
        return value if type(value) is int and 1 <= value < 2**63 else None

    return Key("an integer in [1, 2^63)", keep, meaning)


def _scopes(value: Any) -> frozenset[str] | None:
    are_scopes = isinstance(value, list) and all(isinstance(s, str) and _SCOPE.fullmatch(s) for s in value)
    return frozenset(value) if are_scopes else None


def _expires(value: Any) -> float | None:
    return value.timestamp() if isinstance(value, datetime) and value.tzinfo else None


KEYS: Final[Mapping[str, Key]] = {
    "scopes": Key(
        f"a list of read:NAME, read:*, {', '.join(SCOPES)}", _scopes, "what it may do", is_required=True
    ),
    "expires": Key("a time like 2027-06-30T00:00:00Z", _expires, "from then on it is refused"),
    "max_requests": _count("token responses under way in each worker process"),
    "max_bytes": _count("bytes of token responses under way in each worker process"),
    "max_bytes_per_second": _count("bytes of token responses in each worker process, over a second"),
    "max_plans": _count("plans that the server keeps for it, over all worker processes"),
}
"""Besides `sha256`, which finds the token."""

Version = tuple[int, ...]
"""What changes with a file: the first two when another file takes its name."""

_log = logging.getLogger("corpus_server")


class Access:
    """The tokens of a server.

    Args:
        path: TOML file of tokens; None: everybody may do everything.

    Attributes:
        num_tokens: in the file, expired ones included; None without a file.
        failure: why the tokens read before are in force, and not what the file says now; "": they are the
            same.

    Raises:
        InvalidParameter: the file cannot be read, or a table, key or value is not accepted.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.num_tokens: int | None = None
        self.failure = ""
        self._callers: dict[bytes, Caller] = {}
        self._version: Version = ()  # of the file when it was read last
        self._settling: tuple[Version, float] | None = None  # what is written, and since when it is as it is
        if path is not None:
            self._read(path)

    async def watch(self) -> None:
        """Take up changes of the file, until cancelled. A disk that hangs delays nothing else."""
        while self._path is not None:
            await asyncio.sleep(LOOK_SECONDS)
            looking = asyncio.create_task(in_daemon_thread(self.reload, "tokens"))
            while not (await asyncio.wait({looking}, timeout=HANG_SECONDS))[0]:
                self._note(f"tokens: {self._path}: nothing was read for {HANG_SECONDS:g} s")
            if (error := looking.exception()) is not None:
                self._note(f"tokens: {self._path}: cannot be read: {error!r}")

    def reload(self) -> None:
        """Read the file again if it changed; one with a mistake changes nothing. Blocks.

        A file that was replaced counts at once. One that is written in place may be empty, or end between two
        tables, until its writer is done: it counts when it has not changed for `SETTLE_SECONDS`.
        """
        assert self._path is not None
        try:
            version = _version(self._path.stat())
            if version == self._version:
                self._settling = None
            elif version[:2] != self._version[:2] or self._has_settled(version):
                self._read(self._path)
                _log.info("read %d tokens from %s", len(self._callers), self._path.name)
            else:
                return
            self._note("")
        except OSError as error:
            self._note(f"tokens: {self._path}: cannot be read: {reason_of(error)}")
        except InvalidParameter as error:
            self._note(error.detail)

    def _read(self, path: Path) -> None:
        self._callers, self._version = read_tokens(path)
        self.num_tokens = len(self._callers)

    def _has_settled(self, version: Version) -> bool:
        now = time.monotonic()
        if self._settling is None or self._settling[0] != version:
            self._settling = version, now
        return now - self._settling[1] >= SETTLE_SECONDS

    def _note(self, failure: str) -> None:
        """Keep, and log once, why the file is not in force."""
        if failure and failure != self.failure:
            _log.error("%s; the tokens read before stay valid", failure)
        self.failure = failure

    def caller(self, authorization: str | None) -> Caller:
        """Return who sends an `Authorization` header, to a server that has tokens.

        Raises:
            Unauthorized: none was sent, or its token is unknown or expired. Which of these is not said.
        """
        scheme, _, token = (authorization or "").partition(" ")
        caller = self._callers.get(_digest(token.strip()))
        if caller is None or scheme.lower() != "bearer" or time.time() >= caller.expires:
            raise Unauthorized(is_given=authorization is not None)
        return caller


def read_tokens(path: Path) -> tuple[dict[bytes, Caller], Version]:
    """Return the callers of a file of tokens by the SHA-256 of their tokens, and the file's version.

    Raises:
        InvalidParameter: see `Access`.
    """
    try:
        text, about = read_small_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _mistake(path, f"cannot be read: {reason_of(error)}") from error
    callers = parse_tokens(text, path)
    if not callers and not re.search(r"(?m)^\[tokens\]", text):
        raise _mistake(path, "expected tokens, found none; a line [tokens] says that nobody may ask")
    return callers, _version(about)


def _version(about: os.stat_result) -> Version:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def parse_tokens(text: str, path: Path) -> dict[bytes, Caller]:
    """Return what `read_tokens` does, of the text that the file has or is to have."""
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise _mistake(path, f"cannot be read: {reason_of(error)}") from error
    tokens = tables.pop("tokens", {})
    if tables or not isinstance(tokens, dict):
        found = ", ".join(tables) or repr(tokens)
        raise _mistake(path, f"expected tables [tokens.NAME] alone, got {found}")
    callers: dict[bytes, Caller] = {}
    for name, table in tokens.items():
        digest, caller = _read_token(path, name, table)
        if digest in callers:
            raise _mistake(path, f"[tokens.{callers[digest].name}] and [tokens.{name}] are the same token")
        callers[digest] = caller
    return callers


def make_token(
    name: str, scopes: Iterable[str], expires: datetime | None, limits: Mapping[str, int | None]
) -> tuple[str, str]:
    """Return a new token and its table for the file."""
    token = _PREFIX + secrets.token_urlsafe(32)
    quoted = ", ".join(f'"{scope}"' for scope in scopes)
    key = f'"{name}"' if "." in name else name  # a bare key with a dot would be a table in a table
    lines = [f"[tokens.{key}]", f'sha256 = "{_digest(token).hex()}"', f"scopes = [{quoted}]"]
    if expires is not None:
        lines.append(f"expires = {expires.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}")
    lines += [f"{key} = {value}" for key, value in limits.items() if value is not None]
    return token, "\n".join(lines) + "\n"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _read_token(path: Path, name: str, table: Any) -> tuple[bytes, Caller]:
    where = f"[tokens.{name}]"
    if not isinstance(table, dict) or (unknown := set(table) - {"sha256", *KEYS}):
        found = f"unknown {', '.join(sorted(unknown))}" if isinstance(table, dict) else repr(table)
        raise _mistake(path, f"{where} must be a table of {', '.join(('sha256', *KEYS))}; got {found}")
    digest = table.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        # What came is not shown: it may be the token itself.
        found = f"{len(digest)} characters" if isinstance(digest, str) else type(digest).__name__
        raise _mistake(path, f"{where} sha256 must be 64 of the digits 0-9 and a-f, got {found}")
    given = {}
    for field, key in KEYS.items():
        if field in table or key.is_required:
            value = table.get(field)
            if (kept := key.keep(value)) is None:
                raise _mistake(path, f"{where} {field} must be {key.accepted}; got {value!r:.200}")
            given[field] = kept
    return bytes.fromhex(digest), Caller(name, **given)


def _mistake(path: Path, what: str) -> InvalidParameter:
    return InvalidParameter(f"tokens: {path}: {what}", parameter="tokens")
