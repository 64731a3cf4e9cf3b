"""What the last hour shows: columns of samples and charts, and the response of `/v1/live`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING

from corpus_server.described import described
from corpus_server.metrics.declared import READS, REQUEST_SECONDS, REQUESTS
from corpus_server.metrics.kinds import BOUNDS, METRICS, CorpusColumn, Curve, Metric
from corpus_server.metrics.shared import Numbers

TOKEN_ROUTES = ("/v1/batches", "/v1/indices")
"""Throughput and latency are those of training; a look at the page must not be seen in them."""


@dataclass(frozen=True, slots=True)
class Change:
    """What was counted until a sample and until the one before."""

    before: Numbers
    after: Numbers
    seconds: float

    def now(self, metric: Metric, *labels: str) -> float:
        """Return a metric's sum over its series, or over those with one of these first labels."""
        return _sum(self.after, metric, labels)

    def grown(self, metric: Metric, *labels: str) -> float:
        """Return by how much that sum grew; what a killed worker counted in its last second is lost."""
        return max(0.0, self.now(metric, *labels) - _sum(self.before, metric, labels))

    def latency(self, share: float) -> float | None:
        """Return a quantile of the seconds that `TOKEN_ROUTES` took."""
        grown = [0.0] * (len(BOUNDS) + 1)
        for numbers, sign in ((self.after, 1), (self.before, -1)):
            for route in TOKEN_ROUTES:
                series = numbers.get(REQUEST_SECONDS.name, {}).get((route,), [])
                grown = [a + sign * b for a, b in zip(grown, series, strict=False)] if series else grown
        return quantile([max(0.0, each) for each in grown], share)

    def hit_share(self) -> float | None:
        """Return which share of the reads were hits."""
        hits, misses = self.grown(READS, "hit"), self.grown(READS, "miss")
        return hits / (hits + misses) if hits + misses else None


@dataclass(frozen=True, slots=True)
class Column:
    """A value of each sample; None: nothing was answered, or read, since the one before."""

    name: str
    help: str
    value: Callable[[Change], float | None]


@described
class Line:
    """A line of a chart."""

    column: str
    """Column of `samples`."""
    label: str


@described
class Chart:
    """A chart of the page."""

    title: str
    lines: list[Line]
    in_seconds: bool = False
    """Whether the values are seconds: shown as milliseconds, on a logarithmic axis."""


@described
class Shown:
    """A column in the table of corpora."""

    column: str
    """Key in `values` of each corpus."""
    title: str


def column_name(metric: Metric, place: Curve | CorpusColumn) -> str:
    """Return what a metric is called where it is shown."""
    return f"{metric.stem}_per_second" if place.per_second else metric.stem


def _curve(metric: Metric, curve: Curve) -> Column:
    name, about = column_name(metric, curve), metric.meaning
    if metric.kind == "gauge":
        return Column(name, about, lambda change: change.now(metric))
    if curve.per_second:
        return Column(name, about, lambda change: change.grown(metric) / change.seconds)
    return Column(name, f"{about}, since the sample before", lambda change: change.grown(metric))


def _latency(name: str, share: float) -> Column:
    about = "of batches and indices; null: none was answered"
    return Column(f"{name}_seconds", about, lambda change: change.latency(share))


_places = [(metric, place) for metric in METRICS.values() for place in metric.live]
_curves = [(metric, place) for metric, place in _places if isinstance(place, Curve)]
BY_CORPUS = [(metric, place) for metric, place in _places if isinstance(place, CorpusColumn)]

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
COLUMNS = (
    Column(
        "requests_per_second",
        "of batches and indices",
        lambda change: change.grown(REQUESTS, *TOKEN_ROUTES) / change.seconds,
    ),
    *(_latency(name, share) for name, share in _QUANTILES.items()),
    Column(
        "cache_hit_share",
        "of the pieces read, those that were in the page cache; null: none was read",
        Change.hit_share,
    ),
    *(_curve(metric, curve) for metric, curve in _curves),
)
CHARTS = [
    *(
        Chart(title=curve.title, lines=[Line(column=column_name(metric, curve), label=metric.label)])
        for metric, curve in _curves
        if curve.title is not None
    ),
    Chart(
        title="Latency, ms",
        lines=[Line(column=f"{name}_seconds", label=name) for name in _QUANTILES],
        in_seconds=True,
    ),
]
CORPUS_COLUMNS = [Shown(column=column_name(metric, place), title=place.title) for metric, place in BY_CORPUS]

