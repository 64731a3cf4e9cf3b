"""The control plane: descriptions and plans, as JSON over httpx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpcore  # noqa: F401 - httpx does so when a client is made: 20 ms of the wait for a first batch
import httpx

from corpus_client import errors, wire
from corpus_client.endpoint import Endpoint
from corpus_client.unix import UnixTransport

TIMEOUT_SECONDS = 10.0
"""Bounds a wait that `close` cannot interrupt; descriptions are computed in milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDescription:
    """One shard of a plan's corpora, as the server has it.

    Args:
        name: path relative to the corpus folder, posix.
        data_offset: byte of the first token in the file.
    """

    corpus: str
    name: str
    num_tokens: int
    dtype: str
    data_offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDescription:
    """When a stage of a plan begins, as the server counts.

    Args:
        first_step: its first training step; None: training skips the whole stage.
    """

    first_step: int | None
    global_batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundPlan:
    """A plan with the fingerprints of its corpora: what its id stands for.

    Args:
        document: the canonical plan; posting it to any replica gives the same id or a refusal.
        dtype: numpy name of the tokens in answers.
        shards: the list that the shard numbers of `/v1/indices` count.
        stages: of the plan, in order.
    """

    plan_id: str
    document: dict[str, Any]
    dtype: str
    shards: tuple[ShardDescription, ...]
    stages: tuple[StageDescription, ...]


class ControlPlane:
    """JSON requests to one server.

    Proxies of the environment are not used: batches do not go through them either.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        transport = None
        if endpoint.socket_path is not None:
            transport = UnixTransport(endpoint.socket_path, timeout_seconds=timeout_seconds)
        self._http = httpx.Client(
            base_url=endpoint.http_url,
            headers=dict(headers or {}),
            timeout=timeout_seconds,
            trust_env=False,
            # Plain HTTP has nothing to verify (redirects are not followed); reading certificates costs 25 ms.
            verify=endpoint.tls if endpoint.tls is not None else False,
            transport=transport,
        )

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the pool of connections."""
        self._http.close()

    def check_alive(self) -> None:
        """Raise unless a server's process answers."""
        if self._json("GET", "/healthz").get("status") != "alive":
            raise errors.AnswerCorrupt(f"{self.endpoint.url}/healthz: not the answer of a corpus-server")

    def check_ready(self) -> None:
        """Raise `ServerError`, which says why, unless corpora are unchanged and plans can be kept."""
        self._json("GET", "/readyz")

    def version(self) -> str:
        """Of the server."""
        return str(self._json("GET", "/openapi.json").get("info", {}).get("version", "unknown"))

    def corpus(self, name: str) -> dict[str, Any]:
        """Description of one corpus."""
        return self._json("GET", wire.corpus_path(name))

    def corpora(self) -> list[dict[str, Any]]:
        """Descriptions of all corpora."""
        return list(self._json("GET", "/v1/corpora")["corpora"])

    def post_plan(self, plan: Mapping[str, Any]) -> BoundPlan:
        """Make the plan known there; idempotent, since a plan's id is its content."""
        answer = self._json("POST", "/v1/plans", body=plan)
        try:
            return BoundPlan(
                plan_id=str(answer["id"]),
                document=dict(answer["plan"]),
                dtype=str(answer["dtype"]),
                shards=tuple(
                    ShardDescription(**{name: shard[name] for name in ShardDescription.__slots__})
                    for shard in answer["shards"]
                ),
                stages=tuple(
                    StageDescription(**{name: stage[name] for name in StageDescription.__slots__})
                    for stage in answer["stages"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise errors.AnswerCorrupt(
                f"{self.endpoint.url}: not the description of a plan: {answer}"
            ) from error

    def plan_step(self, plan_id: str, step: int) -> int:
        """The plan step of a training step: the same, but for skipped ones before it."""
        answer = self._json("GET", wire.plan_path(plan_id, "usage", step=step))
        found = answer.get("plan_step")
        if not isinstance(found, int) or found < step:
            raise errors.AnswerCorrupt(
                f"{self.endpoint.url}: plan_step must be {step} or more, got {found!r}"
            )
        return found

    def receipt(self, plan_id: str, step: int) -> str:
        """Checksum of a training step's whole global batch, `xxh3-64=<16 hex>`."""
        answer = self._json("GET", wire.plan_path(plan_id, "receipt", step=step))
        digest = answer.get("digest")
        if (answer.get("plan"), answer.get("step")) != (plan_id, step) or not (
            isinstance(digest, str) and wire.DIGEST.fullmatch(digest)
        ):
            raise errors.AnswerCorrupt(
                f"{self.endpoint.url}: not the receipt of step {step} of plan {plan_id}: {answer}"
            )
        return digest

    def places(self, plan_id: str, step: int) -> bytes:
        """Where the rows of a training step lie: raw `(rows, 2) int64`, shard number and start token."""
        path = wire.array_path("/v1/indices", verify=True, plan=plan_id, step=step)
        return wire.checked_array(self._request("GET", path).content)

    def tokens(self, corpus: str, start: int, count: int) -> tuple[str, bytes]:
        """A raw range of the corpus: (numpy name of the dtype, little-endian bytes)."""
        path = wire.array_path(f"{wire.corpus_path(corpus)}/tokens", verify=True, start=start, count=count)
        response = self._request("GET", path)
        request = wire.ArrayRequest(
            path=path, shape=(count,), dtype=response.headers.get(wire.DTYPE_HEADER, ""), plan_id=None
        )
        if request.dtype not in wire.ITEM_BYTES:
            raise errors.AnswerCorrupt(f"{self.endpoint.url}: unknown {wire.DTYPE_HEADER} {request.dtype!r}")
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
                f"{self.endpoint.url}{path}: must be a JSON object, got {response.text[:200]!r}"
            )
        return answer

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise errors.NoProgress(
                f"{self.endpoint.url}: no answer in {self._timeout_seconds:g} s"
            ) from error
        except httpx.TransportError as error:
            raise errors.ConnectionFailed(f"{self.endpoint.url}: {type(error).__name__}: {error}") from error
        if not response.is_success:
            raise wire.error_from_answer(response.status_code, response.headers, response.content)
        return response
