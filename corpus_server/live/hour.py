"""Samples of the last hour: taken by one worker for all, kept in a file, and answered from it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from corpus_server.corpus.publish import publishing
from corpus_server.live.shown import (
    BY_CORPUS,
    CHARTS,
    COLUMNS,
    CORPUS_COLUMNS,
    Change,
    Corpus,
    Held,
    Live,
    PlanRanks,
    Rank,
    Staging,
    column_name,
)
from corpus_server.metrics import shared
from corpus_server.metrics.declared import (
    CACHE_BYTES,
    HELD_BYTES,
    HELD_EXTENTS,
    RANKS,
    REFUSALS,
    STAGED_STEPS,
    UNREAD_STEPS,
    WORKERS,
)
from corpus_server.metrics.shared import Numbers
from corpus_server.user_files import locked_folder

SAMPLE_SECONDS = 5.0
"""Between two samples; workers write their numbers once a second, so it may become 6."""

HOUR_SECONDS = 3600.0
"""For so long are samples kept, 720 of them, about 70 kB, and ranks that ask for nothing shown."""

MAX_SHOWN_RANKS = 1024
"""Ranks in a response: those that asked last."""

LATE_SECONDS = 10.0
"""How long after a loader's end a busy worker may read a request that was sent before."""

AVERAGE_SECONDS = 30.0
"""Time constant of averages: with steps of 10 s, single samples would hop between 0 and 2."""

TOOLS = frozenset({"bench", "bill", "corpus-server", "doctor", "export", "verify-bill"})
"""Names that the commands give their runs: the page folds them away."""

State = dict[str, Any]

_own: State = {}  # where no supervisor gave a folder


def publish() -> None:
    """Write this process's numbers for the others and, if it is time, a sample of all; blocks."""
    shared.publish()
    folder = shared.shared_folder()
    if folder is None or not _is_due(folder / "live"):
        return
    with locked_folder(folder):
        if _is_due(path := folder / "live"):  # no other worker came first
            total = shared.totals(folder, shared.own_numbers())
            state = next_state(shared.read_json(path), total, time.time())
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
        cache=_cache(change),
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


def _averages(change: Change, average: Callable[[str, float], float]) -> dict[str, float]:
    rates = (each for each in COLUMNS if each.name.endswith("_per_second"))
    return {
        each.name: average(each.name, (each.value(change) or 0.0) * change.seconds if change.before else 0.0)
        for each in rates
    }


def _corpora(change: Change, average: Callable[[str, float], float]) -> list[Corpus]:
    values_of: dict[str, dict[str, float]] = {}
    for metric, place in BY_CORPUS:
        name = column_name(metric, place)
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
            for k, (a, b) in enumerate(zip(last[6:], numbers[6:], strict=True))
        )
        trained = average(f"trained {' '.join(key)}", numbers[2] - last[2] if last[2] >= 0 else 0.0)
        run, plan, world_size, rank = key
        has_ended = _has_ended(*numbers[:6])
        trained_step = int(numbers[4] if has_ended else numbers[2])
        runs.setdefault(run, {}).setdefault(plan, []).append(
            Rank(
                rank=int(rank),
                world_size=int(world_size),
                step=int(numbers[1]),
                trained_step=trained_step if trained_step >= 0 else None,
                has_ended=has_ended,
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
            staging=_staging(change, plan, ranks),
        )
        for run in sorted(runs, key=lambda each: (each in TOOLS, not each))
        for plan, ranks in runs[run].items()
    ]


def _has_ended(
    seen: float, step: float, trained: float, ended: float, ended_step: float, begun: float
) -> bool:
    """Return whether a loader has ended, from the numbers of its rank, see `RANKS`.

    A request that it had sent before, and that a busy worker read after its end, says a step that it had
    yielded. The first requests of another loader say none.
    """
    is_late = 0 <= trained <= ended_step and seen - ended < LATE_SECONDS
    return ended > begun and (ended >= seen or is_late)


def _cache(change: Change) -> Held | None:
    held, num_bytes, max_bytes = (int(change.now(each)) for each in (HELD_EXTENTS, HELD_BYTES, CACHE_BYTES))
    return Held(num_extents=held, num_bytes=num_bytes, max_bytes=max_bytes) if max_bytes else None


def _staging(change: Change, plan: str, ranks: list[Rank]) -> Staging | None:
    staged = change.after.get(STAGED_STEPS.name, {}).get((plan,))
    if staged is None:
        return None
    pace = min((each.steps_per_second for each in ranks if not each.has_ended), default=0.0)
    unread = change.after.get(UNREAD_STEPS.name, {}).items()
    seconds = {
        corpus: steps / pace if pace else None for (its, corpus), (steps,) in unread if its == plan and steps
    }
    return Staging(staged_steps=int(staged[0]), unread_seconds=seconds)
