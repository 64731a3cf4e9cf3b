"""What a metric is: numbers by the values of its labels. Making one registers it everywhere."""

from __future__ import annotations

import threading
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

LOCK: Final = threading.Lock()
"""Held to change numbers that more than one thread changes, and to read them all."""

SHARED: Final[dict[str, Shared]] = {}
"""By name, whatever worker processes add up."""

METRICS: Final[dict[str, Metric]] = {}
"""By name, those of `SHARED` that `/metrics` shows."""


@dataclass(frozen=True, slots=True)
class _Place:
    title: str
    per_second: bool = False


class Curve(_Place):
    """A chart of the Live page: a metric's sum over all labels, once for each sample.

    A gauge is shown as it is; a counter by its growth since the sample before, or `per_second`.
    """


class CorpusColumn(_Place):
    """A column in the table of corpora of the Live page; the metric's only label is `corpus`.

    A gauge is shown as it is; a counter since the server started, or `per_second` over about half a minute.
    """


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

    def of(self, *labels: str) -> list[float]:
        """Return the numbers of one series, to be changed; looking them up each time is slower."""
        with LOCK:
            return self.series.setdefault(labels, [0.0] * self.width)

    def numbers(self) -> Series:
        """Return a copy of this process's numbers."""
        with LOCK:
            found = {labels: list(each) for labels, each in self.series.items()}
        for function in self._pulled.values():
            found |= function()
        return found

    @staticmethod
    def add_up(a: list[float], b: list[float]) -> list[float]:
        """Return the numbers of two processes as one."""
        return [x + y for x, y in zip(a, b, strict=True)]


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
        """Count; from any thread."""
        with LOCK:
            self.series.setdefault(labels, [0.0])[0] += amount


class Gauge(Metric):
    """A number that rises and falls, without labels; add to `number` in the event loop's thread."""

    kind = "gauge"
    _family = GaugeMetricFamily

    def __init__(self, name: str, meaning: str, *, live: Sequence[Curve] = (), number: float = 0.0) -> None:
        super().__init__(name, meaning, live=live, max_ended=0)
        self.number = number
        self.pull(lambda: self.number)


class Histogram(Metric):
    """Seconds by buckets of `BOUNDS`; a series is the buckets, what is above the last bound, and the sum."""

    kind = "histogram"
    _family = HistogramMetricFamily

    def __init__(self, name: str, meaning: str, *labels: str) -> None:
        super().__init__(name, meaning, *labels, width=len(BOUNDS) + 2)

    def _shown(self, numbers: list[float]) -> Sequence[Any]:
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(numbers[:-1]), strict=True)), numbers[-1]
