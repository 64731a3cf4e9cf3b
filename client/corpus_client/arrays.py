"""Batches as NumPy arrays, for JAX and other frameworks: the loader's network and plan, without torch.

There is no thread. A request for the steps behind the current ones is on the wire while the caller computes,
and the kernel's socket buffer holds what has arrived of its response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from corpus_client.network.control import BoundPlan
from corpus_client.network.given import Servers
from corpus_client.network.layout import ITEM_BYTES, batch_bytes, parts
from corpus_client.network.options import Network
from corpus_client.observe.recorder import Recorder
from corpus_client.plan.hints import check_groups
from corpus_client.plan.iteration import NumSteps, PlanLoader, lets_go_on_error
from corpus_client.plan.requests import AheadRequests, arrays_beside
from corpus_client.plan.schedule import pieces, rank_shapes
from corpus_client.plan.state import make_state
from corpus_client.plan.world import find_rank

REQUEST_BYTES = 4 << 20
"""Steps share a request up to this size; a batch that is kept keeps the memory of its whole request."""

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class ArrayBatch:
    """One rank's part of one step, the caller's own. It unpacks into `inputs, targets`.

    tokens: `(rows, seq_len + 1)` as stored, C order.
    sources: `(rows,) uint16`, numbers into `ArrayLoader.sources`; None where they were not asked for.
    loss_mask: `(rows, seq_len) bool`, False where a corpus's mask leaves the target out; float32 where a mask
        of the plan's corpora holds weights; None without masks.
    """

    step: int
    tokens: Tokens
    plan: BoundPlan
    sources: Tokens | None = None
    loss_mask: npt.NDArray[np.bool_ | np.float32] | None = None

    def __repr__(self) -> str:
        return f"ArrayBatch(step={self.step}, {self.tokens.shape} {self.tokens.dtype})"

    @property
    def inputs(self) -> Tokens:
        """`(rows, seq_len)`, a view of `tokens`."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tokens:
        """`(rows, seq_len)`, a view of `tokens`, one token further than `inputs`."""
        return self.tokens[:, 1:]

    def state_after(self) -> dict[str, Any]:
        """Return the state to save once this batch was trained on: a run resumed from it begins behind it."""
        return make_state(self.plan, self.step + 1)

    def __iter__(self) -> Iterator[Tokens]:
        return iter((self.inputs, self.targets))


class ArrayLoader(PlanLoader[ArrayBatch]):
    """Yield the batches of a plan, step after step, for ever (or up to `num_steps`).

    `close` it, or use it as a context manager; asking for a batch afterwards opens new connections. Retries,
    failover, checksums, states and what is refused (a second thread, a fork, a pass after the last step) are
    those of `CorpusLoader`, and so are the arguments of the same names.

    Args:
        rank, world_size: default RANK and WORLD_SIZE, then 0 and 1. With JAX pass `jax.process_index()` and
            `jax.process_count()`.
        sources: bring `ArrayBatch.sources`, the source of each row.
        loss_mask: whether masks of the corpora come, as `ArrayBatch.loss_mask`; None: if there are any.
        num_steps, reiterable: as `CorpusLoader` has them; the last batch of `"epoch"` is short.
        plan: `corpus` (or `epochs`, `tokens`), `seq_len`, `global_batch_size`, `seed` and `order`, or a whole
            `plan`.
    """

    @lets_go_on_error
    def __init__(
        self,
        urls: Servers,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_steps: NumSteps = None,
        sources: bool = False,
        loss_mask: bool | None = None,
        run: str | None = None,
        reiterable: bool = False,
        network: Network | None = None,
        **plan: Any,
    ) -> None:
        check_groups({"network": (Network, network)})
        network = network or Network()
        super().__init__(urls, network, num_steps, run, reiterable=reiterable)
        document = self._requested(plan.pop("plan", None), plan.pop("corpus", None), **plan)
        self.place = find_rank(rank, world_size)  # rank and world size, as given or found
        self._in_flight = network.in_flight
        self._recorder = Recorder()
        with self._connect() as replicas:
            self._bound = replicas.bind(document)
        self._settle_end()
        self._beside = arrays_beside(self._bound, sources=sources, loss_mask=loss_mask)
        self._step_ranges = rank_shapes(self._bound.stages, self.place[1], self._bound.num_steps)
        self._ahead: AheadRequests | None = None
        self._received: deque[tuple[Tokens, ...]] = deque()  # of each step

    def __next__(self) -> ArrayBatch:
        """Return the next step's batch. After an error the same step is asked for again."""
        self._check_thread()
        try:
            if not self._received:
                self._receive()
            batch = self._batch(self._step, self._received.popleft())
            self._recorder.yielded_step = self._step
            self._step, self._used = self._step + 1, True
        except BaseException as error:
            # An interrupt (Ctrl-C), too: it may fall between taking a batch and counting it.
            self._used = self._used or isinstance(error, StopIteration)
            self._stop()
            if isinstance(error, StopIteration):
                self._tell_end()
            raise
        return batch

    def peek(self, step: int) -> ArrayBatch:
        """Return the batch of any step; the loader stays where it is."""
        request, body = self._receive_step(step, self._step_ranges, self._beside)
        arrays = (np.ndarray(*part) for part in parts(memoryview(body), request.arrays))
        return self._batch(step, tuple(array[0] for array in arrays))

    def _batch(self, step: int, arrays: tuple[Tokens, ...]) -> ArrayBatch:
        rows = self._rows_left(step, len(arrays[0]))
        tokens, *beside = (array[:rows] for array in arrays)
        named: dict[str, Any] = {each.name: array for each, array in zip(self._beside, beside, strict=True)}
        if "loss_mask" in named:
            kind = np.float32 if self._bound.has_weights else np.bool_
            named["loss_mask"] = named["loss_mask"][:, 1:].astype(kind)
        return ArrayBatch(step=step, tokens=tokens, plan=self._bound, **named)

    def _stop(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._owner.is_here:  # else the sockets are the parent's
            ahead.requests.close()
        self._received.clear()

    def _receive(self) -> None:
        """Receive the oldest answer, with as many newer requests on the wire as may be."""
        if self._ahead is None:
            itemsize = ITEM_BYTES[self._bound.dtype]
            wanted = pieces(
                self._step_ranges,
                self._step,
                self._end_step,
                max_bytes=REQUEST_BYTES,
                batch_bytes=lambda shape: batch_bytes(self._beside, shape, itemsize),
            )
            self._ahead = AheadRequests(
                self._step_requests(self._beside, self._recorder), wanted, self._in_flight
            )
        exchange, _ = self._ahead.next()
        body = np.empty(exchange.request.num_bytes, np.uint8).data
        self._ahead.requests.finish(exchange, body)
        arrays = (np.ndarray(*part) for part in parts(body, exchange.request.arrays))
        self._received.extend(zip(*arrays, strict=True))
