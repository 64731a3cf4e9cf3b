"""The loader: what a training loop sees."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch

from corpus_client import errors, local, state, world
from corpus_client.buffers import allocate_slots, ring_size
from corpus_client.control import BoundPlan
from corpus_client.device import STORED_DTYPES, open_device
from corpus_client.pipeline import Filler, Pipeline, Span
from corpus_client.remote import BatchFiller
from corpus_client.replicas import Replicas

PREFETCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of one step.

    Args:
        step: the training step whose tokens these are.
        tokens: `(rows, seq_len + 1)`, C order, on the loader's device. With `dtype=None` on the CPU IT IS
            A VIEW OF SLOT MEMORY, OVERWRITTEN AFTER THE NEXT `__next__`: clone what must live longer.
            Otherwise it is the caller's own.
        inputs: `(rows, seq_len)`, `tokens[:, :-1]`, a view.
        targets: `(rows, seq_len)`, `tokens[:, 1:]`, a view.
    """

    step: int
    tokens: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """What a loader has done since it was made.

    Args:
        tokens: inputs yielded: batches x rows x seq_len.
        wait_seconds: time the training loop stood still for data.
        received_bytes: of right answers.
        retries: requests that were repeated.
    """

    batches: int = 0
    tokens: int = 0
    wait_seconds: float = 0.0
    received_bytes: int = 0
    retries: int = 0


