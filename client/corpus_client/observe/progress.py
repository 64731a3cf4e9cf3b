"""One line about a loader while it runs: by tqdm where it is installed, else plain text on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from corpus_client.observe.attribution import LoaderStats

EVERY_SECONDS = 1.0
PLAIN_EVERY_SECONDS = 10.0  # between lines that are not overwritten but follow one another, as in a job's log

T = TypeVar("T")

Show = Callable[[int, str], None]  # shows a line; the number is of all steps so far


def line(stats: LoaderStats) -> str:
    """Return `12.3 M tokens/s, 4% waiting (network), 30/31 slots ready`. stats: of the time shown."""
    cause = stats.wait.cause
    why = f" ({cause})" if cause and stats.wait_share >= 0.005 else ""
    return (
        f"{stats.tokens_per_second / 1e6:,.1f} M tokens/s, {stats.wait_share:.0%} waiting{why}, "
        f"{stats.ready_slots}/{stats.num_slots} slots ready"
    )


@contextmanager
def tqdm_or_text(total: int | None) -> Iterator[tuple[float, Show]]:
    """Open tqdm's bar, or stderr: seconds between lines, and what shows one."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        yield PLAIN_EVERY_SECONDS, lambda steps, text: print(f"{steps:,} steps: {text}", file=sys.stderr)  # noqa: T201
        return
    with tqdm(total=total, unit="step", dynamic_ncols=True) as bar:

        def show(steps: int, text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(steps - bar.n)

        yield EVERY_SECONDS, show


def shown(
    batches: Iterator[T],
    stats: Callable[[], LoaderStats],
    total: int | None,
    display: Callable[[int | None], AbstractContextManager[tuple[float, Show]]] = tqdm_or_text,
) -> Iterator[T]:
    """Yield the batches, unchanged, and show a line now and then; `total` of them, if that is known."""
    with display(total) as (every_seconds, show):
        before, shown_at, steps = stats(), time.monotonic(), 0
        for steps, batch in enumerate(batches, 1):
            now = time.monotonic()
            if now - shown_at >= every_seconds:
                after = stats()
                show(steps, line(after.since(before)))
                before, shown_at = after, now
            yield batch
        if steps:
            show(steps, line(stats().since(before)))
