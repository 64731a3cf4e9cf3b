"""Take batches from several iterators in turns, and compare their times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

ROWS, SEQ_LEN = 64, 1024
PREFETCH_BYTES = 4 << 20
"""Of each loader: about 30 batches, so that few of a turn's batches were fetched during the others' turns."""

DRAINED = 100
"""Batches at the beginning of a turn that are not timed, because they were fetched ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where the batches come from: a server, and the plan by the arguments of a loader."""

    url: str
    plan: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One way of getting batches.

    Args:
        distribution: of the framework whose version is reported.
        open: returns an endless iterator of batches, as a training loop in the framework sees it; what it
            opens is closed by the stack.
        baseline: name of the loader that it stands on.
    """

    distribution: str
    open: Callable[[Source, ExitStack], Iterator[object]]
    baseline: str = "CorpusLoader"


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Microseconds per batch, one value for each round."""

    name: str
    version: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.values)


def measure(
    known: Mapping[str, Measured], source: Source, *, rounds: int, batches: int
) -> tuple[list[Times], dict[str, str]]:
    """Take `batches` batches of each in turn, `rounds` times; return times, and why others were left out."""
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        running: dict[str, Iterator[object]] = {}
        for name, each in known.items():
            try:
                version(each.distribution)
                running[name] = each.open(source, stack)
            except (PackageNotFoundError, ImportError) as error:
                left_out[name] = f"{type(error).__name__}: {error}"
        values: dict[str, list[float]] = {name: [] for name in running}
        for _ in range(rounds):
            for name, iterator in running.items():
                for _ in range(DRAINED):
                    next(iterator)
                began = time.perf_counter()
                for _ in range(batches):
                    next(iterator)
                values[name].append(1e6 * (time.perf_counter() - began) / batches)
    return [
        Times(
            name=name,
            version=f"{known[name].distribution} {version(known[name].distribution)}",
            values=tuple(found),
        )
        for name, found in values.items()
    ], left_out


def table(known: Mapping[str, Measured], found: list[Times]) -> list[str]:
    """Return a Markdown table: each beside the loader that it stands on."""
    medians = {each.name: each.median for each in found}
    lines = ["| | version | µs per batch, median (range) | added to the loader, µs |", "|---|---|--:|--:|"]
    for each in found:
        baseline = known[each.name].baseline
        added = "" if baseline == each.name else f"{each.median - medians[baseline]:+.0f}"
        spread = f"{each.median:.0f} ({min(each.values):.0f} - {max(each.values):.0f})"
        lines.append(f"| {each.name} | {each.version} | {spread} | {added} |")
    return lines
