"""Rounds over all contenders in turn, so that a drift of the machine touches all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scripts.benchmarks.contender import Contender, Shape
from scripts.benchmarks.cpu import cpu_seconds


@dataclass
class Series:
    """What was measured of one contender at one shape; one figure for each round.

    Args:
        batch_seconds: how long each `next` took, a list for each round.
    """

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_billion: list[float] = field(default_factory=list)
    batch_seconds: list[list[float]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Median and spread over rounds; percentiles over batches."""
        p50, p99 = np.percentile(np.concatenate(self.batch_seconds), [50, 99])
        return {
            "million_tokens_per_second": spread([each / 1e6 for each in self.tokens_per_second]),
            "cpu_seconds_per_billion_tokens": spread(self.cpu_seconds_per_billion),
            "p50_ms": float(p50) * 1e3,
            "p99_ms": float(p99) * 1e3,
        }


def measure(
    contenders: Sequence[Contender], shape: Shape, *, rounds: int, seconds: float
) -> dict[str, Series]:
    """Measure every contender for `seconds` in each of `rounds` rounds."""
    series = {contender.name: Series(contender.name) for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            _settle(contender, shape)
            _measure_once(contender, series[contender.name], shape, seconds)
    return series


def spread(figures: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(figures), "lowest": min(figures), "highest": max(figures)}


def paired_ratios(of: Sequence[float], to: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios round by round."""
    return spread([a / b for a, b in zip(of, to, strict=True)])


def _measure_once(contender: Contender, its: Series, shape: Shape, seconds: float) -> None:
    cpu = cpu_seconds(contender.pids)
    began = last = time.perf_counter()
    batch_seconds: list[float] = []
    while last - began < seconds or not batch_seconds:
        contender.next()
        now = time.perf_counter()
        batch_seconds.append(now - last)
        last = now
    its.batch_seconds.append(batch_seconds)
    num_tokens = len(batch_seconds) * shape.num_tokens
    its.tokens_per_second.append(num_tokens / (last - began))
    its.cpu_seconds_per_billion.append((cpu_seconds(contender.pids) - cpu) / num_tokens * 1e9)


def _settle(contender: Contender, shape: Shape) -> None:
    """Consume what was fetched ahead before the round, and some more."""
    for _ in range(max(8, 3 * contender.ahead_bytes // (2 * shape.num_bytes))):
        contender.next()
