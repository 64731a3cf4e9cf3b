"""What a metric is, every metric, declared once, and what counts several at a time.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from corpus_server.errors import CorpusServerError
from corpus_server.read import gather
from corpus_server.read.bound_plan import Source

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

    def numbers(self) -> Series:
        """Return a copy of this process's numbers."""
        with _lock:
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
        with _lock:
            self.series.setdefault(labels, [0.0])[0] += amount

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


MAX_PLANS: Final = 32
"""Plans that have a label of their own in a process; what others read is counted as `other`."""

PLAN_IDLE_SECONDS: Final = 600.0
"""A plan that is not read for so long gives its label to another one. Prometheus forgets after 300 s."""

MAX_RANKS: Final = 512
"""Ranks that are kept of workers that have ended, those that asked last: about 70 kB."""

STAGES: Final = ("wait", "locate", "gather", "send")
"""Of a fast-path response: for a thread or staged shards, for where its rows lie, for its tokens, for the
kernel."""

REQUESTS: Final = Counter("corpus_requests", "requests answered", "route", "status", "via")
REQUEST_SECONDS: Final = Histogram(
    "corpus_request_seconds", "from the request's head to the last byte handed to the kernel", "route"
)
SENT_BYTES: Final = Counter("corpus_sent_bytes", "body bytes sent", "route")
TOKENS: Final = Counter(
    "corpus_tokens",
    "tokens sent; tokens of a mixture are divided by the exact weights of the plan's stage",
    "corpus",
    live=[Curve("Tokens per second", per_second=True), CorpusColumn("tokens/s", per_second=True)],
)
PLAN_TOKENS: Final = Counter("corpus_plan_tokens", "tokens sent", "plan", max_ended=MAX_PLANS + 1)
STAGE_SECONDS: Final = Histogram(
    "corpus_stage_seconds",
    "where the time of a fast-path response goes: `wait` for a thread or staged shards, `locate` rows, "
    "`gather` and hash tokens, `send`",
    "stage",
)
READS: Final = Counter(
    "corpus_reads",
    "pieces copied from the files; `miss`: at least one page had to be read from disk",
    "cache",
)
MAJOR_FAULTS: Final = Counter("corpus_major_faults", "pages that had to be read from disk during a copy")
READ_AHEAD_BYTES: Final = Counter(
    "corpus_read_ahead_bytes", "bytes of windows that the kernel was asked for ahead of requests"
)
STAGED_BYTES: Final = Counter("corpus_staged_bytes", "bytes that have come from object stores")
STAGED_SHARDS: Final = Counter("corpus_staged_shards", "shards that have come from object stores")
STAGING_WAITS: Final = Counter("corpus_staging_waits", "responses that had to wait for a shard")
EVICTED_SHARDS: Final = Counter(
    "corpus_evicted_shards", "shards removed from the cache to make room for others"
)
ACTIVE: Final = Gauge("corpus_active_requests", "requests under way", live=[Curve("Requests under way")])
BYTES_IN_FLIGHT: Final = Gauge("corpus_bytes_in_flight", "bytes of the token responses under way")
STALE_TOKENS: Final = Gauge(
    "corpus_stale_tokens", "worker processes that could not read the present token file"
)
WORKERS: Final = Gauge("corpus_workers", "worker processes in the sum", number=1)
REFUSALS: Final = Counter(
    "corpus_refusals", "problem documents sent, by their type", "type", live=[Curve("Refusals")]
)

READS.pull(lambda: gather.total("num_reads") - gather.total("num_cold_reads"), "hit")
READS.pull(lambda: gather.total("num_cold_reads"), "miss")
MAJOR_FAULTS.pull(lambda: gather.total("num_faults"))
_ERRORS: list[type[CorpusServerError]] = [CorpusServerError, *CorpusServerError.__subclasses__()]
for _error in _ERRORS:
    # In a series that begins with its first refusal, Prometheus would see no rise.
    REFUSALS.add(0, _error.slug)


class _Ranks(Shared):
    """What each rank asked for. No metric, since there may be thousands: for `/v1/live`.

    A series is when a rank asked last (unix seconds), its last step, and three sums: steps, seconds in which
    responses were made, seconds of sending.
    """

    @staticmethod
    def add_up(a: list[float], b: list[float]) -> list[float]:
        """Return the numbers of two processes as one; the step that was asked for last counts."""
        return [*max(a[:2], b[:2]), *Shared.add_up(a[2:], b[2:])]


RANKS: Final = _Ranks("ranks", ("plan", "world_size", "rank"), width=5, max_ended=MAX_RANKS)

_plans: OrderedDict[str, float] = OrderedDict()  # with a label: when they were read last, longest ago first


def count(route: str, status: int, sent_bytes: int, seconds: float, *, via: str) -> None:
    """Count one request that was answered.

    Args:
        route: template of the path.
        sent_bytes: of its body.
        seconds: see `corpus_request_seconds`.
        via: which path answered, `fast-path` or `application`.
    """
    REQUESTS.add(1, route, str(status), via)
    SENT_BYTES.add(sent_bytes, route)
    REQUEST_SECONDS.observe(seconds, route)


def count_stages(seconds: Iterable[float]) -> None:
    """Count the stages of a response, in the order of `STAGES`."""
    for stage, each in zip(STAGES, seconds, strict=True):
        STAGE_SECONDS.observe(each, stage)


def count_tokens(source: Source, num_tokens: int) -> None:
    """Count tokens that were sent."""
    for corpus, share in source.shares.items():
        TOKENS.add(share * num_tokens, corpus)
    if source.plan_id:  # else a range of a corpus
        PLAN_TOKENS.add(num_tokens, _plan_label(source.plan_id))


def _plan_label(plan_id: str) -> str:
    """Return the label under which a plan's tokens count; for the event loop's thread."""
    now = time.monotonic()
    if plan_id not in _plans and len(_plans) >= MAX_PLANS:
        oldest, read_at = next(iter(_plans.items()))
        if now - read_at <= PLAN_IDLE_SECONDS:
            return "other"
        del _plans[oldest]
        PLAN_TOKENS.remove(oldest)
    _plans[plan_id] = now
    _plans.move_to_end(plan_id)
    return plan_id