class CorpusLoader:
    """Batches of a plan, step after step, for ever (or `num_steps` of them).

    One thread iterates; a background thread fetches ahead of it. Iterating again after a `break` goes on
    with the next step. `close` it, use it as a context manager, or drop it.

    Args:
        urls: `http://host:port` of the server, or several of replicas.
        corpus, seq_len, global_batch_size, seed, order, stride: the plan; see the server's documentation.
        plan: a whole plan document instead of these.
        device: default `cuda` where there is one, else `cpu`.
        dtype: of the batches, `torch.int64` or `torch.int32`; None: as stored (see `Batch`).
        rank, world_size: default torch.distributed, then RANK and WORLD_SIZE, then 0 and 1.
        start_step: first step to yield.
        num_steps: stop before step `start_step + num_steps`, also after a resume.
        source: `batches` receives tokens; `indices` only where they lie, and reads them from `local_root`.
        local_root: folder with a copy of the corpus's shards (or a mapping from corpus to folder).
        prefetch_bytes: bound of the memory for what is fetched ahead.
        in_flight: requests on the wire at a time; two hide the way there and back.
        deadline_seconds: how long one request may be retried; a restart of the server is ridden out.
        verify: check each answer's checksum.
        headers: sent with every request.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        corpus: str | None = None,
        seq_len: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        order: str = "shuffle",
        stride: int | None = None,
        plan: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = torch.int64,
        rank: int | None = None,
        world_size: int | None = None,
        start_step: int = 0,
        num_steps: int | None = None,
        source: Literal["batches", "indices"] = "batches",
        local_root: local.LocalRoot | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        in_flight: int = 2,
        deadline_seconds: float = 300.0,
        verify: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if plan is None:
            plan = state.make_plan(
                corpus=corpus,
                seq_len=seq_len,
                global_batch_size=global_batch_size,
                seed=seed,
                order=order,
                stride=stride,
            )
        elif (corpus, seq_len, global_batch_size, stride, seed, order) != (*4 * (None,), 0, "shuffle"):
            raise errors.InvalidArgument("plan= must come without the arguments that stand in a plan")
        self._urls = (urls,) if isinstance(urls, str) else tuple(urls)
        self._headers = dict(headers or {})
        self._deadline_seconds = deadline_seconds
        self._in_flight = state.integer("in_flight", in_flight, 1, 64)
        self._verify = verify
        self._local_root = local_root
        self._step = state.integer("start_step", start_step, 0, 2**40)
        self._end_step = None
        if num_steps is not None:
            self._end_step = start_step + state.integer("num_steps", num_steps, 0, 2**40)
        self._check_choices(dtype, source)
        rank, world_size = world.find_rank(rank, world_size)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = open_device(torch.device(device), dtype)

        self._pid = os.getpid()
        self._pipeline: Pipeline | None = None
        self._replicas: Replicas | None = None
        self._closed = False
        self._done = LoaderStats()
        self._plan = self._bind(plan)
        if dtype == torch.int32 and self._plan.dtype in ("uint32", "int64"):
            raise errors.InvalidArgument(
                f"dtype must be torch.int64 or None for {self._plan.dtype} tokens, got int32"
            )
        self._part = world.slice_of(state.plan_batch_size(self._plan.document), rank, world_size)
        self._shape = (self._part.num_rows, int(self._plan.document["seq_len"]) + 1)
        self._stored = STORED_DTYPES[self._plan.dtype]
        self._ring = ring_size(
            batch_bytes=self._shape[0] * self._shape[1] * self._stored.itemsize,
            prefetch_bytes=prefetch_bytes,
            in_flight=self._in_flight,
        )

    def __enter__(self) -> CorpusLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next step's batch.

        Raises:
            CorpusClientError: what stopped the background thread, with its traceback. The step is not
                lost: calling again starts over from it.
        """
        if os.getpid() != self._pid:
            raise errors.ForkedLoader(
                "a loader was used in a forked process, where its thread and sockets do not exist; "
                "make it there (with a DataLoader: num_workers=0, it prefetches by itself)"
            )
        if self._closed:
            raise errors.LoaderClosed("the loader is closed; make a new one and load its state")
        if self._pipeline is None:
            self._pipeline = self._start()
        try:
            step, tokens = next(self._pipeline)
        except errors.CorpusClientError:
            self._stop()
            raise
        self._step = step + 1
        rows, window = self._shape
        self._done = replace(
            self._done, batches=self._done.batches + 1, tokens=self._done.tokens + rows * (window - 1)
        )
        return Batch(step, tokens, tokens[:, :-1], tokens[:, 1:])

    @property
    def step(self) -> int:
        """The step that the next batch will have."""
        return self._step

    @property
    def plan(self) -> dict[str, Any]:
        """A copy of the canonical plan, with the fingerprints of its corpora."""
        return copy.deepcopy(self._plan.document)

    @property
    def plan_id(self) -> str:
        """64 hex digits that stand for plan and corpora."""
        return self._plan.plan_id

    @property
    def steps_per_request(self) -> int:
        """How many steps one request asks for once the run has warmed up."""
        return self._ring.steps_per_request

    @property
    def stored_itemsize(self) -> int:
        """Bytes of one token as stored and sent."""
        return self._stored.itemsize

    def state_dict(self) -> dict[str, Any]:
        """`{"plan", "plan_id", "next_step"}`: what was yielded counts, not what was fetched ahead."""
        return state.make_state(self._plan, self._step)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on at the state's next step, before the first batch or in mid-run.

        World size, device, source and prefetching may differ from the run that made the state.

        Raises:
            StateMismatch: the state is of another plan or corpus; every differing field is named.
        """
        step = state.check_state(saved, self._plan)
        if step != self._step:
            self._stop()
            self._step = step

    def stats(self) -> LoaderStats:
        """Counters since the loader was made."""
        pipeline, replicas = self._pipeline, self._replicas
        if pipeline is None or replicas is None:
            return self._done
        return replace(
            self._done,
            wait_seconds=self._done.wait_seconds + pipeline.wait_seconds,
            received_bytes=self._done.received_bytes + replicas.received_bytes,
            retries=self._done.retries + replicas.num_retries,
        )

    def close(self) -> None:
        """Stop fetching and release everything; idempotent."""
        self._closed = True
        self._stop()

    def _check_choices(self, dtype: torch.dtype | None, source: str) -> None:
        if not self._urls:
            raise errors.InvalidArgument("urls must name at least one server, got none")
        if dtype not in (torch.int64, torch.int32, None):
            raise errors.InvalidArgument(f"dtype must be torch.int64, torch.int32 or None, got {dtype}")
        if source not in ("batches", "indices"):
            raise errors.InvalidArgument(f"source must be 'batches' or 'indices', got {source!r}")
        if (source == "indices") != (self._local_root is not None):
            raise errors.InvalidArgument(
                f"local_root and source='indices' go together, got {self._local_root!r} with {source!r}"
            )
        if not self._deadline_seconds > 0:
            raise errors.InvalidArgument(f"deadline_seconds must be above 0, got {self._deadline_seconds!r}")

    def _connect(self, plan: BoundPlan | None) -> Replicas:
        return Replicas(self._urls, headers=self._headers, deadline_seconds=self._deadline_seconds, plan=plan)

    def _bind(self, plan: Mapping[str, Any]) -> BoundPlan:
        """Agree on the plan with the replicas, and check the local copy against them."""
        replicas = self._connect(None)
        try:
            bound = replicas.bind(plan)
            if bound.dtype not in STORED_DTYPES:
                raise errors.AnswerCorrupt(f"dtype must be one of {list(STORED_DTYPES)}, got {bound.dtype!r}")
            if self._local_root is not None:
                shards = local.open_shards(bound, self._local_root)
                try:
                    local.check_shards(replicas, shards)
                finally:
                    for shard in shards:
                        shard.close()
            return bound
        finally:
            replicas.close()

    def _start(self) -> Pipeline:
        """A pipeline from the next step on.

        Its slots are new: copies out of an earlier pipeline's may still be under way.
        """
        seq_len = self._shape[1] - 1
        filler: Filler
        if self._local_root is None:
            self._replicas = self._connect(self._plan)
            filler = BatchFiller(self._replicas, self._plan, self._part, seq_len=seq_len, verify=self._verify)
        else:
            shards = local.open_shards(self._plan, self._local_root)
            self._replicas = self._connect(self._plan)
            filler = local.IndexFiller(
                self._replicas, self._plan, self._part, shards, seq_len=seq_len, verify=self._verify
            )
        span = Span(
            shape=self._shape,
            dtype=self._stored,
            start_step=self._step,
            end_step=self._end_step,
            steps_per_request=self._ring.steps_per_request,
            in_flight=self._in_flight,
        )
        return Pipeline(filler, allocate_slots(self._ring, pinned=self._device.pinned), self._device, span)

    def _stop(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()
            self._done = self.stats()
        self._pipeline = self._replicas = None
