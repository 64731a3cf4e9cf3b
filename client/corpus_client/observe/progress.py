"""One line about a loader while it runs: by tqdm where it is installed, else plain text on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from corpus_client.observe.attribution import LoaderStats

EVERY_SECONDS = 1.0
PLAIN_EVERY_SECONDS = 10.0  # between lines that are not overwritten but follow one another, as in a job's log

T = TypeVar("T")


def line(stats: LoaderStats) -> str:
    """Return `12.3 M tokens/s, 4% waiting (network), 31/31 slots ready`. stats: of the time shown."""
    cause = stats.wait.cause
    why = f" ({cause})" if cause and stats.wait_share >= 0.005 else ""
    return (
        f"{stats.tokens_per_second / 1e6:,.1f} M tokens/s, {stats.wait_share:.0%} waiting{why}, "
        f"{stats.ready_slots}/{stats.num_slots} slots ready"
    )


def shown(batches: Iterator[T], stats: Callable[[], LoaderStats], total: int | None) -> Iterator[T]:
    """Yield the batches, unchanged, and show a line now and then; `total` of them, if that is known."""
    bar: Any = None
    every_seconds = PLAIN_EVERY_SECONDS
    with suppress(ImportError):
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

        bar, every_seconds = tqdm(total=total, unit="step", dynamic_ncols=True), EVERY_SECONDS

    def show(steps: int, since: LoaderStats) -> LoaderStats:
        now = stats()
        if bar is None:
            print(f"{steps:,} steps: {line(now.since(since))}", file=sys.stderr)  # noqa: T201
        else:
            bar.set_postfix_str(line(now.since(since)), refresh=False)
            bar.update(steps - bar.n)
        return now

    before, shown_at, steps = stats(), time.monotonic(), 0
    try:
        for steps, batch in enumerate(batches, 1):
            if time.monotonic() - shown_at >= every_seconds:
                before, shown_at = show(steps, before), time.monotonic()
            yield batch
        if steps:
            show(steps, before)
    finally:
        if bar is not None:
            bar.close()
