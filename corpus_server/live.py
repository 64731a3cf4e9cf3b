"""The last hour, sampled from what all workers count.

Every 5 s one worker, whichever comes first, adds up the numbers of all and writes a sample. All of them
answer from its file, so it does not matter which one is asked, and asking costs next to nothing.

    state_dir/metrics/SUPERVISOR/live    {"answer": of `/v1/live`, "totals": [...], "ranks": {...}, ...}
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from corpus_server import metrics
from corpus_server.metrics import BOUNDS, RANKS, Numbers

SAMPLE_SECONDS = 5.0
"""Between two samples; workers write their numbers once a second, so it may become 6."""

HOUR_SECONDS = 3600.0
"""For so long are samples kept, 720 of them, about 70 kB, and ranks that ask for nothing shown."""

MAX_SHOWN_RANKS = 1024
"""Ranks in an answer: those that asked last."""

AVERAGE_SECONDS = 30.0
"""Time constant of the averages of a rank: with steps of 10 s, single samples would hop between 0 and 2."""

TOKEN_ROUTES = ("/v1/batches", "/v1/indices")
"""Throughput and latency are those of training; a look at the page must not be seen in them."""

COLUMNS = (
    "unix_seconds",
    "requests_per_second",
    "tokens_per_second",
    "sent_bytes_per_second",
    "p50_seconds",
    "p90_seconds",
    "p99_seconds",
    "refusals",
    "cache_hit_share",
    "active_requests",
    "bytes_in_flight",
)
"""Of the samples. Null: nothing was answered, or read, between this sample and the one before."""

_RANK_COLUMNS = ("steps_per_second", "waiting_share", "sending_share")

State = dict[str, Any]

_own: State = {}  # where no supervisor gave a folder


def publish() -> None:
    """Write this process's numbers for the others and, if it is time, a sample of all; blocks."""
    metrics.publish()
    folder = metrics.shared_folder()
    if folder is None or not _is_due(folder / "live"):
        return
    with metrics.locked(folder):
        if _is_due(path := folder / "live"):  # no other worker came first
            before = orjson.loads(path.read_bytes()) if path.exists() else {}
            new = path.with_suffix(".new")
            new.write_bytes(orjson.dumps(next_state(before, metrics.totals(folder), time.time())))
            new.replace(path)


def answer() -> dict[str, Any]:
    """Return the answer of `/v1/live`: the newest sample and those of the hour before; blocks."""
    folder = metrics.shared_folder()
    if folder is None:
        if not _is_recent(_own.get("at", 0.0)):
            _own.update(next_state(_own, metrics.own_numbers(), time.time()))
        return dict(_own["answer"])
    path = folder / "live"
    if not path.exists():  # within the first second of a server
        publish()
    return _read(path, path.stat().st_mtime_ns)


def after(whole: Mapping[str, Any], unix_seconds: float) -> dict[str, Any]:
    """Return an answer with only those samples that came after a time."""
    times = whole["samples"]["unix_seconds"]
    first = next((k for k, each in enumerate(times) if each > unix_seconds), len(times))
    return {**whole, "samples": {name: values[first:] for name, values in whole["samples"].items()}}


def next_state(before: State, numbers: Numbers, now: float) -> State:
    """Return what is known after one more sample.

    Args:
        before: what this function returned last; empty for the first sample.
        numbers: the sums over all workers.
        now: unix seconds.
    """
    totals = _totals(numbers)
    seconds = max(now - before.get("at", now), 1e-3)
    ranks = _ranks(before.get("ranks", {}), numbers, seconds, now)
    samples: dict[str, list[float | None]] = before.get("answer", {}).get("samples") or {
        name: [] for name in COLUMNS
    }
    if before:
        # A worker that was killed takes what it counted in its last second with it.
        grown = [max(0.0, b - a) for a, b in zip(before["totals"], totals, strict=True)]
        row = _sample(grown, numbers, seconds, now)
        kept = [k for k, each in enumerate(samples["unix_seconds"]) if now - (each or 0.0) < HOUR_SECONDS]
        for name, value in zip(COLUMNS, row, strict=True):
            samples[name] = [*(samples[name][k] for k in kept), value]
    shown = {
        "unix_seconds": now,
        "interval_seconds": SAMPLE_SECONDS,
        "num_workers": int(_number(numbers, "corpus_workers")),
        "samples": samples,
        "refusals": {key[0]: int(each[0]) for key, each in numbers["corpus_refusals"].items()},
        "plans": _by_plan(ranks),
    }
    return {"at": now, "totals": totals, "ranks": ranks, "answer": shown}


