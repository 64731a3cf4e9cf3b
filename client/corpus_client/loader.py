"""The loader: what a training loop sees."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch

from corpus_client import errors, progress, receipts
from corpus_client.attribution import LoaderStats, Meter
from corpus_client.buffers import Ring, allocate_ring
from corpus_client.device import default_device, open_device
from corpus_client.feed import Feed, FeedOptions
from corpus_client.local import LocalRoot
from corpus_client.pipeline import Pipeline
from corpus_client.plan import PlanArgument, integer, requested_plan, successor
from corpus_client.replicas import Replicas
from corpus_client.state import check_state, make_state
from corpus_client.trace import Nvtx, Tracer
from corpus_client.world import Mesh, find_place
from corpus_client.yielded import Batch

PREFETCH_BYTES = 256 << 20


class CorpusLoader:
    """Batches of a plan, step after step, for ever (or `num_steps` of them).

    One thread iterates; a background thread fetches ahead of it. Iterating again after a `break` goes on
    with the next step. `close` it, use it as a context manager, or drop it.

    Args:
        urls: `http://host:port` of the server, `uds:///path/of.sock` on its own host, or several of replicas.
        corpus, seq_len, global_batch_size, seed, order, stride: the plan; see the server's documentation.
        plan: a whole plan document instead of these, or the path of its JSON file.
        device: default `cuda` where there is one, else another accelerator, else `cpu`. Without an index,
            the current device if one was set, else the one of LOCAL_RANK.
        dtype: of the batches, `torch.int64` or `torch.int32`; None: as stored (see `Batch`).
        rank, world_size: default torch.distributed, then RANK and WORLD_SIZE, then 0 and 1.
        dp_rank, dp_world_size: other names of these.
        mesh: a named `DeviceMesh` instead of these; processes that differ only in other dimensions than
            `data_dims` get the same batch, by the same requests.
        data_dims: the mesh's dimensions over which rows are divided, the first one slowest.
        context_parallel: (rank, size): yield this contiguous slice of each sequence.
        context_dim: the mesh's dimension that says so.
        eot_id: the token that ends a document; needed for a batch's document structure only.
        start_step: first step to yield.
        num_steps: stop before step `start_step + num_steps`, also after a resume.
        step_stride: yield every so many steps one, for processes that take turns in feeding a rank (see
            `CorpusIterableDataset`); above 1 each step is a request of its own.
        source: `batches` receives tokens; `indices` only where they lie, and reads them from `local_root`.
        local_root: folder with a copy of the corpus's shards (or a mapping from corpus to folder).
        prefetch_bytes: bound of the memory for what is fetched ahead.
        in_flight: requests on the wire at a time; two hide the way there and back.
        deadline_seconds: how long one request may be retried; a restart of the server is ridden out.
        verify: check each answer's checksum.
        headers: sent with every request.
        trace_steps: keep what happened in so many last steps for `trace`, and measure copies on the device.
        nvtx: mark `fetch`, `receive`, `transfer` and `wait` for Nsight Systems; needs CUDA.
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
        plan: PlanArgument | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = torch.int64,
        rank: int | None = None,
        world_size: int | None = None,
        dp_rank: int | None = None,
        dp_world_size: int | None = None,
        mesh: Mesh | None = None,
        data_dims: str | Sequence[str] | None = None,
        context_parallel: tuple[int, int] | None = None,
        context_dim: str | None = None,
        eot_id: int | None = None,
        start_step: int = 0,
        num_steps: int | None = None,
        step_stride: int = 1,
        source: Literal["batches", "indices"] = "batches",
        local_root: LocalRoot | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        in_flight: int = 2,
        deadline_seconds: float = 300.0,
        verify: bool = True,
        headers: Mapping[str, str] | None = None,
        trace_steps: int = 0,
        nvtx: bool = False,
    ) -> None:
        document = requested_plan(
            plan,
            corpus=corpus,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            seed=seed,
            order=order,
            stride=stride,
        )
        urls = (urls,) if isinstance(urls, str) else tuple(urls)
        _check_choices(urls, dtype, source, local_root, deadline_seconds)
        self._connect = partial(Replicas, urls, headers=headers, deadline_seconds=deadline_seconds)
        self._step = integer("start_step", start_step, 0, 2**40)
        self._step_stride = integer("step_stride", step_stride, 1, 2**40)
        self._end_step = None
        if num_steps is not None:
            self._end_step = start_step + integer("num_steps", num_steps, 0, 2**40)
        options = FeedOptions(
            place=find_place(
                rank=rank,
                world_size=world_size,
                dp_rank=dp_rank,
                dp_world_size=dp_world_size,
                mesh=mesh,
                data_dims=data_dims,
                context_parallel=context_parallel,
                context_dim=context_dim,
            ),
            dtype=dtype,
            eot_id=None if eot_id is None else integer("eot_id", eot_id, 0, 2**32 - 1),
            local_root=local_root,
            prefetch_bytes=prefetch_bytes,
            in_flight=integer("in_flight", in_flight, 1, 64),
            verify=verify,
        )
        trace_steps = integer("trace_steps", trace_steps, 0, 2**16)
        place = default_device() if device is None else torch.device(device)
        self._device = open_device(place, dtype, timed=trace_steps > 0)
        self._meter = Meter(Tracer(trace_steps, _nvtx() if nvtx else None))
        self._pid = os.getpid()
        self._pipeline: Pipeline | None = None
        self._replicas: Replicas | None = None
        self._ring: Ring | None = None
        self._closed = False
        self._num_batches = self._num_tokens = 0
        self._received_bytes = self._num_retries = 0  # of pipelines that are over
        self._feed = Feed.bind(self._connect, document, options)

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
        self._check_usable()
        self._device.pace()
        pipeline = self._pipeline or self._start()
        try:
            step, tokens = next(pipeline)
        except errors.CorpusClientError:
            self._stop()
            raise
        self._step = step + self._step_stride
        options = self._feed.options
        batch = Batch(step, tokens, options.eot_id, options.place.context)
        self._num_batches += 1
        rows, window = tokens.shape
        self._num_tokens += rows * ((window - 1) // options.place.context[1])
        return batch

    @property
    def step(self) -> int:
        """The step that the next batch will have."""
        return self._step

    @property
    def plan(self) -> dict[str, Any]:
        """A copy of the canonical plan, with the fingerprints of its corpora."""
        return copy.deepcopy(self._feed.plan.document)

    @property
    def plan_id(self) -> str:
        """64 hex digits that stand for plan and corpora."""
        return self._feed.plan.plan_id

    @property
    def steps_per_request(self) -> int:
        """How many steps one request asks for at most, where batches are largest."""
        return self._feed.steps_per_request

    @property
    def stored_itemsize(self) -> int:
        """Bytes of one token as stored and sent."""
        return self._feed.stored.itemsize

    def extend(self, stage: Mapping[str, Any]) -> str:
        """Go on by a plan that has one stage more, from the next step on.

        Every rank calls it at the same step with the same stage, and comes to the same plan. What was
        fetched ahead by the old plan is dropped; what was yielded is checked to be unchanged.

        Args:
            stage: `{"mixture": {name: weight}}`, and where they change `"global_batch_size"` and
                `"exclude": {name: [[start, stop], ...]}`, ranges of tokens that are out from now on.

        Returns:
            The id of the new plan. After an error the old one goes on.

        Raises:
            HistoryChanged: by the new plan an earlier step has other tokens.
        """
        self._check_usable()
        old, step = self._feed.plan, self._step
        with self._connect(plan=old) as replicas:
            from_step = replicas.ask(lambda control: control.plan_step(old.plan_id, step))
            grown = successor(old.document, from_step, stage)
            feed = Feed.bind(self._connect, grown, self._feed.options)
            receipts.check_history(replicas, old, feed.plan, step)
        self._stop()
        self._feed = feed
        return feed.plan.plan_id

    def state_dict(self) -> dict[str, Any]:
        """`{"plan", "plan_id", "next_step", "next_batch"}`: what was yielded counts, not what was fetched.

        `next_batch`, the receipt of the next global batch, is asked of the server; if it does not answer
        within two seconds it is None, and a warning is logged.
        """
        plan = self._feed.plan
        return make_state(plan, self._step, receipts.receipt_soon(self._connect, plan, self._step))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on at the state's next step, before the first batch or in mid-run.

        World size, device, source and prefetching may differ from the run that made the state.

        Raises:
            StateMismatch: the state is of another plan or corpus, every differing field is named; or the
                server has other tokens for its next batch.
        """
        plan = self._feed.plan
        step, next_batch = check_state(saved, plan)
        if next_batch is not None:
            with self._connect(plan=plan) as replicas:
                receipts.check_next(replicas, plan, step, next_batch)
        if step != self._step:
            self._stop()
            self._step = step

    def stats(self) -> LoaderStats:
        """Counters since the loader was made, and the state of its slots."""
        pipeline, replicas, ring = self._pipeline, self._replicas, self._ring
        times = self._meter.stats(copies_on_host=self._device.copies_on_host)
        transfer_seconds, stall_seconds = self._device.seconds()
        return replace(
            times,
            batches=self._num_batches,
            tokens=self._num_tokens,
            transfer_seconds=transfer_seconds,
            stall_seconds=stall_seconds,
            received_bytes=self._received_bytes + (replicas.received_bytes if replicas else 0),
            retries=self._num_retries + (replicas.num_retries if replicas else 0),
            ready_slots=pipeline.num_ready if pipeline else 0,
            num_slots=ring.size.num_slots if ring else 0,
            ring_bytes=ring.num_bytes if ring else 0,
            pinned_bytes=ring.num_bytes if ring and ring.pinned else 0,
        )

    def progress(self) -> Iterator[Batch]:
        """The same batches, with one line about the loader on stderr: by tqdm if it is installed."""
        total = None if self._end_step is None else self._end_step - self._step
        return progress.shown(self, self.stats, total)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened in the last `trace_steps` steps, for ui.perfetto.dev or chrome://tracing."""
        if not self._meter.tracer.num_steps:
            raise errors.InvalidArgument(
                "trace needs the last steps, and trace_steps is 0; pass trace_steps=200 to CorpusLoader"
            )
        self._meter.tracer.export(path)

    def close(self) -> None:
        """Stop fetching and release everything; idempotent."""
        self._closed = True
        self._stop()
        self._ring = None

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise errors.ForkedLoader(
                "a loader was used in a forked process, where its thread and sockets do not exist; "
                "make it there (it prefetches by itself; if it must be a DataLoader: CorpusIterableDataset)"
            )
        if self._closed:
            raise errors.LoaderClosed("the loader is closed; make a new one and load its state")

    def _start(self) -> Pipeline:
        started = time.perf_counter()
        if self._ring is None or self._ring.size != self._feed.ring:
            self._ring = None  # its memory goes before the new one comes
            self._ring = allocate_ring(self._feed.ring, self._device.pin)
        self._pipeline, self._replicas = self._feed.start(
            self._connect,
            self._ring,
            self._device,
            self._meter,
            self._step,
            self._end_step,
            self._step_stride,
        )
        self._meter.prepared(started)
        return self._pipeline

    def _stop(self) -> None:
        # Taken at once: a `close` from another thread meets the error it causes in the training loop.
        pipeline, self._pipeline = self._pipeline, None
        replicas, self._replicas = self._replicas, None
        if pipeline is None or replicas is None:
            return
        if not pipeline.close():
            self._ring = None  # whoever still uses it keeps it alive; the next pipeline has its own
        self._received_bytes += replicas.received_bytes
        self._num_retries += replicas.num_retries


def _nvtx() -> Nvtx:
    if not torch.cuda.is_available():
        raise errors.InvalidArgument("nvtx=True needs a CUDA device, torch sees none; leave it out")
    return torch.cuda.nvtx


def _check_choices(
    urls: Sequence[str],
    dtype: torch.dtype | None,
    source: str,
    local_root: LocalRoot | None,
    deadline_seconds: float,
) -> None:
    if not urls:
        raise errors.InvalidArgument("urls must name at least one server, got none")
    if dtype not in (torch.int64, torch.int32, None):
        raise errors.InvalidArgument(f"dtype must be torch.int64, torch.int32 or None, got {dtype}")
    if source not in ("batches", "indices"):
        raise errors.InvalidArgument(f"source must be 'batches' or 'indices', got {source!r}")
    if (source == "indices") != (local_root is not None):
        raise errors.InvalidArgument(
            f"local_root and source='indices' go together, got {local_root!r} with {source!r}"
        )
    if not deadline_seconds > 0:
        raise errors.InvalidArgument(f"deadline_seconds must be above 0, got {deadline_seconds!r}")
