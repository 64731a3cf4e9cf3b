"""What a worker process counts, and the sums over several.

Each process counts in its own memory, at half the cost of prometheus-client's shared files, and writes its
numbers to a file every second. `/metrics` adds up the files of all workers, its own at once. The supervisor
adds the file of a worker that ended to that of the past.

    state_dir/metrics/SUPERVISOR/WORKER.json    {"corpus_sent_bytes": [[["/v1/batches"], [1234.0]]], ...}
                                 past.json      the counters of workers that have ended
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from corpus_server.errors import CorpusServerError
from corpus_server.read import timing
from corpus_server.read.bound_plan import Source

FOLDER_VARIABLE = "CORPUS_SERVER_METRICS"
"""Environment variable by which a worker learns the folder that it shares with the others."""

PUBLISH_SECONDS = 1.0
"""Between two files of a worker: what a killed one has counted since is lost, 1 to 2 ms of CPU each."""

MAX_PLANS = 32
"""Plans that have a label of their own in a process; what others read is counted as `other`."""

PLAN_IDLE_SECONDS = 600.0
"""A plan that is not read for so long gives its label to another one. Prometheus forgets after 300 s."""

MAX_RANKS = 512
"""Ranks that are kept of workers that have ended, those that asked last: about 70 kB."""

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
"""Upper bounds of the histograms' buckets, seconds."""

Numbers = dict[str, dict[tuple[str, ...], list[float]]]
"""By metric, by the values of its labels: one number, or a histogram's buckets and its sum."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric; `labels` are the names of its labels."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


FAMILIES = {
    "corpus_requests": Family("counter", "Requests answered.", ("route", "status", "via")),
    "corpus_request_seconds": Family(
        "histogram", "Seconds from the request's head to the last byte handed to the kernel.", ("route",)
    ),
    "corpus_sent_bytes": Family("counter", "Body bytes sent.", ("route",)),
    "corpus_refusals": Family("counter", "Problem documents sent.", ("type",)),
    "corpus_tokens": Family("counter", "Tokens sent, by the plan's weights.", ("corpus",)),
    "corpus_plan_tokens": Family("counter", "Tokens sent.", ("plan",)),
    "corpus_made_ahead": Family("counter", "Responses that were made before they were asked for."),
    "corpus_stage_seconds": Family("histogram", "Seconds of a fast-path response's stages.", ("stage",)),
    "corpus_reads": Family("counter", "Pieces copied from the maps.", ("cache",)),
    "corpus_major_faults": Family("counter", "Waits for the disk because a page was not in memory."),
    "corpus_read_ahead_bytes": Family("counter", "Bytes of windows asked of the disk ahead of requests."),
    "corpus_staged_bytes": Family("counter", "Bytes that have come from object stores."),
    "corpus_staged_shards": Family("counter", "Shards that have come from object stores."),
    "corpus_staging_waits": Family("counter", "Waits of responses for shards of object stores."),
    "corpus_evicted_shards": Family("counter", "Shards removed from the cache to make room."),
    "corpus_active_requests": Family("gauge", "Requests under way."),
    "corpus_bytes_in_flight": Family("gauge", "Bytes of token responses under way."),
    "corpus_stale_tokens": Family("gauge", "Worker processes that cannot take up the file of tokens."),
    "corpus_workers": Family("gauge", "Worker processes."),
}

RANKS = "ranks"
"""Not a metric, since there may be thousands: by plan, world size and rank, when it asked last (unix
seconds), its last step, and sums: steps, seconds in which responses were made, seconds of sending."""

STAGES = ("wait", "locate", "gather", "send")
"""Of a fast-path response: for a thread or staged shards, for where its rows lie, for its tokens, for the
kernel."""


class Histogram:
    """Counts by bucket; for one thread."""

    __slots__ = ("numbers",)

    def __init__(self) -> None:
        self.numbers = [0.0] * (len(BOUNDS) + 2)  # behind the last bound, and the sum

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.numbers[bisect_left(BOUNDS, seconds)] += 1
        self.numbers[-1] += seconds


class _Active:
    """How many requests are under way; for the event loop's thread."""

    number = 0


