"""A plan made ready for one process: the shape of its batches, the ring, the pipeline that brings them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from corpus_client import errors, local
from corpus_client.attribution import Meter
from corpus_client.buffers import MAX_STEPS_PER_REQUEST, Ring, RingSize, ring_size
from corpus_client.control import BoundPlan
from corpus_client.device import STORED_DTYPES, Device
from corpus_client.fetcher import Filler, Span
from corpus_client.pipeline import Pipeline
from corpus_client.remote import BatchFiller
from corpus_client.replicas import Replicas
from corpus_client.schedule import Stretch, rank_rows
from corpus_client.world import Place, ranks_on_host


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedOptions:
    """What stays the same when a loader changes its plan; the loader's arguments of these names."""

    place: Place
    dtype: torch.dtype | None
    eot_id: int | None
    local_root: local.LocalRoot | None
    prefetch_bytes: int
    in_flight: int
    verify: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """A bound plan that is known to work here.

    Args:
        seq_len: of the plan, not of a context rank's slice.
        stored: dtype of the tokens in slots.
        stretches: rows of this process's batches, by step.
        ring: sized for the largest of them.
    """

    options: FeedOptions
    plan: BoundPlan
    seq_len: int
    stored: torch.dtype
    stretches: tuple[Stretch, ...]
    ring: RingSize

    @classmethod
    def bind(cls, connect: partial[Replicas], plan: Mapping[str, Any], options: FeedOptions) -> Feed:
        """Agree on the plan with the replicas, and check everything that could fail later."""
        with connect() as replicas:
            bound = replicas.bind(plan)
            seq_len = int(bound.document["seq_len"])
            _check(bound, seq_len, options)
            stretches = rank_rows(bound.stages, options.place.part.world_size)
            stored = STORED_DTYPES[bound.dtype]
            most_rows = max(stretch.num_rows for stretch in stretches)
            ring = ring_size(
                batch_bytes=most_rows * (seq_len + 1) * stored.itemsize,
                prefetch_bytes=options.prefetch_bytes,
                in_flight=options.in_flight,
                ranks_on_host=ranks_on_host(),
            )
            if options.local_root is not None:
                _check_local_copy(replicas, bound, options.local_root)
        return cls(
            options=options, plan=bound, seq_len=seq_len, stored=stored, stretches=stretches, ring=ring
        )

    @property
    def steps_per_request(self) -> int:
        """How many steps one request asks for at most, where batches are largest."""
        return min(self._request_bytes // self.ring.batch_bytes, MAX_STEPS_PER_REQUEST)

    def start(
        self,
        connect: partial[Replicas],
        ring: Ring,
        device: Device,
        meter: Meter,
        start_step: int,
        end_step: int | None,
        step_stride: int,
    ) -> tuple[Pipeline, Replicas]:
        """A pipeline from a step on, and the connections it uses. ring: nothing reads or writes it."""
        options, part = self.options, self.options.place.part
        span = Span(
            stretches=self.stretches,
            window=self.seq_len + 1,
            dtype=self.stored,
            start_step=start_step,
            end_step=end_step,
            slot_bytes=self.ring.used_bytes,
            in_flight=options.in_flight,
            step_stride=step_stride,
        )
        filler: Filler
        if options.local_root is None:
            replicas = connect(plan=self.plan, stopwatch=meter.fetcher)
            filler = BatchFiller(replicas, self.plan, part, seq_len=self.seq_len, verify=options.verify)
        else:
            shards = local.open_shards(self.plan, options.local_root)
            replicas = connect(plan=self.plan, stopwatch=meter.fetcher)
            pieces = span.pieces(self._request_bytes)
            filler = local.IndexFiller(
                replicas,
                self.plan,
                part,
                shards,
                pieces,
                in_flight=options.in_flight,
                seq_len=self.seq_len,
                verify=options.verify,
            )
        return Pipeline(filler, ring.slots, device, span, meter), replicas

    @property
    def _request_bytes(self) -> int:
        """Of the tokens that one request is about, whether they are answered or only where they lie."""
        if self.options.local_root is None:
            return self.ring.used_bytes
        return max(self.ring.used_bytes, local.REQUEST_ROWS * (self.seq_len + 1) * self.stored.itemsize)


def _check(plan: BoundPlan, seq_len: int, options: FeedOptions) -> None:
    if plan.dtype not in STORED_DTYPES:
        raise errors.AnswerCorrupt(f"dtype must be one of {list(STORED_DTYPES)}, got {plan.dtype!r}")
    if options.dtype == torch.int32 and plan.dtype in ("uint32", "int64"):
        raise errors.InvalidArgument(f"dtype must be torch.int64 or None for {plan.dtype} tokens, got int32")
    high = torch.iinfo(STORED_DTYPES[plan.dtype]).max
    if options.eot_id is not None and options.eot_id > high:
        raise errors.InvalidArgument(
            f"eot_id must be in [0, {high}] for {plan.dtype} tokens, got {options.eot_id}"
        )
    _, size = options.place.context
    if seq_len % size:
        raise errors.InvalidArgument(
            f"seq_len must be divisible by the context-parallel size, got {seq_len} over {size}"
        )


def _check_local_copy(replicas: Replicas, plan: BoundPlan, local_root: local.LocalRoot) -> None:
    shards = local.open_shards(plan, local_root)
    try:
        local.check_shards(replicas, shards)
    finally:
        for shard in shards:
            shard.close()
