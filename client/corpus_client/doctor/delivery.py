"""What a loader brings to this process, and how its requests spend their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corpus_client.control import BoundPlan
from corpus_client.doctor.findings import Check
from corpus_client.doctor.speed import Stages, percentages
from corpus_client.loader import CorpusLoader
from corpus_client.remote import RankSlice
from corpus_client.tools.bench import measure

ANSWER_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A short run of a loader by itself, as `corpus-client bench` does it.

    Args:
        tokens_per_second: trained ones.
        bytes_per_second: of answers' bodies.
        retries: requests that had to be repeated.
    """

    tokens_per_second: float
    bytes_per_second: float
    retries: int


def deliver(
    urls: Sequence[str], plan: BoundPlan, part: RankSlice, device: torch.device, seconds: float
) -> Delivery:
    """Run a loader for a while, after a warm-up that does not count."""
    with CorpusLoader(
        urls,
        plan=plan.document,
        rank=part.rank,
        world_size=part.world_size,
        device=device,
        deadline_seconds=ANSWER_SECONDS,
    ) as loader:
        found = measure(loader, seconds)
    seq_len = int(plan.document["seq_len"])
    return Delivery(
        tokens_per_second=found.tokens_per_second * seq_len / (seq_len + 1),
        bytes_per_second=found.bytes_per_second,
        retries=found.retries,
    )


def bandwidth(found: Delivery, spent: Stages) -> Check:
    """The run as a check: data must arrive without being asked for twice."""
    shaky = found.retries > 0
    return Check(
        name="bandwidth",
        status="warn" if shaky else "ok",
        found=f"{found.tokens_per_second / 1e6:,.1f} M tokens/s, {found.bytes_per_second / 1e6:,.0f} MB/s"
        + (f", {found.retries} requests repeated" if shaky else "")
        + f"; a request's time: {percentages(spent)}",
        advice="look at the server's log and the network: requests failed and were repeated" if shaky else "",
        measured={
            "tokens_per_second": found.tokens_per_second,
            "bytes_per_second": found.bytes_per_second,
            "retries": found.retries,
            "request_seconds": spent.seconds,
        },
    )
