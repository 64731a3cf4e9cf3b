"""Rounds over all contenders in turn, so that a drift of the machine touches all of them alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from scripts.benchmarks.contenders import PREFETCH_BYTES, Contender


@dataclass
class Series:
    """What was measured of one contender at one shape."""

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_billion: list[float] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float | str]:
        """Median and spread over rounds; percentiles over batches."""
        p50, p99 = np.percentile(self.batch_seconds, [50, 99])
        return {
            "name": self.name,
            "million_tokens_per_second": statistics.median(self.tokens_per_second) / 1e6,
            "lowest": min(self.tokens_per_second) / 1e6,
            "highest": max(self.tokens_per_second) / 1e6,
            "p50_ms": float(p50) * 1e3,
            "p99_ms": float(p99) * 1e3,
            "cpu_seconds_per_billion_tokens": statistics.median(self.cpu_seconds_per_billion),
        }


def measure(
    contenders: Sequence[Contender], rows: int, length: int, *, rounds: int, seconds: float
) -> list[Series]:
    """Measure every contender for `seconds` in each of `rounds` rounds."""
    series = [Series(contender.name) for contender in contenders]
    for _ in range(rounds):
        for contender, its in zip(contenders, series, strict=True):
            _settle(contender, rows * length * 2)
            cpu = _cpu_seconds(contender.pids)
            began = last = time.perf_counter()
            num_batches = 0
            while last - began < seconds:
                contender.next()
                now = time.perf_counter()
                its.batch_seconds.append(now - last)
                last = now
                num_batches += 1
            num_tokens = num_batches * rows * length
            its.tokens_per_second.append(num_tokens / (last - began))
            its.cpu_seconds_per_billion.append((_cpu_seconds(contender.pids) - cpu) / num_tokens * 1e9)
    return series


def paired_ratio(of: Series, to: Series) -> tuple[float, float, float]:
    """Median, lowest and highest of the ratios round by round."""
    ratios = [a / b for a, b in zip(of.tokens_per_second, to.tokens_per_second, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _settle(contender: Contender, batch_bytes: int) -> None:
    """Consume what was fetched ahead before the round, and some more."""
    for _ in range(max(8, 3 * PREFETCH_BYTES // 2 // batch_bytes)):
        contender.next()


def _cpu_seconds(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in (os.getpid(), *pids):
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total
