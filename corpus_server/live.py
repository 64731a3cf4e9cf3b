"""The last hour, sampled from what all workers count.

Every 5 s one worker, whichever comes first, adds up the numbers of all and writes a sample. All of them
answer from its file, so it does not matter which one is asked, and asking costs next to nothing.

    state_dir/metrics/SUPERVISOR/live    {"at": ..., "numbers": {...}, "averages": {...}, "response": {...}}

A metric says itself where it is shown (`Curve`, `CorpusColumn`). What is made of several metrics is here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from corpus_server.corpus.publish import publishing
from corpus_server.described import described
from corpus_server.metrics import shared
from corpus_server.metrics.declared import RANKS, READS, REFUSALS, REQUEST_SECONDS, REQUESTS, WORKERS
from corpus_server.metrics.kinds import BOUNDS, METRICS, CorpusColumn, Curve, Metric
from corpus_server.metrics.shared import Numbers
from corpus_server.user_files import locked_folder

SAMPLE_SECONDS = 5.0
"""Between two samples; workers write their numbers once a second, so it may become 6."""

HOUR_SECONDS = 3600.0
"""For so long are samples kept, 720 of them, about 70 kB, and ranks that ask for nothing shown."""

MAX_SHOWN_RANKS = 1024
"""Ranks in a response: those that asked last."""

AVERAGE_SECONDS = 30.0
"""Time constant of averages: with steps of 10 s, single samples would hop between 0 and 2."""

TOKEN_ROUTES = ("/v1/batches", "/v1/indices")
"""Throughput and latency are those of training; a look at the page must not be seen in them."""

TOOLS = frozenset({"bench", "corpus-server", "doctor", "export"})
"""Names that the commands give their runs: the page folds them away."""

State = dict[str, Any]

_own: State = {}  # where no supervisor gave a folder


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


def _place(metric: Metric, place: Curve | CorpusColumn) -> str:
    return f"{metric.stem}_per_second" if place.per_second else metric.stem


def _curve(metric: Metric, curve: Curve) -> Column:
    name, about = _place(metric, curve), metric.meaning
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
_by_corpus = [(metric, place) for metric, place in _places if isinstance(place, CorpusColumn)]

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
        Chart(
            title=curve.title, lines=[Line(column=_place(metric, curve), label=metric.stem.replace("_", " "))]
        )
        for metric, curve in _curves
        if curve.title is not None
    ),
    Chart(
        title="Latency, ms",
        lines=[Line(column=f"{name}_seconds", label=name) for name in _QUANTILES],
        in_seconds=True,
    ),
]
CORPUS_COLUMNS = [Shown(column=_place(metric, place), title=place.title) for metric, place in _by_corpus]

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
    seen_unix_seconds: float
    """When it asked for that."""
    steps_per_second: float
    """Steps that were sent: with prefetching more than are trained, until the loader has enough."""
    trained_steps_per_second: float | None
    """Steps that its loader yielded; null if it does not say."""
    waiting_share: float
    """Of the time: the server was making a response that the rank had asked for."""
    sending_share: float
    """Of the time: the server was sending one; the network or the reader is slow."""


@described
class PlanRanks:
    """A plan and the ranks of one run that read it."""

    run: str
    """Name of the run; empty if the clients give none."""
    is_tool: bool
    """Whether a command that measures or shows gave it."""
    plan: str
    ranks: list[Rank]


@described
class Corpus:
    """A corpus that was read since the server started."""

    corpus: str
    values: dict[str, float]
    """By the names in `corpus_columns`; what is per second is an average in which 30 s count most."""


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
    plans: list[PlanRanks]
    """The one that was read last first, those of a run together; behind the runs with a name those without,
    then tools."""


def publish() -> None:
    """Write this process's numbers for the others and, if it is time, a sample of all; blocks."""
    shared.publish()
    folder = shared.shared_folder()
    if folder is None or not _is_due(folder / "live"):
        return
    with locked_folder(folder):
        if _is_due(path := folder / "live"):  # no other worker came first
            state = next_state(shared.read_json(path), shared.totals(folder), time.time())
            with publishing(path, durable=False) as file:
                file.write(orjson.dumps(state))


def response() -> dict[str, Any]:
    """Return the response of `/v1/live`: the newest sample and those of the hour before; blocks."""
    folder = shared.shared_folder()
    if folder is None:
        if not _is_recent(_own.get("at", 0.0)):
            _own.update(orjson.loads(orjson.dumps(next_state(_own, shared.own_numbers(), time.time()))))
        return dict(_own["response"])
    if not (path := folder / "live").exists():  # within the first second of a server
        publish()
    return _read(path, path.stat().st_mtime_ns)


def after(whole: Mapping[str, Any], unix_seconds: float) -> dict[str, Any]:
    """Return a response with only those samples that came after a time."""
    times = whole["samples"]["unix_seconds"]
    first = next((k for k, each in enumerate(times) if each > unix_seconds), len(times))
    return {**whole, "samples": {name: values[first:] for name, values in whole["samples"].items()}}