@lru_cache(maxsize=1)
def _read(path: Path, changed_ns: int) -> dict[str, Any]:
    """Return the answer of a file; `changed_ns` tells its versions apart."""
    found: dict[str, Any] = orjson.loads(path.read_bytes())["answer"]
    return found


def _is_due(path: Path) -> bool:
    try:
        return not _is_recent(path.stat().st_mtime)
    except FileNotFoundError:
        return True


def _is_recent(unix_seconds: float) -> bool:
    return 0 <= time.time() - unix_seconds < SAMPLE_SECONDS  # below 0: the clock was set back


def _number(numbers: Numbers, name: str, *labels: str) -> float:
    return numbers[name].get(labels, [0.0])[0]


def _totals(numbers: Numbers) -> list[float]:
    """Return the counters that samples are made of; the last ones are the histogram of `TOKEN_ROUTES`."""

    def total(name: str, routes: Sequence[str] = ()) -> float:
        return sum(each[0] for key, each in numbers[name].items() if not routes or key[0] in routes)

    took = [0.0] * (len(BOUNDS) + 1)
    for route in TOKEN_ROUTES:
        for k, each in enumerate(numbers["corpus_request_seconds"].get((route,), [])[: len(took)]):
            took[k] += each
    reads = [_number(numbers, "corpus_reads", kind) for kind in ("hit", "miss")]
    tokens, sent = total("corpus_tokens"), total("corpus_sent_bytes")
    return [total("corpus_requests", TOKEN_ROUTES), tokens, sent, total("corpus_refusals"), *reads, *took]


def _sample(grown: Sequence[float], numbers: Numbers, seconds: float, now: float) -> list[float | None]:
    """Return one value for each of `COLUMNS`."""
    requests, tokens, sent, refusals, hits, misses, *took = grown
    return [
        now,
        requests / seconds,
        tokens / seconds,
        sent / seconds,
        *(quantile(took, share) for share in (0.5, 0.9, 0.99)),
        refusals,
        hits / (hits + misses) if hits + misses else None,
        _number(numbers, "corpus_active_requests"),
        _number(numbers, "corpus_bytes_in_flight"),
    ]


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


def _ranks(
    before: Mapping[str, Sequence[float]], numbers: Numbers, seconds: float, now: float
) -> dict[str, list[float]]:
    """Return by `PLAN WORLD_SIZE RANK` what was counted so far, and the averages of `_RANK_COLUMNS`."""
    newest = sorted(numbers[RANKS].items(), key=lambda each: -each[1][0])[:MAX_SHOWN_RANKS]
    weight = 1 - math.exp(-seconds / AVERAGE_SECONDS)
    found = {}
    for key, its in newest:
        if now - its[0] > HOUR_SECONDS:
            continue
        name = " ".join(key)
        if (last := before.get(name)) is None:
            averages = [0.0] * len(_RANK_COLUMNS)
        else:
            rates = [max(0.0, b - a) / seconds for a, b in zip(last[2:5], its[2:], strict=True)]
            averages = [old + weight * (rate - old) for old, rate in zip(last[5:], rates, strict=True)]
        found[name] = [*its, *averages]
    return found


def _by_plan(ranks: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the plans, the one that was asked for last first, each with its ranks in order."""
    plans: dict[str, list[dict[str, Any]]] = {}
    for name, (seen, step, _, _, _, *averages) in ranks.items():
        plan, world_size, rank = name.split(" ")
        speed, *shares = averages
        plans.setdefault(plan, []).append(
            {
                "rank": int(rank),
                "world_size": int(world_size),
                "step": int(step),
                "seen_unix_seconds": seen,
                # Several connections of one rank may wait at the same time.
                **dict(zip(_RANK_COLUMNS, (speed, *(min(1.0, each) for each in shares)), strict=True)),
            }
        )
    return [
        {"plan": plan, "ranks": sorted(its, key=lambda each: (each["world_size"], each["rank"]))}
        for plan, its in plans.items()
    ]
