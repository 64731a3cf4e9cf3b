"""How a client talks to servers: deadlines, headers, credentials, certificates; sends nothing."""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path

from corpus_client import errors
from corpus_client.user_files import read_text

Auth = str | os.PathLike[str] | Callable[[], str]
"""A bearer token, the file that holds it, or a function that returns it."""

ATTEMPT_SHARE = 0.25
"""Of the deadline: a silent server leaves time to ask at least three others."""

CONNECT_SECONDS = 10.0
"""TCP has repeated its first packet three times by then."""

MAX_IN_FLIGHT = 64

OWN_HEADERS = ("host", "content-length", "transfer-encoding", "connection", "expect")
"""They say how a request is framed; a second one would make it another request, or none."""

TLS_FILES = ("ca_file", "cert_file", "key_file")

RUN_HEADER = "Corpus-Run"
TRAINED_STEP_HEADER = "Corpus-Trained-Step"

_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t -~\x80-\xff]*")
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Options of the network, the same for every server of a loader.

    Args:
        deadline_seconds: how long one request is tried, over all servers; no attempt takes more than a
            quarter of it.
        reach_seconds: how long a new loader tries to connect to any server at all: most often none was
            started, or the URL is wrong. At most `deadline_seconds`. Default: 30, and 5 if all servers are on
            this host.
        progress_seconds: longest wait for the next byte before the request is sent again.
        in_flight: requests on the wire at a time; two hide the round trip.
        verify: whether each response carries a checksum and is compared with it.
        headers: sent with every request.
        auth: bearer token for every request, the path (`os.PathLike`) of a file that holds it and is read
            again when it changes, or a function that is called for each request.
        ca_file: PEM file of the authorities to trust instead of the system's.
        cert_file, key_file: PEM files of this client's certificate and its key, for servers that ask.
    """

    deadline_seconds: float = 300.0
    reach_seconds: float | None = None
    progress_seconds: float = 30.0
    in_flight: int = 2
    verify: bool = True
    # Both may hold secrets: they stay out of `repr`, and so out of logs.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    auth: Auth | None = field(default=None, repr=False)
    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    credentials: Credentials = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "reach_seconds", "progress_seconds"):
            value = getattr(self, name)
            if value is None and name == "reach_seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
                raise errors.InvalidArgument(f"{name} must be above 0, got {value!r}")
        if self.reach_seconds is not None and self.reach_seconds > self.deadline_seconds:
            raise errors.InvalidArgument(
                f"reach_seconds must be at most deadline_seconds, {self.deadline_seconds:g}, within which a "
                f"request ends; raise both, got {self.reach_seconds:g}"
            )
        if isinstance(self.in_flight, bool) or self.in_flight not in range(1, MAX_IN_FLIGHT + 1):
            raise errors.InvalidArgument(f"in_flight must be in [1, {MAX_IN_FLIGHT}], got {self.in_flight!r}")
        boolean("verify", self.verify)
        for name in TLS_FILES:
            path(name, getattr(self, name), "a PEM file")
        if self.key_file is not None and self.cert_file is None:
            raise errors.InvalidArgument("key_file must come with cert_file, got key_file alone")
        if not isinstance(self.headers, Mapping):
            kind = type(self.headers).__name__
            raise errors.InvalidArgument(f"headers must be a mapping of names to values, got a {kind}")
        for name, value in self.headers.items():
            if (
                not isinstance(name, str)
                or not _NAME.fullmatch(name)
                or not isinstance(value, str)
                or not _VALUE.fullmatch(value)
            ):
                raise errors.InvalidArgument(f"headers must be single lines of Latin-1, got {name!r}")
            if [each.lower() for each in self.headers if isinstance(each, str)].count(name.lower()) > 1:
                raise errors.InvalidArgument(f"headers must name each header once, got {name!r} twice")
            if name.lower() in OWN_HEADERS:
                host = "; the URL names the host" if name.lower() == "host" else ""
                raise errors.InvalidArgument(f"headers must leave {name} to the client{host}")
            if name.lower() == "authorization" and self.auth is not None:
                raise errors.InvalidArgument("auth= and an Authorization header say the same; give one")
        # Made here, so that a wrong one is found now and not by the first request.
        object.__setattr__(self, "credentials", Credentials(self.auth))

    def named(self, run: str | None) -> Network:
        """Return these options for a run of this name, which every request says; None: without one."""
        if run is None:
            return self
        if not isinstance(run, str) or not _RUN.fullmatch(run):
            raise errors.InvalidArgument(
                f"run must be a name of 1 to 64 letters, digits, '.', '_' or '-', got {run!r}"
            )
        if RUN_HEADER.lower() in {name.lower() for name in self.headers}:
            raise errors.InvalidArgument(f"run= and a {RUN_HEADER} header say the same; give one")
        return replace(self, headers={**self.headers, RUN_HEADER: run})

    @property
    def attempt_seconds(self) -> float:
        """The longest that one attempt may take."""
        return self.deadline_seconds * ATTEMPT_SHARE

    @property
    def connect_seconds(self) -> float:
        """The longest that opening a connection, or a question of the control plane, may take."""
        return min(CONNECT_SECONDS, self.attempt_seconds)

    def tls_context(self) -> ssl.SSLContext:
        """Make what https needs: authorities to trust, and this client's certificate if it has one."""
        given = [each for name in TLS_FILES if (each := getattr(self, name)) is not None]
        try:
            for each in given:  # OpenSSL would wait for the writer of a named pipe
                if Path(each).exists() and not Path(each).is_file():
                    raise OSError(f"{os.fspath(each)} is no regular file")
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise errors.InvalidArgument(
                f"ca_file, cert_file and key_file must be PEM files, got "
                f"{', '.join(map(str, given))}: {error}"
            ) from error
        return context