if TYPE_CHECKING:
    Samples = dict[str, list[float | None]]
else:
    Samples = make_dataclass(
        "Samples",
        [("unix_seconds", list[float])]
        + [(each.name, list[float | None], field(metadata={"description": each.help})) for each in COLUMNS],
    )
    Samples.__doc__ = "One value for each sample, oldest first. Rates are averages since the sample before."


@described
class Rank:
    """A rank that asked in the last hour. Speed and shares are averages in which 30 s count most."""

    rank: int
    world_size: int
    step: int
    """Last training step of what it asked for last, which a loader prefetches."""
    trained_step: int | None
    """The last step that its loader had yielded by then; null if it does not say."""
    has_ended: bool
    """Whether its loader has said that it asks for no more: it was closed, or its last step was yielded."""
    seen_unix_seconds: float
    """When it asked for that, or ended."""
    steps_per_second: float
    """Steps that were sent: with prefetching more than are trained, until the loader has enough."""
    trained_steps_per_second: float | None
    """Steps that its loader yielded; null if it does not say."""
    waiting_share: float
    """Of the time: the server was making a response that the rank had asked for."""
    sending_share: float
    """Of the time: the server was sending one; the network or the reader is slow."""


@described
class Staging:
    """What of a plan's corpora in object stores is here, and when all of them was read."""

    staged_steps: int
    """Steps after the last request of the slowest rank, of any run, whose extents are in the cache."""
    unread_seconds: dict[str, float | None]
    """By corpus: until its rows were read once, at the pace of this run's slowest rank; null: that stands."""


@described
class PlanRanks:
    """A plan and the ranks of one run that read it."""

    run: str
    """Name of the run; empty if the clients give none."""
    is_tool: bool
    """Whether a command that measures or shows gave it."""
    plan: str
    ranks: list[Rank]
    staging: Staging | None
    """null if none of its corpora lies in an object store, or nobody has asked for a minute."""


@described
class Corpus:
    """A corpus that was read since the server started."""

    corpus: str
    values: dict[str, float]
    """By the names in `corpus_columns`; what is per second is an average in which 30 s count most."""


@described
class Held:
    """The cache of corpora in object stores; all workers share it."""

    num_extents: int
    """Those on their way, too."""
    num_bytes: int
    max_bytes: int


@described
class Live:
    """The last hour of all worker processes."""

    unix_seconds: float
    """Of the last sample."""
    interval_seconds: float
    num_workers: int
    samples: Samples
    averages: dict[str, float]
    """By the columns of `samples` that are per second: averages in which 30 s count most, as in `corpora`."""
    charts: list[Chart]
    """What the page draws of `samples`."""
    refusals: dict[str, int]
    """By problem type, since the server started."""
    corpus_columns: list[Shown]
    """What the page shows of `corpora`."""
    corpora: list[Corpus]
    cache: Held | None
    """null if no corpus lies in an object store."""
    plans: list[PlanRanks]
    """The one that was read last first, those of a run together; behind the runs with a name those without,
    then tools."""


def _sum(numbers: Numbers, metric: Metric, labels: Sequence[str]) -> float:
    series = numbers.get(metric.name, {})
    return sum(each[0] for key, each in series.items() if not labels or key[0] in labels)


def quantile(counts: Sequence[float], share: float) -> float | None:
    """Return a quantile of a histogram over `BOUNDS`, linear within a bucket as Prometheus has it."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    low = 0.0
    for bound, count in zip(BOUNDS, counts, strict=False):
        if wanted <= count:
            return low + (bound - low) * wanted / count
        wanted -= count
        low = bound
    return low
