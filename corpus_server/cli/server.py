"""What commands ask: the routes of a server at a URL, or the same ones in this process (`files.py`)."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlencode, urlsplit
from urllib.request import (
    HTTPHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
    getproxies,
    proxy_bypass,
)

import typer

from corpus_server.admission.request import RUN
from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.plan import Plan
from corpus_server.plan.canonical import canonical, id_of
from corpus_server.plan.chain import Continued, KeptLink
from corpus_server.plan_store import PlanStore
from corpus_server.settings import default_state_dir
from corpus_server.user_files import reason_of

_ANOTHER = "does a corpus-server answer there, or a proxy or another program?"
_SECONDS = 60  # until a server must have answered
_MAX_PLANS = 1000  # of one list

SHORT_ID = 12
"""Digits of a plan's id in tables."""

StateDir = Annotated[
    Path | None, typer.Option(help="The server's --state-dir.", show_default="~/.local/state/corpus-server")
]
ServerUrl = Annotated[
    str | None, typer.Argument(metavar="URL", help="Ask a server, instead of reading its state.")
]
PlanId = Annotated[str, typer.Argument(help="A plan's id, or the beginning of it.")]


class Asked(ABC):
    """What answers the routes under `/v1`."""

    @abstractmethod
    def ask(self, path: str, body: bytes | None = None, **query: Any) -> Any:
        """Return the JSON that a route answers with; `body`, if there is one, is posted to it.

        Raises:
            CorpusServerError: the question is refused, or nobody answers.
        """

    def of_corpus(self, name: str | None) -> tuple[str, str]:
        """Return the name and the path of a corpus; None stands for the only one."""
        if name is None:
            served = [each["name"] for each in self.ask("/v1/corpora")["corpora"]]
            if len(served) != 1:
                raise InvalidParameter(
                    f"name a corpus with --corpus: {', '.join(served)}", parameter="corpus"
                )
            (name,) = served
        return name, f"/v1/corpora/{quote(name, safe='')}"


def server_url(text: str) -> str | None:
    """Return the URL of a server, to which `host:port` is completed; None for anything else."""
    if text.startswith(("http://", "https://", "uds:///")):
        return text
    is_address = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):[0-9]+(/.*)?", text) and not Path(text).exists()
    return f"http://{text}" if is_address else None


def known_url(url: str, parameter: str = "url") -> str:
    """Return the URL of a server, or refuse what is none."""
    if (address := server_url(url)) is None:
        raise InvalidParameter.expected(parameter, "http://host:port of a server", url)
    return address


class Server(Asked):
    """A server at a URL; `CORPUS_TOKEN` is its access token. It finds plans as `PlanStore` does.

    The proxy of the environment is used as by other programs, but never for this machine.
    """

    def __init__(self, url: str) -> None:
        self._url = self._base = url.rstrip("/")
        try:
            self._proxy = _proxy_of(self._url)
        except ValueError as error:
            raise InvalidParameter(f"no URL of a server: {self._url} ({error})", parameter="url") from error
        self._opener = build_opener(ProxyHandler(None if self._proxy else {}))
        if self._url.startswith("uds://"):
            self._opener, self._base = _unix_opener(unquote(urlsplit(self._url).path)), "http://localhost"

    def ask(self, path: str, body: bytes | None = None, **query: Any) -> Any:
        """Return the JSON that a route answers with."""
        try:
            request = Request(f"{self._base}{path}" + (f"?{urlencode(query)}" if query else ""), data=body)
            request.add_header(RUN, "corpus-server")
            if token := os.environ.get("CORPUS_TOKEN", "").strip():
                request.add_header("Authorization", f"Bearer {token}")
            with self._opener.open(request, timeout=_SECONDS) as response:
                body = response.read()
            try:
                return json.loads(body)
            except ValueError as error:
                raise CorpusServerError(
                    f"{self._url}{self._through} answered HTTP {response.status} without JSON",
                    remedy=_ANOTHER,
                ) from error
        except HTTPError as error:
            raise _refusal(error, f"{self._url}{self._through}") from error
        except (OSError, HTTPException, ValueError) as error:
            asked = "is the server running?"
            if self._proxy:
                asked = f"does the proxy reach it? NO_PROXY={urlsplit(self._url).hostname} goes without one"
            reason = getattr(error, "reason", error)  # of a URLError, an error or a text
            why = reason_of(reason) if isinstance(reason, Exception) else reason
            raise CorpusServerError(
                f"no response from {self._url}{self._through}: {why}", remedy=asked
            ) from error

    @property
    def _through(self) -> str:
        return f" through the proxy {self._proxy} of the environment" if self._proxy else ""

    def newest(self, limit: int, run: str | None = None) -> list[tuple[Plan, float, tuple[str, ...]]]:
        """Return the plans seen last, or those of a run, each with its Unix time and its runs."""
        query = {"limit": min(limit, _MAX_PLANS)} | ({} if run is None else {"run": run})
        return [
            (Plan.from_json(each["plan"]), each["seen_unix_seconds"], tuple(each["runs"]))
            for each in self.ask("/v1/plans", None, **query)["plans"]
        ]

    def id_of(self, prefix: str) -> str:
        """Return the id of the one plan that it begins, also if the plan continues another one."""
        return str(self.ask(f"/v1/plans/{quote(prefix, safe='')}")["id"])

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`, also if it continues another one."""
        saved = self.ask(f"/v1/plans/{quote(prefix, safe='')}/file")
        documents = [canonical(each) for each in saved["links"]]
        root = Plan.from_json(saved["plan"])
        links = [KeptLink(id_of(each), each) for each in documents]
        plan = Continued.restored(root, links) if links else root
        if plan is None or plan.id != saved["id"]:
            raise CorpusServerError(
                f"what {self._url} says of plan {saved['id']} comes to another id",
                remedy="ask a server of the same release as this command",
            )
        return plan


def _proxy_of(url: str) -> str | None:
    """Return the proxy through which a URL is reached, without its password; None: there is none."""
    parts = urlsplit(url)
    host, proxy = parts.hostname or "", getproxies().get(parts.scheme)
    if not proxy or _is_here(host) or proxy_bypass(host):
        return None
    return re.sub("//[^/@]*@", "//", proxy)


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _unix_opener(path: str) -> OpenerDirector:
    """Return what asks the server behind a Unix socket."""

    class Connection(HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(path)

    class Handler(HTTPHandler):
        def http_open(self, request: Request) -> HTTPResponse:
            return self.do_open(Connection, request)

    return build_opener(ProxyHandler({}), Handler)


def _refusal(error: HTTPError, asked: str) -> CorpusServerError:
    try:
        problem = json.loads(error.read())
        return CorpusServerError(problem["detail"], remedy=problem.get("remedy"))
    except (OSError, HTTPException, ValueError, TypeError, KeyError):  # a proxy's page
        return CorpusServerError(f"{asked} answered HTTP {error.code} {error.reason}", remedy=_ANOTHER)


@contextmanager
def opened_plans(state_dir: Path | None, url: str | None) -> Iterator[PlanStore | Server]:
    """Yield what knows the plans: a server, or the state folder of one."""
    if url is None:
        with PlanStore(state_dir or default_state_dir(), read_only=True) as store:
            yield store
    elif state_dir is not None:
        raise InvalidParameter.expected("state_dir", "left out with a server's URL", str(state_dir))
    else:
        yield Server(known_url(url))
