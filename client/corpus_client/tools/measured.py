"""Measure what a loader delivers, as a training loop sees it, for `bench` and `doctor`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from corpus_client.loader import CorpusLoader
from corpus_client.observe.attribution import LoaderStats
from corpus_client.tools.timing import Spread

WARM_UP_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """One measurement: a loader's counters, seconds waited for a batch, this process's CPU seconds.

    bytes_per_second: of the tokens as they are stored.
    """

    stats: LoaderStats
    wait: Spread
    bytes_per_second: float
    cpu_seconds: float
    steps_per_request: int

    def as_json(self) -> dict[str, Any]:
        """Return the figures with those that follow from the loader's counters."""
        rates = {"tokens_per_second": self.stats.tokens_per_second, "wait_share": self.stats.wait_share}
        return {**asdict(self), **rates}


def measure(loader: CorpusLoader, seconds: float) -> BenchResult:
    """Iterate for a while, after a short warm-up that is not counted."""
    _iterate(loader, min(WARM_UP_SECONDS, seconds))
    before, cpu_before = loader.stats(), time.process_time()
    waits = _iterate(loader, seconds)
    stats = loader.stats().since(before)
    return BenchResult(
        stats=stats,
        wait=Spread.of(waits),
        bytes_per_second=stats.tokens_per_second * loader.prepared.steps.dtype.itemsize,
        cpu_seconds=time.process_time() - cpu_before,
        steps_per_request=loader.prepared.steps_per_request,
    )


def _iterate(loader: CorpusLoader, seconds: float) -> list[float]:
    """Return how long each batch was waited for."""
    waits: list[float] = []
    asked = time.perf_counter()
    end = asked + seconds
    for _ in loader:
        now = time.perf_counter()
        waits.append(now - asked)
        if now >= end:
            break
        asked = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return waits
