"""Measure contenders in rounds, in turn, so that a drift of the machine affects all of them alike.

All ratios are taken within a round. Figures of different runs on a shared machine differ by more than the
changes that they should show.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from scripts.benchmarks.contender import Contender, Shape
from scripts.benchmarks.report import Bound, Table, Target

SPEED, CPU, P50, P99 = (
    "million_tokens_per_second",
    "cpu_seconds_per_billion_tokens",
    "p50_ms",
    "p99_ms",
)
COLUMNS = {
    SPEED: ("M tokens/s", ",.0f"),
    CPU: ("CPU s / 10^9", ".2f"),
    P50: ("p50 ms", ".3f"),
    P99: ("p99 ms", ".3f"),
}
"""Heading and format of each figure."""

LATENCY = {figure: COLUMNS[figure] for figure in (P50, P99, CPU)}
DELIVERY = {figure: COLUMNS[figure] for figure in (SPEED, CPU)}
"""The figures of contenders that prefetch: how long one `next` takes says nothing about those."""

Spread = dict[str, float]
Columns = Mapping[str, tuple[str, str]]


class Rounds:
    """Collect figures by contender and name, one value a round; make tables, ratios and targets of them.

    Args:
        title: of its tables.
        columns: heading and format of each figure that tables show.
    """

    def __init__(self, title: str, columns: Columns = COLUMNS) -> None:
        self.title, self.columns = title, columns
        self.values: dict[str, dict[str, list[float]]] = {}

    def add(self, contender: str, figures: Mapping[str, float]) -> None:
        """Add the figures of one round."""
        its = self.values.setdefault(contender, {})
        for figure, value in figures.items():
            its.setdefault(figure, []).append(value)

    def add_strongest(self, name: str, contenders: Sequence[str]) -> dict[str, int]:
        """Add a contender that has the figures of the fastest one of each round.

        Returns:
            How many rounds each one won, the most frequent winner first.
        """
        winners = []
        for number in range(len(self.values[contenders[0]][SPEED])):
            winner = max(contenders, key=lambda each: self.values[each][SPEED][number])
            winners.append(winner)
            self.add(name, {figure: values[number] for figure, values in self.values[winner].items()})
        return dict(Counter(winners).most_common())

    def spread(self, contender: str, figure: str) -> Spread:
        """Return median, lowest and highest over the rounds."""
        return spread(self.values[contender][figure])

    def ratio(self, of: str, to: str, figure: str) -> Spread:
        """Return the spread of the ratios round by round."""
        pairs = zip(self.values[of][figure], self.values[to][figure], strict=True)
        return spread([a / b for a, b in pairs])

    def summary(self) -> dict[str, dict[str, Spread]]:
        """Return the spread of every figure, fit for JSON."""
        return {name: {each: self.spread(name, each) for each in its} for name, its in self.values.items()}

    def table(self) -> Table:
        """Return a row for each contender and a column for each figure."""
        num_rounds = max(len(values) for its in self.values.values() for values in its.values())
        return Table(
            title=f"{self.title}: median (lowest - highest) of {num_rounds} rounds",
            columns=["", *self._headings],
            rows=[[name, *self._cells(its)] for name, its in self.values.items()],
        )

    def ratio_table(self, pairs: Iterable[tuple[str, str]]) -> Table:
        """Return a row for each pair (of, to) and a column for each figure that both have; none is 0."""
        rows = []
        for of, to in pairs:
            shared = {
                each for each, values in self.values[to].items() if each in self.values[of] and all(values)
            }
            ratios = (
                cell(self.ratio(of, to, each), ".2f") if each in shared else "" for each in self.columns
            )
            rows.append([f"{of} / {to}", *ratios])
        return Table(
            title=f"{self.title}: ratios within a round", columns=["ratio", *self._headings], rows=rows
        )

    def target(self, of: str, figure: str, bound: Bound, wanted: float, *, to: str | None = None) -> Target:
        """Return a target for a median: of a figure, or of its ratio to another contender's."""
        found = self.spread(of, figure) if to is None else self.ratio(of, to, figure)
        compared = of if to is None else f"{of} / {to}"
        name = f"{self.title}: {compared}, {self.columns[figure][0]}"
        return Target(figure=name, reached=found["median"], bound=bound, wanted=wanted)

    def _cells(self, its: Mapping[str, Sequence[float]]) -> list[str]:
        columns = self.columns.items()
        return [cell(spread(its[each]), form) if each in its else "" for each, (_, form) in columns]

    @property
    def _headings(self) -> list[str]:
        return [heading for heading, _ in self.columns.values()]


def measure_once(contender: Contender, shape: Shape, seconds: float) -> dict[str, float]:
    """Return throughput, CPU and percentiles of one turn; first consume what was prefetched before it."""
    for _ in range(max(8, 3 * contender.ahead_bytes // (2 * shape.num_bytes))):
        contender.next()
    cpu = cpu_seconds(contender.pids)
    began = last = time.perf_counter()
    batch_seconds: list[float] = []
    while last - began < seconds or not batch_seconds:
        contender.next()
        now = time.perf_counter()
        batch_seconds.append(now - last)
        last = now
    num_tokens = len(batch_seconds) * shape.num_tokens
    p50, p99 = np.percentile(batch_seconds, [50, 99]).tolist()
    return {
        SPEED: num_tokens / (last - began) / 1e6,
        CPU: (cpu_seconds(contender.pids) - cpu) / num_tokens * 1e9,
        P50: p50 * 1e3,
        P99: p99 * 1e3,
    }


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time of this process and others so far, of all their threads, user and system.

    Raises:
        ProcessLookupError: one of them has ended.
    """
    # A process's own clock (CPUCLOCK_SCHED of linux/posix-timers.h) counts nanoseconds; /proc counts
    # in hundredths of a second.
    return time.process_time() + sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def spread(figures: Sequence[float]) -> Spread:
    """Return median, lowest and highest."""
    return {"median": statistics.median(figures), "lowest": min(figures), "highest": max(figures)}


def cell(figures: Mapping[str, float], form: str) -> str:
    """Format a spread as `median (lowest - highest)`."""
    median, low, high = (format(figures[name], form) for name in ("median", "lowest", "highest"))
    return f"{median} ({low} - {high})"
