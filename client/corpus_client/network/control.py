"""The control plane: descriptions and plans, as JSON over httpx."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import httpcore  # noqa: F401 - httpx does so when a client is made: 20 ms of the wait for a first batch
import httpx

from corpus_client import errors
from corpus_client.network import wire
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.layout import ITEM_BYTES
from corpus_client.network.options import Network
from corpus_client.network.transport import KEEP_ALIVE, is_certificate_error
from corpus_client.observe.telemetry import SentRequest

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDescription:
    """One shard of a plan's corpora: `file` is a posix path in the corpus folder, `data_offset` its byte."""

    corpus: str
    name: str
    file: str
    num_tokens: int
    dtype: str
    data_offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDescription:
    """A stage of a plan; `first_step` is a training step, None where training skips the whole stage."""

    first_step: int | None
    global_batch_size: int
    seq_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundPlan:
    """A plan with the fingerprints of its corpora: what its id stands for."""

    plan_id: str
    document: dict[str, Any]  # canonical; posting it to any replica gives the same id or a refusal
    dtype: str  # numpy name of the tokens in answers
    shards: tuple[ShardDescription, ...]  # the list that the shard numbers of `/v1/indices` count
    stages: tuple[StageDescription, ...]
    eot_id: int | None  # that the server knows of every source; None if it does not, or they differ
    num_steps: int | None = None  # training steps of the plan; None: it has no end
    vocab_size: int | None = None  # of the largest tokenizer among the sources; None: the server knows none
    indices: str = "windows"  # what `/v1/indices` says of rows: their windows, or the pieces that they join
    largest_id: int | None = None  # the largest token id that the server saw in a sample of the sources
    sources: tuple[str, ...] = ()  # names of the corpora, as a batch's sources number them
    is_masked: bool = False  # whether shards of a source have loss masks
    fills_ends: bool = False  # whether rows may end with end-of-text tokens of no document


