"""`source="batches"`: whole batches from the server, straight into the slot."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_client import wire
from corpus_client.control import BoundPlan
from corpus_client.replicas import Exchange, Replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlice:
    """The rows of a global batch that one rank trains on.

    Rank r of W gets rows `[r*G/W, (r+1)*G/W)`: with G = 8, W = 4, rank 1 gets rows 2 and 3. Processes
    with the same slice send the same requests, byte for byte, which caches on the way answer.
    """

    rank: int
    world_size: int


def steps_request(
    route: str,
    plan: BoundPlan,
    part: RankSlice,
    start_step: int,
    shape: tuple[int, int, int],
    dtype: str,
    *,
    verify: bool,
) -> wire.ArrayRequest:
    """The request for consecutive steps of a rank; `shape` begins with the number of steps."""
    path = wire.array_path(
        route,
        verify=verify,
        plan=plan.plan_id,
        step=start_step,
        count=shape[0],
        rank=part.rank,
        world_size=part.world_size,
    )
    return wire.ArrayRequest(path=path, shape=shape, dtype=dtype, plan_id=plan.plan_id, verify=verify)


class BatchFiller:
    """Receives the tokens of a plan's steps."""

    def __init__(
        self, replicas: Replicas, plan: BoundPlan, part: RankSlice, *, seq_len: int, verify: bool
    ) -> None:
        self._replicas = replicas
        self._plan = plan
        self._part = part
        self._seq_len = seq_len
        self._verify = verify

    def begin(self, start_step: int, num_steps: int, num_rows: int) -> Exchange:
        """Send the request for these steps, of `num_rows` rows each."""
        shape = (num_steps, num_rows, self._seq_len + 1)
        dtype = self._plan.dtype
        return self._replicas.begin(
            steps_request(
                "/v1/batches", self._plan, self._part, start_step, shape, dtype, verify=self._verify
            )
        )

    def finish(self, ticket: Exchange, view: memoryview) -> None:
        """Receive them: `(num_steps, rows, seq_len + 1)`, C order."""
        self._replicas.finish(ticket, view)

    def stop(self) -> None:
        """Wake the fetcher thread."""
        self._replicas.stop()

    def close(self) -> None:
        """Close all connections."""
        self._replicas.close()