ACTIVE = _Active()
_lock = threading.Lock()
_numbers: Numbers = {name: {} for name in FAMILIES}  # under the lock, but for lists of `_series`
_pulled: dict[str, Callable[[], float]] = {}
_pull_ranks: Callable[[], dict[tuple[str, ...], list[float]]] = dict
_pending: dict[Source, int] = {}  # tokens since the last look, under the lock
_plans: OrderedDict[str, float] = OrderedDict()  # with a label: when they were read last, longest ago first


def pull(name: str, function: Callable[[], float]) -> None:
    """Have a number without labels asked for when it is wanted."""
    _pulled[name] = function


def pull_ranks(function: Callable[[], dict[tuple[str, ...], list[float]]]) -> None:
    """Have the numbers of ranks, see `RANKS`, asked for when they are wanted."""
    global _pull_ranks
    _pull_ranks = function


def add(name: str, amount: float = 1.0, *labels: str) -> None:
    """Add to a counter; from any thread."""
    with _lock:
        _numbers[name].setdefault(labels, [0.0])[0] += amount


def count(route: str, status: int, sent_bytes: int, seconds: float, *, via: str) -> None:
    """Count one request that was answered; for the event loop's thread.

    Args:
        route: template of the path.
        sent_bytes: of its body.
        seconds: see `corpus_request_seconds`.
        via: which path answered, `door` or `application`.
    """
    requests, sent, took = _series(route, status, via)
    requests[0] += 1
    sent[0] += sent_bytes
    took.observe(seconds)


def count_stages(seconds: Iterable[float]) -> None:
    """Count the stages of a response, in the order of `STAGES`; for the event loop's thread."""
    for histogram, each in zip(_stages(), seconds, strict=True):
        histogram.observe(each)


def count_tokens(source: Source, num_tokens: int) -> None:
    """Count tokens that were sent."""
    with _lock:
        _pending[source] = _pending.get(source, 0) + num_tokens


@cache
def _series(route: str, status: int, via: str) -> tuple[list[float], list[float], Histogram]:
    # Looking one up by its labels costs more than counting; there are as many as routes and statuses.
    with _lock:
        requests = _numbers["corpus_requests"].setdefault((route, str(status), via), [0.0])
        sent = _numbers["corpus_sent_bytes"].setdefault((route,), [0.0])
        took = Histogram()
        took.numbers = _numbers["corpus_request_seconds"].setdefault((route,), took.numbers)
    return requests, sent, took


@cache
def _stages() -> tuple[Histogram, ...]:
    made = tuple(Histogram() for _ in STAGES)
    with _lock:
        for stage, histogram in zip(STAGES, made, strict=True):
            _numbers["corpus_stage_seconds"][stage,] = histogram.numbers
    return made


def own_numbers() -> Numbers:
    """Return what this process has counted so far."""
    with _lock:
        _settle_tokens()
        found = {name: {key: list(each) for key, each in series.items()} for name, series in _numbers.items()}
    found[RANKS] = _pull_ranks()
    for name, function in _pulled.items():
        found[name][()] = [function()]
    num_reads, num_cold = timing.total("num_reads"), timing.total("num_cold_reads")
    found["corpus_reads"] = {("hit",): [num_reads - num_cold], ("miss",): [num_cold]}
    found["corpus_major_faults"][()] = [timing.total("num_faults")]
    found["corpus_active_requests"][()] = [ACTIVE.number]
    found["corpus_workers"][()] = [1.0]
    return found


def _settle_tokens() -> None:
    """Add the tokens of plans to those of their corpora and to the plans' own; the lock is held."""
    now = time.monotonic()
    by_plan, by_corpus = _numbers["corpus_plan_tokens"], _numbers["corpus_tokens"]
    for source, num_tokens in _pending.items():
        for corpus, share in source.shares.items():
            by_corpus.setdefault((corpus,), [0.0])[0] += share * num_tokens
        if not source.plan_id:
            continue  # a range of a corpus
        if source.plan_id not in _plans and len(_plans) >= MAX_PLANS:
            oldest, read_at = next(iter(_plans.items()))
            if now - read_at > PLAN_IDLE_SECONDS:
                del _plans[oldest]
                by_plan.pop((oldest,), None)
        has_label = source.plan_id in _plans or len(_plans) < MAX_PLANS
        if has_label:
            _plans[source.plan_id] = now
            _plans.move_to_end(source.plan_id)
        by_plan.setdefault((source.plan_id if has_label else "other",), [0.0])[0] += num_tokens
    _pending.clear()


