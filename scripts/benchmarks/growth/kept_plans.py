"""Latency against the number of plans that a server has kept."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from corpus_server.corpus import Corpus
from corpus_server.plan import Plan
from corpus_server.plan.store import PlanStore
from scripts.benchmarks import corpus
from scripts.benchmarks.expected import plan_of
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import Server, batches_path, serving, timed_gets

NUMBERS = (1, 10**3, 10**4, 10**5)
ROWS, SEQ_LEN = 16, 1024
REQUESTS = 20
MOST_OF_FIRST = 1.5
KINDS = {
    "seen": "a step of a plan that was used just now",
    "kept": "the first step of a plan that is read from the store",
    "listed": "`/v1/plans?limit=10`, the newest",
}


@dataclass
class _Times:
    """Medians of each round, in seconds, by kind."""

    rounds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def summary(self) -> dict[str, dict[str, float]]:
        return {
            kind: {
                "median_ms": statistics.median(medians) * 1e3,
                "lowest_ms": min(medians) * 1e3,
                "highest_ms": max(medians) * 1e3,
            }
            for kind, medians in self.rounds.items()
        }


def measure(options: Options) -> Report:
    """One server whose store grows beside it, as if by its other workers.

    The process itself keeps the last 1,024 plans that it used ready, so what is read from the store is
    asked for once.
    """
    numbers, requests = ((1, 50), 4) if options.smoke else (NUMBERS, REQUESTS)
    path = corpus.make(options.cache, 10**6 if options.smoke else 10**8)
    found: list[dict[str, Any]] = []
    with serving({corpus.NAME: path}) as server, PlanStore(server.state_dir) as store:
        plans = _plans(path)
        used = next(plans)
        store.add(used)
        kept = 1
        for number in numbers:
            times = _Times()
            while kept < number - options.rounds * requests:
                store.add(next(plans))
                kept += 1
            for _ in range(options.rounds):
                fresh = list(itertools.islice(plans, requests))
                for plan in fresh:
                    store.add(plan)
                kept += len(fresh)
                _ask(server, used.id, [plan.id for plan in fresh], times)
            found.append({"plans": kept, **times.summary()})
        if store.count() != kept:
            raise SystemExit(f"the store holds {store.count()} plans, {kept} were kept")
    return _report(found, options)


def _plans(path: Path) -> Iterator[Plan]:
    """Plans that differ in their seed, bound to the corpus."""
    with Corpus.open(path, name=corpus.NAME, dtype="uint16") as opened:
        fingerprints = {corpus.NAME: opened.fingerprint}
    for seed in itertools.count():
        yield plan_of(ROWS, SEQ_LEN, seed).bind(fingerprints)


def _ask(server: Server, used: str, fresh: Sequence[str], times: _Times) -> None:
    """One round of each kind."""
    with closing(server.connect()) as connection:
        steps = [batches_path(plan=used, step=step) for step in range(len(fresh))]
        timed_gets(connection, steps)
        paths = {
            "seen": steps,
            "kept": [batches_path(plan=plan_id, step=0) for plan_id in fresh],
            "listed": ["/v1/plans?limit=10"] * 5,
        }
        for kind, medians in times.rounds.items():
            medians.append(statistics.median(timed_gets(connection, paths[kind])))


def _report(found: list[dict[str, Any]], options: Options) -> Report:
    title = f"requests at a number of kept plans, ms, median of {options.rounds} rounds"
    return Report(
        data={"plans": found},
        tables=[
            Table(
                title=title,
                columns=["plans", *KINDS.values()],
                rows=[[f"{each['plans']:,}", *(_cell(each[kind]) for kind in KINDS)] for each in found],
            )
        ],
        targets=[
            Target(
                figure=f"{meaning}: at {found[-1]['plans']:,} plans, of {found[0]['plans']:,}",
                reached=found[-1][kind]["median_ms"] / found[0][kind]["median_ms"],
                bound="at most",
                wanted=MOST_OF_FIRST,
            )
            for kind, meaning in KINDS.items()
            if kind != "listed"  # no step waits for it
        ],
        plots=[Plot(name="growth-plans", draw=lambda figure: _draw(figure, found))],
    )


def _cell(figures: dict[str, float]) -> str:
    return f"{figures['median_ms']:.2f} ({figures['lowest_ms']:.2f} - {figures['highest_ms']:.2f})"


def _draw(figure: Figure, found: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for kind, meaning in KINDS.items():
        axes.plot(
            [each["plans"] for each in found],
            [each[kind]["median_ms"] for each in found],
            marker="o",
            label=meaning.replace("`", ""),
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("plans in the store")
    axes.set_ylabel("ms")
    axes.legend()
