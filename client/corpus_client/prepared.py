"""A plan made ready for one process: the shape of its batches, its slots, the pipeline that brings them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import get_worker_info

from corpus_client import errors
from corpus_client.network.control import BoundPlan
from corpus_client.network.layout import Beside
from corpus_client.network.options import Network
from corpus_client.network.replicas import Replicas
from corpus_client.observe.recorder import Recorder
from corpus_client.plan.document import integer
from corpus_client.plan.requests import AheadRequests, StepRequests, arrays_beside
from corpus_client.plan.schedule import MAX_STEPS_PER_REQUEST, rank_shapes
from corpus_client.plan.world import RankPart, ranks_on_host
from corpus_client.staging import local
from corpus_client.staging.fetcher import FetchRange, Source
from corpus_client.staging.options import Staging
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.session import DeviceSession
from corpus_client.staging.slots import BUDGET, Slot, SlotSizes, choose_slot_sizes
from corpus_client.staging.stager import STORED_DTYPES, Stager

log = logging.getLogger("corpus_client")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What stays the same when a loader changes its plan; most are the loader's arguments of these names."""

    connect: partial[Replicas]
    place: RankPart
    step_stride: int
    dtype: torch.dtype | None
    eot_id: int | None
    ignore_index: int | None
    sources: bool
    loss_mask: bool | None
    network: Network
    staging: Staging
    session: DeviceSession  # for which memory is counted

    def __post_init__(self) -> None:
        if self.dtype not in (torch.int64, torch.int32, None):
            raise errors.InvalidArgument(f"dtype must be torch.int64, torch.int32 or None, got {self.dtype}")
        if self.ignore_index is not None:
            integer("ignore_index", self.ignore_index, -(2**31), 2**31 - 1)
            if self.dtype is None:
                raise errors.InvalidArgument(
                    "ignore_index needs dtype=torch.int64 or torch.int32, got None: tokens as stored may "
                    "be unsigned"
                )

    def beside(self, plan: BoundPlan) -> tuple[Beside, ...]:
        """Return what is to come with the tokens of this plan."""
        return arrays_beside(plan, sources=self.sources, loss_mask=self.loss_mask)

    def check(self, plan: BoundPlan) -> None:
        """Raise `InvalidArgument` unless they go together with this plan."""
        if plan.dtype not in STORED_DTYPES:
            raise errors.ResponseCorrupt(f"dtype must be one of {list(STORED_DTYPES)}, got {plan.dtype!r}")
        if self.dtype == torch.int32 and plan.dtype in ("uint32", "int64"):
            raise errors.InvalidArgument(
                f"dtype must be torch.int64 or None for {plan.dtype} tokens, got int32"
            )
        if self.eot_id is not None:
            high = torch.iinfo(STORED_DTYPES[plan.dtype]).max
            integer(f"eot_id of {plan.dtype} tokens", self.eot_id, 0, high)
            if plan.eot_id not in (None, self.eot_id):
                log.warning(
                    "documents end with token %d, by eot_id=, and not with %d, which the server knows",
                    *(self.eot_id, plan.eot_id),
                )
        knows_ends = self.eot_id is not None or plan.eot_id is not None
        has_mask = any(each.name == "loss_mask" for each in self.beside(plan))
        if self.ignore_index is not None and has_mask and plan.has_weights:
            raise errors.InvalidArgument(
                "ignore_index cannot say the weights that loss masks of the corpora hold: leave it out and "
                "multiply the losses by batch.loss_mask; loss_mask=False trains on all tokens alike"
            )
        num_ids = plan.vocab_size or torch.iinfo(STORED_DTYPES[plan.dtype]).max + 1
        num_ids = max(num_ids, (plan.largest_id or 0) + 1)  # a vocabulary may be too small for its corpus
        if self.ignore_index is not None and 0 <= self.ignore_index < num_ids:
            raise errors.InvalidArgument(
                "ignore_index must be no token id, else targets of that id are left out of the loss, too: "
                f"give a negative number such as -100, got {self.ignore_index}"
            )
        if self.ignore_index is not None and not knows_ends and not has_mask:
            raise errors.InvalidArgument("ignore_index needs eot_id=, the token that ends a document")
        context = self.place.context
        if context.by_document and not knows_ends:
            raise errors.InvalidArgument(
                "context_order='documents' needs eot_id=, the token that ends a document"
            )
        twice = context.zigzag or context.by_document
        what = "twice the context-parallel size" if twice else "the context-parallel size"
        for stage in plan.stages:
            if stage.seq_len % context.num_chunks:
                raise errors.InvalidArgument(
                    f"seq_len must be divisible by {what}, got {stage.seq_len} over {context.num_chunks}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPlan:
    """A bound plan that is known to work in this process.

    eot_id: the token that ends a document: as the user says, else as the server does.
    steps: all of this process's batches; of whole sequences, not of a context rank's slices.
    """

    options: PlanOptions
    bound: BoundPlan
    eot_id: int | None
    steps: FetchRange
    sizes: SlotSizes
    places: local.Places | None  # of shards on this host; None: tokens come from the server

    @classmethod
    def prepare(cls, document: Mapping[str, Any], options: PlanOptions) -> PreparedPlan:
        """Agree on the plan with the replicas, and check everything that could fail later."""
        with options.connect() as replicas:
            return cls._checked(replicas, replicas.bind(document), options, known_shards=0)

    def extended(self, replicas: Replicas, stage: Mapping[str, Any]) -> PreparedPlan:
        """Do the same with a plan that has one stage more; replicas: of this plan."""
        bound = replicas.bind(stage, after=self.bound)
        return self._checked(replicas, bound, self.options, known_shards=len(self.bound.shards))

    @classmethod
    def _checked(
        cls, replicas: Replicas, bound: BoundPlan, options: PlanOptions, *, known_shards: int
    ) -> PreparedPlan:
        options.check(bound)
        steps = FetchRange(
            step_ranges=rank_shapes(bound.stages, options.place.world_size, bound.num_steps),
            dtype=STORED_DTYPES[bound.dtype],
            in_flight=options.network.in_flight,
            step_stride=options.step_stride,
            beside=options.beside(bound),
        )
        sizes = choose_slot_sizes(
            batch_bytes=steps.batch_bytes,
            prefetch_bytes=options.staging.prefetch_bytes,
            in_flight=steps.in_flight,
            ranks_on_host=ranks_on_host(),
            num_workers=1 if (worker := get_worker_info()) is None else worker.num_workers,
            taken=BUDGET.taken(options.session),
        )
        BUDGET.take(options.session, sizes.num_bytes)
        places = _places(replicas, bound, options.staging)
        if places is not None and len(bound.shards) > known_shards:
            shards = local.open_shards(bound, places)
            with ExitStack() as stack:
                for shard in shards:
                    stack.callback(shard.close)
                local.check_shards(replicas, shards)
        return cls(
            options=options,
            bound=bound,
            eot_id=bound.eot_id if options.eot_id is None else options.eot_id,
            steps=replace(steps, slot_bytes=sizes.used_bytes),
            sizes=sizes,
            places=places,
        )

    @property
    def steps_per_request(self) -> int:
        """How many steps one request asks for at most, where batches are largest."""
        return min(self._request_bytes // self.sizes.batch_bytes, self._request_steps)

    def start(
        self, slots: Sequence[Slot], stager: Stager, recorder: Recorder, start_step: int, end_step: int | None
    ) -> Pipeline:
        """Return a pipeline over `[start_step, end_step)`; nothing else may read or write the slots."""
        place, places = self.options.place, self.places
        steps = replace(self.steps, start_step=start_step, end_step=end_step)
        shards = [] if places is None else local.open_shards(self.bound, places)
        replicas = self.options.connect(plan=self.bound, recorder=recorder)
        requests = StepRequests(
            replicas,
            self.bound,
            rank=place.rank,
            world_size=place.world_size,
            places=places is not None,
            beside=steps.beside,
        )
        source: Source = requests
        if places is not None:
            ahead = AheadRequests(
                requests, steps.pieces(self._request_bytes, self._request_steps), steps.in_flight
            )
            source = local.LocalSource(ahead, self.bound, shards, steps.beside)
        return Pipeline(source, slots, stager, steps, recorder)

    @property
    def _request_bytes(self) -> int:
        """Of the batches that one request is about, whether tokens are answered or only where they lie."""
        if self.places is None or any(each.name == "loss_mask" for each in self.steps.beside):
            return self.sizes.used_bytes
        max_window = max(each.shape[1] for each in self.steps.step_ranges)
        is_own = self.places.are_served and self.bound.indices != "pieces"
        rows = local.OWN_ROWS if is_own else local.REQUEST_ROWS
        return max(self.sizes.used_bytes, rows * max_window * self.steps.dtype.itemsize)

    @property
    def _request_steps(self) -> int:
        is_own = self.places is not None and self.places.are_served
        return local.OWN_STEPS if is_own else MAX_STEPS_PER_REQUEST


def _places(replicas: Replicas, bound: BoundPlan, staging: Staging) -> local.Places | None:
    if replicas.own_server is None:
        return None if staging.local_root is None else local.places_in(bound, staging.local_root)
    if staging.local_root is not None:
        raise errors.InvalidArgument(
            f"local_root= is for a server at a URL, got it with {replicas.own_server.what}: the tokens of a "
            "path are read from its files anyway; leave it out"
        )
    return local.places_of_server(replicas, bound)