def publish() -> None:
    """Write this process's numbers for the others; blocks. Does nothing without a shared folder."""
    if (folder := shared_folder()) is not None:
        folder.mkdir(parents=True, exist_ok=True)  # the state folder may be deleted at any time
        _write(_own_file(folder), own_numbers())


def render() -> bytes:
    """Return the sums over all live and past workers as Prometheus text; blocks."""
    folder = shared_folder()
    if folder is None:
        return _text(own_numbers())
    with contextlib.suppress(OSError):  # a full disk is no reason to be blind; others see what was before
        publish()
    with locked(folder):
        return _text(totals(folder))


def shared_folder() -> Path | None:
    """Return the folder that this worker shares with the others; None where no supervisor gave one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return None if folder is None else Path(folder)


def totals(folder: Path) -> Numbers:
    """Return the sums over all live and past workers; the folder is `locked`."""
    others = folder.glob("*.json")
    return _sum([own_numbers(), *(_read(path) for path in others if path != _own_file(folder))])


def _own_file(folder: Path) -> Path:
    return folder / f"{os.getpid()}.json"


def add_ended(folder: Path, pid: int) -> None:
    """Add the counters of a worker that has ended to those of the past; blocks.

    Of its plans and ranks, as many are kept as one process may tell apart. Workers that ended while the
    disk was full are added with it.
    """
    past = folder / "past.json"
    with locked(folder):
        files = folder.glob("[0-9]*.json")
        ended = [each for each in files if each.stem == str(pid) or not Path("/proc", each.stem).exists()]
        if ended:
            total = _sum(_read(path) for path in (past, *ended) if path.exists())
            for name, most in (("corpus_plan_tokens", MAX_PLANS + 1), (RANKS, MAX_RANKS)):
                largest = sorted(total[name].items(), key=lambda each: -each[1][0])
                total[name] = dict(largest[:most])
            gauges = {name for name, family in FAMILIES.items() if family.kind == "gauge"}
            _write(past, {name: each for name, each in total.items() if name not in gauges})
            for path in ended:
                path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from moving numbers from one file to another meanwhile: they would be missed, or twice."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, numbers: Numbers) -> None:
    text = json.dumps({name: list(series.items()) for name, series in numbers.items()})
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _read(path: Path) -> Numbers:
    found = json.loads(path.read_text())
    return {name: {tuple(key): each for key, each in series} for name, series in found.items()}


def _sum(every: Iterable[Numbers]) -> Numbers:
    total: Numbers = {name: {} for name in (*FAMILIES, RANKS)}
    for numbers in every:
        for name, series in numbers.items():
            so_far = total.setdefault(name, {})  # a worker of another release may count more
            for key, each in series.items():
                before = so_far.get(key, [0.0] * len(each))
                added = [a + b for a, b in zip(before, each, strict=True)]
                if name == RANKS:
                    added[:2] = max(before[:2], each[:2])
                so_far[key] = added
    return total


_ERRORS: list[type[CorpusServerError]] = [CorpusServerError, *CorpusServerError.__subclasses__()]
_NO_REFUSALS: dict[tuple[str, ...], list[float]] = {(error.slug,): [0.0] for error in _ERRORS}
"""Shown from the start: in a series that begins with its first refusal, Prometheus sees no rise."""


class _Sums:
    """What prometheus-client wants of a collector."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        for name, family in FAMILIES.items():
            series = self._numbers[name]
            yield _metric(name, family, {**_NO_REFUSALS, **series} if name == "corpus_refusals" else series)


def _metric(name: str, family: Family, series: Mapping[tuple[str, ...], list[float]]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
        for key, numbers in series.items():
            sums = [sum(numbers[: k + 1]) for k in range(len(BOUNDS) + 1)]
            names = [*map(str, BOUNDS), "+Inf"]
            histogram.add_metric(key, list(zip(names, sums, strict=True)), numbers[-1])
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(name, family.help, labels=family.labels)
    for key, (number,) in series.items() if family.labels else [((), series.get((), [0.0]))]:
        plain.add_metric(key, number)
    return plain


def _text(numbers: Numbers) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Sums(numbers))
    return generate_latest(registry)
