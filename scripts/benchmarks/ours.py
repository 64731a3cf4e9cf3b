"""Make contenders of our client: the loader that prefetches, and its transport with one request at a time."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import CorpusLoader, Network, Staging
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.replicas import Replicas
from corpus_client.network.transport import Connection
from corpus_client.network.wire import steps_request
from corpus_client.staging.slots import choose_slot_sizes
from scripts.benchmarks.contender import Delivered, Shape
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import Expected, document_of
from scripts.benchmarks.servers import Server, own_servers

PREFETCH_BYTES = 64 << 20
"""A quarter of the loader's default: a turn begins by consuming what was prefetched before it."""

IN_FLIGHT = 2  # requests, as the loader does by default
DEADLINE_SECONDS = 60.0


def ahead_bytes(shape: Shape) -> int:
    """Return the loader's budget for a shape; tiny batches get less, or settling would take minutes."""
    return max(1 << 20, min(PREFETCH_BYTES, 512 * shape.num_bytes))


def steps_per_request(shape: Shape) -> int:
    """Return how many steps the loader asks for at once, which is a slot of its ring."""
    ring = choose_slot_sizes(
        batch_bytes=shape.num_bytes, prefetch_bytes=ahead_bytes(shape), in_flight=IN_FLIGHT
    )
    return ring.steps_per_slot


class Ours:
    """Deliver by `CorpusLoader`.

    Args:
        server: None: the one that the loader starts for the corpus's path.
        dtype, local_root, verify: options of the loader; without a dtype tokens are as stored.
        fields: of the plan, as of `document_of`.
    """

    def __init__(
        self,
        name: str,
        server: Server | None,
        shape: Shape,
        path: Path,
        *,
        dtype: torch.dtype | None = None,
        local_root: Path | None = None,
        verify: bool = True,
        **fields: Any,
    ) -> None:
        self.name = name
        self.ahead_bytes = ahead_bytes(shape)
        self._dtype = dtype
        self._loader = CorpusLoader(
            {NAME: path} if server is None else server.url,
            plan=document_of(shape, **fields),
            device="cpu",
            dtype=dtype,
            network=Network(in_flight=IN_FLIGHT, verify=verify),
            staging=Staging(prefetch_bytes=self.ahead_bytes, local_root=local_root),
        )
        self.pids = own_servers() if server is None else server.pids
        self._plan = path, shape, fields

    @cached_property
    def _expected(self) -> Expected:
        path, shape, fields = self._plan
        return Expected(path, shape, **fields)

    def next(self) -> Delivered:
        batch = next(self._loader)
        return batch.tokens if self._dtype is None else (batch.inputs, batch.targets)

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return self._expected.starts(step)

    def close(self) -> None:
        self._loader.close()


class OneAtATime:
    """Deliver by the client's transport on one open connection: one request, its response, the next request.

    Args:
        same_step: ask for step 0 again and again, which a cache can answer.
    """

    def __init__(
        self,
        name: str,
        server: Server,
        shape: Shape,
        path: Path,
        *,
        verify: bool = True,
        same_step: bool = False,
    ) -> None:
        self.name = name
        self.pids = server.pids
        self.ahead_bytes = 0
        self._verify = verify
        self._stride = 0 if same_step else 1
        self._shape = (1, shape.rows, shape.length)
        self._expected = Expected(path, shape)
        with Replicas([server.url]) as replicas:
            self._plan = replicas.bind(document_of(shape))
        self._connection = Connection(Endpoint.parse(server.url))
        self._batch = torch.empty((shape.rows, shape.length), dtype=torch.uint16)
        self._view = self._batch.numpy().data.cast("B")
        self._step = 0

    def next(self) -> torch.Tensor:
        request = steps_request(
            "/v1/batches",
            self._shape,
            "uint16",
            step=self._step,
            verify=self._verify,
            plan=self._plan.plan_id,
        )
        deadline = time.monotonic() + DEADLINE_SECONDS
        self._connection.send(request.path, deadline=deadline)
        self._connection.receive_into(self._view, request, deadline=deadline)
        self._step += self._stride
        return self._batch

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return self._expected.starts(step * self._stride)

    def close(self) -> None:
        self._connection.close()