def boolean(name: str, value: object, or_none: bool = False) -> None:
    """Raise `InvalidArgument` unless the value is True or False: a text such as "no" would count as True."""
    if not isinstance(value, bool) and not (or_none and value is None):
        choices = "True, False or None" if or_none else "True or False"
        raise errors.InvalidArgument(f"{name} must be {choices}, got {value!r}")


def path(name: str, value: object, what: str) -> None:
    """Raise `InvalidArgument` unless the value is a path or None: an empty one passes for None or `.`."""
    if value is not None and (not isinstance(value, str | os.PathLike) or value == ""):
        raise errors.InvalidArgument(f"{name} must be the path of {what}, got {value!r}")


class Credentials:
    """The value of the `Authorization` header, asked for at every request; the token is never shown."""

    def __init__(self, auth: Auth | None) -> None:
        self._auth = auth
        self._stamp: tuple[int, ...] = ()
        self._from_file = ""
        if isinstance(auth, str | os.PathLike):
            self.header()
        elif auth is not None and not callable(auth):
            raise errors.InvalidArgument(
                f"auth must be a token, the path of a file or a function, got {type(auth).__name__}"
            )

    def header(self) -> str | None:
        """Return `Bearer TOKEN`, or None without `auth`; refuse a token that does not fit into a header."""
        auth, source = self._auth, "auth"
        if auth is None:
            return None
        if isinstance(auth, str):
            token = auth
        elif isinstance(auth, os.PathLike):
            token, source = self._read(auth), f"the file {os.fspath(auth)!r} of auth"
        else:
            source = "the function of auth"
            try:
                token = auth()
            except Exception as error:
                raise errors.InvalidArgument(f"{source} failed: {type(error).__name__}") from error
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            what = "an empty one" if token == "" else "something else"
            raise errors.InvalidArgument(f"{source} must give a token of ASCII without spaces, got {what}")
        return f"Bearer {token}"

    def _read(self, path: os.PathLike[str]) -> str:
        """Return the file's token; a stat per request (2 microseconds) tells whether it changed."""
        try:
            status = Path(path).stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if stamp != self._stamp:
                self._from_file = read_text(path).strip() or self._from_file
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            # While it is being replaced the file may be missing or empty: the last token may still do.
            if not self._from_file:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise errors.InvalidArgument(
                    f"auth must name a file with a token, got {os.fspath(path)!r}: {why}"
                ) from None
        return self._from_file
