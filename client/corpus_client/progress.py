"""One line about a loader while it runs: by tqdm where it is installed, else plain text on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol, TypeVar

from corpus_client.attribution import LoaderStats

EVERY_SECONDS = 1.0
PLAIN_EVERY_SECONDS = 10.0
"""Where lines are not overwritten but follow one another, in a job's log."""

T = TypeVar("T")


class Display(Protocol):
    """Where the line goes."""

    every_seconds: float

    def update(self, num_steps: int, line: str) -> None:
        """So many steps more, and how they went."""

    def close(self) -> None:
        """No more will come."""


def line(stats: LoaderStats) -> str:
    """`12.3 M tokens/s, 4 % waiting (network), 30/31 slots ready`; stats: of the time shown."""
    cause = stats.wait.cause
    why = f" ({cause})" if cause and stats.wait_share >= 0.005 else ""
    return (
        f"{stats.tokens_per_second / 1e6:,.1f} M tokens/s, {stats.wait_share:.0%} waiting{why}, "
        f"{stats.ready_slots}/{stats.num_slots} slots ready"
    )


def shown(
    batches: Iterator[T],
    stats: Callable[[], LoaderStats],
    total: int | None,
    display: Display | None = None,
) -> Iterator[T]:
    """The batches, unchanged, with a line now and then.

    Args:
        stats: the counters at this moment.
        total: how many batches will come; None: not known.
    """
    with closing(display if display is not None else _display(total)) as shows:
        before, shown_at, num_steps = stats(), time.monotonic(), 0
        for batch in batches:
            num_steps += 1
            now = time.monotonic()
            if now - shown_at >= shows.every_seconds:
                after = stats()
                shows.update(num_steps, line(after.since(before)))
                before, shown_at, num_steps = after, now, 0
            yield batch
        if num_steps:
            shows.update(num_steps, line(stats().since(before)))


class Plain:
    """Lines of text."""

    every_seconds = PLAIN_EVERY_SECONDS

    def __init__(self) -> None:
        self._num_steps = 0

    def update(self, num_steps: int, line: str) -> None:
        """Write a line."""
        self._num_steps += num_steps
        print(f"{self._num_steps:,} steps: {line}", file=sys.stderr, flush=True)  # noqa: T201

    def close(self) -> None:
        """Nothing to release."""


class Bar:
    """tqdm's bar. make: its class."""

    every_seconds = EVERY_SECONDS

    def __init__(self, make: Any, total: int | None) -> None:
        self._bar = make(total=total, unit="step", dynamic_ncols=True)

    def update(self, num_steps: int, line: str) -> None:
        """Move the bar."""
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(num_steps)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _display(total: int | None) -> Display:
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return Plain()
    return Bar(tqdm, total)
