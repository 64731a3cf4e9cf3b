"""Our client as a contender: the loader that prefetches, and its transport asked once at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import CorpusLoader
from corpus_client.endpoint import Endpoint
from corpus_client.remote import RankSlice, steps_request
from corpus_client.replicas import Replicas
from corpus_client.transport import Connection
from corpus_server.plan import Plan
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import Expected, plan_of

PREFETCH_BYTES = 64 << 20
"""A quarter of the loader's default: what was fetched before a round is consumed before it is timed."""

DEADLINE_SECONDS = 60.0


class Ours:
    """`CorpusLoader(dtype=None)`: tokens as stored.

    Args:
        arguments: more of the loader's.
    """

    def __init__(
        self, name: str, url: str, pids: list[int], shape: Shape, path: Path, **arguments: Any
    ) -> None:
        self.name = name
        self.pids = pids
        # Of tiny batches hundreds of thousands would have to be consumed before each round.
        self.ahead_bytes = max(1 << 20, min(PREFETCH_BYTES, 512 * shape.num_bytes))
        self._loader = CorpusLoader(
            url,
            corpus=NAME,
            seq_len=shape.length - 1,
            global_batch_size=shape.rows,
            device="cpu",
            dtype=None,
            prefetch_bytes=self.ahead_bytes,
            **arguments,
        )
        self._expected = Expected(path, Plan.from_json(dict(self._loader.plan)))

    def next(self) -> torch.Tensor:
        return next(self._loader).tokens

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return self._expected.starts(step)

    def close(self) -> None:
        self._loader.close()


class OneAtATime:
    """The client's transport on one open connection: a request of one step, its answer, the next request."""

    def __init__(
        self, name: str, url: str, pids: list[int], shape: Shape, path: Path, *, verify: bool = True
    ) -> None:
        self.name = name
        self.pids = pids
        self.ahead_bytes = 0
        self._verify = verify
        self._shape = (1, shape.rows, shape.length)
        self._expected = Expected(path, plan_of(shape.rows, shape.length - 1))
        with Replicas([url]) as replicas:
            self._plan = replicas.bind(self._expected.plan.to_json())
        self._connection = Connection(Endpoint.parse(url))
        self._batch = torch.empty((shape.rows, shape.length), dtype=torch.uint16)
        self._view = self._batch.numpy().data.cast("B")
        self._step = 0

    def next(self) -> torch.Tensor:
        request = steps_request(
            "/v1/batches",
            self._plan,
            RankSlice(rank=0, world_size=1),
            self._step,
            self._shape,
            "uint16",
            verify=self._verify,
        )
        deadline = time.monotonic() + DEADLINE_SECONDS
        self._connection.send(request.path, deadline=deadline)
        self._connection.receive_into(self._view, request, deadline=deadline)
        self._step += 1
        return self._batch

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return self._expected.starts(step)

    def close(self) -> None:
        self._connection.close()