class ControlPlane:
    """Sends JSON requests to one server, from any thread.

    Proxies of the environment are not used: batches do not go through them either.
    """

    def __init__(self, endpoint: Endpoint, network: Network | None = None) -> None:
        network = network if network is not None else Network()
        self.endpoint = endpoint
        self._credentials = network.credentials
        self._timeout_seconds = network.connect_seconds
        # Plain HTTP has nothing to verify (redirects are not followed); reading certificates costs 25 ms.
        verify = endpoint.tls if endpoint.tls is not None else False
        options = KEEP_ALIVE if endpoint.socket_path is None else None
        self._http = httpx.Client(
            base_url=endpoint.http_url,
            headers=httpx.Headers(
                {"Accept-Encoding": "identity", **network.headers, "Host": endpoint.authority}, "latin-1"
            ),
            auth=self._authorize,
            timeout=self._timeout_seconds,
            trust_env=False,
            transport=httpx.HTTPTransport(verify=verify, uds=endpoint.socket_path, socket_options=options),
        )

    def close(self) -> None:
        """Close the pool of connections."""
        self._http.close()

    def get(self, path: str) -> dict[str, Any]:
        """Ask for the JSON object at a path of the server."""
        return self._json("GET", path)

    def post_plan(self, plan: Mapping[str, Any]) -> BoundPlan:
        """Make the plan known there; idempotent, since a plan's id is its content."""
        try:
            json.dumps(plan, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise errors.InvalidArgument(
                f"plan must hold JSON values alone (NumPy numbers: .item()), got one that does not: {error}"
            ) from error
        answer = self._json("POST", "/v1/plans", body=plan)
        try:
            sources = answer["sources"].values()
            eot_ids = {source.get("eot") for source in sources}
            return BoundPlan(
                plan_id=str(answer["id"]),
                document=dict(answer["plan"]),
                dtype=str(answer["dtype"]),
                shards=_described(ShardDescription, answer["shards"]),
                stages=_described(StageDescription, answer["stages"]),
                eot_id=eot_ids.pop() if len(eot_ids) == 1 else None,
                num_steps=answer["num_steps"],
                indices=str(answer.get("indices", "windows")),
                vocab_size=_largest(source.get("vocab_size") for source in sources),
                largest_id=_largest(source.get("largest_id") for source in sources),
                sources=tuple(answer["sources"]),
                is_masked=any(source.get("num_masks") for source in sources),
                fills_ends=answer.get("fills_ends") is True,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise errors.AnswerCorrupt(
                f"{self.endpoint.name}: not the description of a plan: {answer}"
            ) from error

    def plan_step(self, plan_id: str, step: int) -> int:
        """Ask for the plan step of a training step: the same, but for skipped ones before it."""
        found = self.get(f"/v1/plans/{plan_id}/usage?step={step}").get("plan_step")
        if not isinstance(found, int) or found < step:
            raise errors.AnswerCorrupt(
                f"{self.endpoint.name}: plan_step must be {step} or more, got {found!r}"
            )
        return found

    def receipt(self, plan_id: str, step: int) -> str:
        """Ask for the checksum of a training step's whole global batch, `xxh3-64=<16 hex>`."""
        answer = self.get(f"/v1/plans/{plan_id}/receipt?step={step}")
        digest = answer.get("digest")
        if (answer.get("plan"), answer.get("step")) != (plan_id, step) or not (
            isinstance(digest, str) and wire.DIGEST.fullmatch(digest)
        ):
            raise errors.AnswerCorrupt(
                f"{self.endpoint.name}: not the receipt of step {step} of plan {plan_id}: {answer}"
            )
        return digest

    def places(self, plan_id: str, step: int) -> bytes:
        """Ask where the rows of a training step lie: the bytes that `/v1/indices` answers."""
        request = wire.steps_request("/v1/indices", (1, 0, 2), "int64", step=step, verify=True, plan=plan_id)
        response = self._request("GET", request.path)
        wire.check_tag(response.headers, str(request.identity))
        return wire.checked_array(response.content)

    def tokens(self, corpus: str, start: int, count: int) -> tuple[str, bytes]:
        """Ask for a range of the corpus; return (numpy name of the dtype, little-endian bytes)."""
        path = wire.array_path(f"{wire.corpus_path(corpus)}/tokens", verify=True, start=start, count=count)
        response = self._request("GET", path)
        request = wire.ArrayRequest(
            path=path, shape=(count,), dtype=response.headers.get(wire.DTYPE_HEADER, ""), plan_id=None
        )
        if request.dtype not in ITEM_BYTES:
            raise errors.AnswerCorrupt(f"{self.endpoint.name}: unknown {wire.DTYPE_HEADER} {request.dtype!r}")
        wire.check_headers(response.headers, request)
        return request.dtype, wire.checked_array(response.content)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        response = self._request(method, path, body)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise errors.AnswerCorrupt(
                f"{self.endpoint.name}{path}: must be a JSON object, got {response.text[:200]!r}"
            )
        return answer

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        name, host = self.endpoint.name, self.endpoint.host
        with SentRequest(name, method, path, secrets.token_hex(8)) as sent:
            try:
                self._check_unix_socket()
                # The URL may hold an address, but the certificate is for the name.
                response = self._http.request(
                    method, path, json=body, headers=sent.headers(), extensions={"sni_hostname": host}
                )
            except (httpx.TimeoutException, TimeoutError) as error:
                raise errors.NoProgress(
                    f"{name}: no answer in {self._timeout_seconds:g} s; request {sent.id}"
                ) from error
            except httpx.DecodingError as error:
                raise errors.AnswerCorrupt(f"{name}: DecodingError: {error}; request {sent.id}") from error
            except (httpx.TransportError, OSError) as error:
                for cause in _causes(error):
                    if is_certificate_error(cause):
                        raise errors.CertificateRefused(f"{name}: {cause}") from error
                    if isinstance(cause, socket.gaierror):
                        raise self.endpoint.lookup_failed(cause) from error
                detail = f"{name}: {type(error).__name__}: {error}; request {sent.id}"
                raise errors.ConnectionFailed(detail) from error
            if not response.is_success:
                raise wire.error_from_answer(response.status_code, response.headers, response.content)
        return response

    def _check_unix_socket(self) -> None:
        """Raise `OSError` unless somebody listens on the Unix socket, if the server has one.

        httpcore leaves a socket that cannot be connected to the garbage collector, which complains once for
        each attempt while a server is away. Finding out first takes microseconds.
        """
        if self.endpoint.socket_path is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(self._timeout_seconds)
                probe.connect(self.endpoint.socket_path)

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        if (authorization := self._credentials.header()) is not None:
            request.headers["Authorization"] = authorization
        return request


def _described(kind: type[T], found: list[dict[str, Any]]) -> tuple[T, ...]:
    """Return the descriptions in an answer, which may have more fields than this client knows.

    A server that names no `file` has one shard in each, of the same name.
    """
    whole = ({"file": given.get("name"), **given} for given in found)
    return tuple(kind(**{each.name: given[each.name] for each in fields(kind)}) for given in whole)  # type: ignore[arg-type]


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
