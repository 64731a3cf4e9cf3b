"""What a loader is given: URLs of a server, or files here, for which one is started."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from corpus_client import errors
from corpus_client.network.endpoint import HOST_AND_PORT, MAX_SOCKET_PATH_BYTES, URL_FORMS
from corpus_client.network.options import Network
from corpus_client.network.own_server import OwnServer
from corpus_client.user_files import read_text

CorpusPath = str | os.PathLike[str]

Servers = CorpusPath | Sequence[str] | Mapping[str, CorpusPath] | OwnServer
"""What a loader takes: URLs of one server's replicas, or what a server is started for."""

_STORES = ("hf", "s3", "gs", "az", "file")
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
        tables = tomllib.loads(read_text(arguments[1])) if arguments[0] == "--config" else {}
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
