"""Requests for consecutive steps of a plan, for one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from corpus_client.network import wire
from corpus_client.network.control import BoundPlan
from corpus_client.network.replicas import Exchange, Replicas


class StepRequests:
    """Receives the tokens of a plan's steps, `(steps, rows, seq_len + 1)` as stored, or where they lie.

    places: receive `(steps, rows, 2) int64`, shard number and start token of each row, instead of tokens.
    """

    def __init__(
        self, replicas: Replicas, plan: BoundPlan, *, rank: int = 0, world_size: int = 1, places: bool = False
    ) -> None:
        self._replicas = replicas
        route, dtype = ("/v1/indices", "int64") if places else ("/v1/batches", plan.dtype)
        part: dict[str, Any] = {"rank": rank, "world_size": world_size, "plan": plan.plan_id}
        self._request = partial(
            wire.steps_request, route, dtype=dtype, verify=replicas.network.verify, **part
        )
        self._places = places

    def begin(self, start_step: int, num_steps: int, shape: tuple[int, int]) -> Exchange:
        """Send the request for these steps; shape: of each batch, rows and tokens of a row."""
        num_rows, window = shape
        asked = num_steps, num_rows, 2 if self._places else window
        return self._replicas.begin(self._request(shape=asked, step=start_step))

    def finish(self, ticket: Exchange, view: memoryview) -> None:
        """Receive them at the start of `view`, C order."""
        self._replicas.finish(ticket, view)

    def stop(self) -> None:
        """Wake the thread that waits here."""
        self._replicas.stop()

    def close(self) -> None:
        """Close all connections."""
        self._replicas.close()


def receive_step(
    replicas: Replicas, plan: BoundPlan, step: int, shape: tuple[int, int], *, rank: int, world_size: int
) -> bytearray:
    """Ask for one training step; return the tokens of a rank, of this shape, as stored in C order."""
    requests = StepRequests(replicas, plan, rank=rank, world_size=world_size)
    exchange = requests.begin(step, 1, shape)
    tokens = bytearray(exchange.request.num_bytes)
    requests.finish(exchange, memoryview(tokens))
    return tokens
