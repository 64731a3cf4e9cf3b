"""Requests for consecutive steps of a plan, for one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from corpus_client.network import wire
from corpus_client.network.control import BoundPlan
from corpus_client.network.layout import BESIDE, Beside
from corpus_client.network.options import boolean
from corpus_client.network.replicas import Exchange, Replicas
from corpus_client.plan.schedule import Piece


class StepRequests:
    """Receives the tokens of a plan's steps, `(steps, rows, seq_len + 1)` as stored, or where they lie.

    places: receive `(steps, rows, 2) int64`, shard number and start token of each row, instead of tokens; of
        rows that join pieces `(pieces, 4) int64`, see `wire.PIECE_ITEMS`.
    beside: the arrays to receive behind that.
    """

    def __init__(
        self,
        replicas: Replicas,
        plan: BoundPlan,
        *,
        rank: int = 0,
        world_size: int = 1,
        places: bool = False,
        beside: Sequence[Beside] = (),
    ) -> None:
        self._plan, self._rank, self._world_size, self._places = plan, rank, world_size, places
        self._beside = beside
        self._replicas = replicas
        self.finish, self.stop, self.close = replicas.finish, replicas.stop, replicas.close

    def follow(self, plan: BoundPlan) -> bool:
        """Ask by a plan that continues the one so far, from now on; from any thread. True: it is done."""
        self._replicas.follow(plan)
        self._plan = plan
        return True

    def begin(self, start_step: int, num_steps: int, shape: tuple[int, int]) -> Exchange:
        """Send the request for these steps; shape: of each batch, rows and tokens of a row."""
        are_pieces = self._places and self._plan.indices == "pieces"
        return self._replicas.begin(
            wire.steps_request(
                "/v1/indices" if self._places else "/v1/batches",
                (num_steps, shape[0], 2 if self._places and not are_pieces else shape[1]),
                "int64" if self._places else self._plan.dtype,
                step=start_step,
                rank=self._rank,
                world_size=self._world_size,
                verify=self._replicas.network.verify,
                are_pieces=are_pieces,
                beside=self._beside,
                row_tokens=shape[1],
                plan=self._plan.plan_id,
            )
        )


def arrays_beside(plan: BoundPlan, *, sources: bool, loss_mask: bool | None) -> tuple[Beside, ...]:
    """Return the arrays to ask for; None: the loss mask where the plan's corpora have any."""
    boolean("sources", sources)
    boolean("loss_mask", loss_mask, or_none=True)
    mask = BESIDE["loss_mask"]._replace(dtype=plan.mask_dtype)
    wanted = {BESIDE["sources"]: sources, mask: plan.is_masked if loss_mask is None else loss_mask}
    return tuple(each for each, is_wanted in wanted.items() if is_wanted)


class AheadRequests:
    """Asks for pieces of a plan in order, with `in_flight` of `requests` on the wire."""

    def __init__(self, requests: StepRequests, pieces: Iterator[Piece], in_flight: int) -> None:
        self.requests = requests
        self._pieces = pieces
        self._in_flight = in_flight
        self._asked: deque[tuple[Exchange, int]] = deque()  # with the tokens of a row

    def ask(self) -> None:
        """Send as many requests as may be on the wire."""
        while len(self._asked) < self._in_flight and (piece := next(self._pieces, None)) is not None:
            self._asked.append((self.requests.begin(*piece), piece[2][1]))

    def next(self) -> tuple[Exchange, int]:
        """Return the oldest request, to be finished, and the tokens of a row; or raise `StopIteration`."""
        self.ask()
        if not self._asked:
            raise StopIteration
        return self._asked.popleft()
