"""What a metric is: numbers that worker processes add up, and how `/metrics` and the Live page show them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
"""Upper bounds of the histograms' buckets, seconds."""

Series = dict[tuple[str, ...], list[float]]
"""By the values of the labels: one number, or a histogram's buckets and its sum."""

_lock: Final = threading.Lock()  # held to change the numbers of a series, and to read them all

SHARED: Final[dict[str, Shared]] = {}
"""By name, whatever worker processes add up."""

METRICS: Final[dict[str, Metric]] = {}
"""By name, those of `SHARED` that `/metrics` shows."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A column of the last hour's samples: a metric's sum over all labels; with a title, also a chart.

    A gauge is shown as it is; a counter by its growth since the sample before, or `per_second`.
    """

    title: str | None = None
    per_second: bool = False


@dataclass(frozen=True, slots=True)
class CorpusColumn:
    """A column in the table of corpora of the Live page; the metric's only label is `corpus`.

    A gauge is shown as it is; a counter since the server started, or `per_second` over about half a minute.
    """

    title: str
    per_second: bool = False


def sums(a: list[float], b: list[float]) -> list[float]:
    """Return the sums of two lists."""
    return [x + y for x, y in zip(a, b, strict=True)]


class Shared:
    """Numbers that worker processes add up.

    Args:
        name: in the files by which they share them.
        labels: names of the labels.
        width: numbers of one series.
        max_ended: most series that are kept of processes that have ended; None: all.
    """

    def __init__(
        self, name: str, labels: Sequence[str], *, width: int = 1, max_ended: int | None = None
    ) -> None:
        if name in SHARED:
            raise ValueError(f"there are two metrics with the name {name}")
        self.name = name
        self.labels = tuple(labels)
        self.width = width
        self.max_ended = max_ended
        self.series: Series = {}
        self._pulled: dict[tuple[str, ...] | None, Callable[[], Series]] = {}
        SHARED[name] = self

    def pull_series(self, function: Callable[[], Series]) -> None:
        """Ask a function for series whenever they are wanted."""
        self._pulled[None] = function

    def pull(self, function: Callable[[], float], *labels: str) -> None:
        """Ask a function for the number of one series whenever it is wanted."""
        self._pulled[labels] = lambda: {labels: [function()]}

    def numbers(self) -> Series:
        """Return a copy of this process's numbers."""
        with _lock:
            series = {labels: list(numbers) for labels, numbers in self.series.items()}
        for function in self._pulled.values():
            series |= function()
        return series

    def add_up(self, a: list[float], b: list[float]) -> list[float]:
        """Return the numbers of two processes as one."""
        return sums(a, b)


class Metric(Shared):
    """A metric of `/metrics`, with its row in docs/operations.md.

    Args:
        name: begins with `corpus_`; a counter's gets `_total` behind it in `/metrics`.
        meaning: what is counted, in lower case, as the row of docs/operations.md says it.
        labels: names of the labels; their values must be few, whatever clients send.
        live: where the Live page shows the metric.
    """

    kind: ClassVar[str]
    _family: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        name: str,
        meaning: str,
        *labels: str,
        live: Sequence[Curve | CorpusColumn] = (),
        width: int = 1,
        max_ended: int | None = None,
    ) -> None:
        if any(isinstance(place, CorpusColumn) for place in live) and labels != ("corpus",):
            raise ValueError(f"{name} is shown by corpus, so its only label must be corpus, got {labels}")
        super().__init__(name, labels, width=width, max_ended=max_ended)
        self.meaning = meaning
        self.live = tuple(live)
        METRICS[name] = self

    @property
    def stem(self) -> str:
        """The name without `corpus_`, for columns of `/v1/live`."""
        return self.name.removeprefix("corpus_")

    @property
    def label(self) -> str:
        """The same in words."""
        return self.stem.replace("_", " ")

    def family(self, series: Mapping[tuple[str, ...], list[float]]) -> Family:
        """Return the metric with these numbers as prometheus-client writes it."""
        family: Family = type(self)._family(self.name, self.meaning, labels=self.labels)
        for labels, numbers in (series or ({} if self.labels else {(): [0.0]})).items():
            family.add_metric(labels, *self._shown(numbers))  # type: ignore[attr-defined]
        return family

    def _shown(self, numbers: list[float]) -> Sequence[Any]:
        return numbers


class Counter(Metric):
    """What only grows, until the server restarts."""

    kind = "counter"
    _family = CounterMetricFamily

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Count; from any thread. Nothing, counted for the first time, begins no series: see `begin`."""
        if amount:
            with _lock:
                self.series.setdefault(labels, [0.0])[0] += amount

    def begin(self, *labels: str) -> None:
        """Show a series at 0 before anything is counted."""
        with _lock:
            self.series.setdefault(labels, [0.0])

    def remove(self, *labels: str) -> None:
        """Forget a series, whose label another one needs."""
        with _lock:
            self.series.pop(labels, None)


class Gauge(Metric):
    """A number that rises and falls, without labels; add to `number` in the event loop's thread."""

    kind = "gauge"
    _family = GaugeMetricFamily

    def __init__(self, name: str, meaning: str, *, live: Sequence[Curve] = (), number: float = 0.0) -> None:
        super().__init__(name, meaning, live=live, max_ended=0)
        self.number = number
        self.pull(lambda: self.number)


class SharedGauge(Metric):
    """A number of what workers share, such as a folder: each of them has all of it, so it is no sum.

    Args:
        of: which of the workers' numbers counts, `max` or `min`.
    """

    kind = "gauge"
    _family = GaugeMetricFamily

    def __init__(self, name: str, meaning: str, *labels: str, of: Callable[[float, float], float]) -> None:
        super().__init__(name, meaning, *labels, max_ended=0)
        self._of = of

    def add_up(self, a: list[float], b: list[float]) -> list[float]:
        """Return the number that counts."""
        return list(map(self._of, a, b))


class Histogram(Metric):
    """Seconds by buckets of `BOUNDS`; a series is the buckets, what is above the last bound, and the sum."""

    kind = "histogram"
    _family = HistogramMetricFamily

    def __init__(self, name: str, meaning: str, *labels: str) -> None:
        super().__init__(name, meaning, *labels, width=len(BOUNDS) + 2)

    def observe(self, seconds: float, *labels: str) -> None:
        """Count a duration; from any thread."""
        with _lock:
            numbers = self.series.setdefault(labels, [0.0] * self.width)
            numbers[bisect_left(BOUNDS, seconds)] += 1
            numbers[-1] += seconds

    def _shown(self, numbers: list[float]) -> Sequence[Any]:
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(numbers[:-1]), strict=True)), numbers[-1]