def next_state(before: Any, numbers: Numbers, now: float) -> State:
    """Return what is known after one more sample.

    Args:
        before: what this function returned last, as JSON; with anything else, or from a time that has not
            come, the hour begins anew.
        numbers: the sums over all workers.
        now: unix seconds.
    """
    try:
        then, earlier = before["at"], shared.from_json(before["numbers"])
        averages, samples = before["averages"], before["response"]["samples"]
        if list(samples) != ["unix_seconds", *(each.name for each in COLUMNS)]:
            raise ValueError("the file is of another release")
        if now <= then:
            raise ValueError(
                "the clock was set back: rates per second and the order of samples would be wrong"
            )
    except (KeyError, TypeError, ValueError):
        then, earlier, averages, samples = now, {}, {}, {}
    change = Change(earlier, numbers, now - then or SAMPLE_SECONDS)
    if not samples:
        samples = {"unix_seconds": [], **{each.name: [] for each in COLUMNS}}
    else:
        row = [now, *(each.value(change) for each in COLUMNS)]
        kept = [k for k, each in enumerate(samples["unix_seconds"]) if now - each < HOUR_SECONDS]
        samples = {
            name: [*(values[k] for k in kept), value]
            for (name, values), value in zip(samples.items(), row, strict=True)
        }
    averaged: dict[str, float] = {}

    def average(name: str, grown: float) -> float:
        """Return an average per second, in which the last `AVERAGE_SECONDS` count most."""
        weight = 1 - math.exp(-change.seconds / AVERAGE_SECONDS)
        old = averages.get(name, 0.0)
        averaged[name] = old + weight * (max(0.0, grown) / change.seconds - old)
        return averaged[name]

    shown = Live(
        unix_seconds=now,
        interval_seconds=SAMPLE_SECONDS,
        num_workers=int(change.now(WORKERS)),
        samples=samples,
        averages=_averages(change, average),
        charts=CHARTS,
        refusals={kind: int(n) for (kind,), (n,) in numbers[REFUSALS.name].items() if n},
        corpus_columns=CORPUS_COLUMNS,
        corpora=_corpora(change, average),
        plans=_plans(change, now, average),
    )
    return {"at": now, "numbers": shared.to_json(numbers), "averages": averaged, "response": shown}


@lru_cache(maxsize=1)
def _read(path: Path, changed_ns: int) -> dict[str, Any]:
    """Return the response of a file; `changed_ns` tells its versions apart."""
    response: dict[str, Any] = orjson.loads(path.read_bytes())["response"]
    return response


def _is_due(path: Path) -> bool:
    try:
        return not _is_recent(path.stat().st_mtime)
    except FileNotFoundError:
        return True


def _is_recent(unix_seconds: float) -> bool:
    return 0 <= time.time() - unix_seconds < SAMPLE_SECONDS  # below 0: the clock was set back


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


def _averages(change: Change, average: Callable[[str, float], float]) -> dict[str, float]:
    rates = (each for each in COLUMNS if each.name.endswith("_per_second"))
    return {
        each.name: average(each.name, (each.value(change) or 0.0) * change.seconds if change.before else 0.0)
        for each in rates
    }


def _corpora(change: Change, average: Callable[[str, float], float]) -> list[Corpus]:
    values_of: dict[str, dict[str, float]] = {}
    for metric, place in _by_corpus:
        name = _place(metric, place)
        for (corpus,) in change.after[metric.name]:
            if place.per_second:
                value = average(f"{name} {corpus}", change.grown(metric, corpus)) if change.before else 0.0
            else:
                value = change.now(metric, corpus)
            values_of.setdefault(corpus, {})[name] = value
    return [Corpus(corpus=name, values=values) for name, values in sorted(values_of.items())]


def _plans(change: Change, now: float, average: Callable[[str, float], float]) -> list[PlanRanks]:
    """Return the plans of each run, the one that was asked for last first, with their ranks in order."""
    newest = sorted(change.after[RANKS.name].items(), key=lambda each: -each[1][0])[:MAX_SHOWN_RANKS]
    runs: dict[str, dict[str, list[Rank]]] = {}
    for key, numbers in newest:
        if now - numbers[0] > HOUR_SECONDS:
            continue
        last = change.before.get(RANKS.name, {}).get(key, numbers)
        speed, waiting, sending = (
            average(f"{k} {' '.join(key)}", b - a)
            for k, (a, b) in enumerate(zip(last[3:], numbers[3:], strict=True))
        )
        trained = average(f"trained {' '.join(key)}", numbers[2] - last[2] if last[2] >= 0 else 0.0)
        run, plan, world_size, rank = key
        runs.setdefault(run, {}).setdefault(plan, []).append(
            Rank(
                rank=int(rank),
                world_size=int(world_size),
                step=int(numbers[1]),
                trained_step=int(numbers[2]) if numbers[2] >= 0 else None,
                seen_unix_seconds=numbers[0],
                steps_per_second=speed,
                trained_steps_per_second=trained if numbers[2] >= 0 else None,
                # Several connections of one rank may wait at the same time.
                waiting_share=min(1.0, waiting),
                sending_share=min(1.0, sending),
            )
        )
    return [
        PlanRanks(
            run=run,
            is_tool=run in TOOLS,
            plan=plan,
            ranks=sorted(ranks, key=lambda rank: (rank.world_size, rank.rank)),
        )
        for run in sorted(runs, key=lambda each: (each in TOOLS, not each))
        for plan, ranks in runs[run].items()
    ]
