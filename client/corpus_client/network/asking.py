"""One server's responses to questions, by httpx; `transport` brings the batches."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Collection
from contextlib import closing, suppress
from contextvars import ContextVar
from typing import TypeVar

import httpcore  # noqa: F401 - httpx does so when a client is made: 20 ms of the wait for a first batch
import httpx

from corpus_client import errors
from corpus_client.network import wire
from corpus_client.network.control import Question
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.options import Network
from corpus_client.network.transport import failure
from corpus_client.observe.telemetry import SentRequest

T = TypeVar("T")

_IS_ASKING: ContextVar[bool] = ContextVar("is_asking", default=False)


class _NotOurs(logging.Filter):
    """Lets httpx log the requests of others: a training script that logs at INFO does not ask for ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _IS_ASKING.get()


logging.getLogger("httpx").addFilter(_NotOurs())

MAX_RESPONSE_BYTES = 64 << 20
"""Of a response to a question; the description of a plan of 100,000 shards has 20 MB."""

_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For plain HTTP, which verifies nothing. Without it httpx makes one for each client, in whatever thread. A
process that is forked meanwhile inherits OpenSSL's locks as they are, and may wait for them for ever."""


def tell(urls: Collection[str], question: Question[T], network: Network, *, seconds: float) -> None:
    """Tell the first server that answers something that decides nothing, and wait for that so long at most.

    Where none answers, nothing is said: whoever tells is about to end.
    """

    def ask() -> None:
        for url in urls:
            with suppress(errors.CorpusClientError):
                known = Endpoint.parse(url, network)
                endpoint = known if known.address is not None else known.resolve()[0]
                with closing(HttpClient(endpoint, network)) as client:
                    client.ask(question)
                return

    thread = threading.Thread(target=ask, name="corpus-tell", daemon=True)
    with suppress(RuntimeError):  # the interpreter ends, or there can be no more threads
        thread.start()
        thread.join(seconds)


class HttpClient:
    """Asks one server; belongs to one thread at a time.

    Proxies of the environment are not used: batches do not go through them either.
    """

    def __init__(self, endpoint: Endpoint, network: Network) -> None:
        self.endpoint = endpoint
        self._network = network
        headers = {"Host": endpoint.authority, "Accept-Encoding": "identity", **network.headers}
        self._http = httpx.Client(
            base_url=endpoint.http_url,
            headers=httpx.Headers(headers, "latin-1"),
            timeout=network.connect_seconds,
            trust_env=False,
            transport=httpx.HTTPTransport(verify=endpoint.tls or _PLAIN, uds=endpoint.socket_path),
        )

    def ask(self, question: Question[T]) -> T:
        """Return the server's response, or raise what went wrong; nothing is repeated here."""
        name, method, headers = self.endpoint.name, question.method, {**question.headers}
        if question.body is not None:
            method, headers["Content-Type"] = "POST", "application/json"
        if (authorization := self._network.credentials.header()) is not None:
            headers["Authorization"] = authorization
        asking = _IS_ASKING.set(True)
        with SentRequest(name, method, question.path, secrets.token_hex(8)) as sent:
            try:
                if self.endpoint.socket_path is not None:
                    # httpcore leaves one that cannot be connected to the garbage collector, which complains.
                    with socket.socket(socket.AF_UNIX) as probe:
                        probe.settimeout(self._network.connect_seconds)
                        probe.connect(self.endpoint.socket_path)
                with self._http.stream(
                    method,
                    question.path,
                    content=question.body,
                    headers=headers | sent.headers(),
                    # The URL holds an address, but the certificate is for the name.
                    extensions={"sni_hostname": self.endpoint.host},
                ) as response:
                    body = bytearray()
                    for part in response.iter_bytes():
                        body += part
                        if len(body) > MAX_RESPONSE_BYTES:
                            raise errors.ResponseCorrupt(
                                f"{question.path} must answer at most {MAX_RESPONSE_BYTES:,} bytes, got more"
                            )
                if not response.is_success or response.status_code in (204, 206):  # nothing, or a part
                    raise wire.error_from_response(response.status_code, response.headers, bytes(body))
                return question.parse(response.headers, bytes(body))
            except (httpx.DecodingError, errors.ResponseCorrupt) as error:
                kind = errors.ResponseCorrupt if isinstance(error, httpx.DecodingError) else type(error)
                raise kind(f"{name}: {error}; request {sent.id}") from error
            except (httpx.TransportError, OSError) as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OSError):
                    cause = cause.__cause__ or cause.__context__
                raise failure(self.endpoint, cause or error, request_id=sent.id) from error
            finally:
                _IS_ASKING.reset(asking)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()
