"""What each rank asked for and how long it took. No metric, since there may be thousands: for `/v1/live`."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from corpus_server.metrics.counting import PLAN_IDLE_SECONDS
from corpus_server.metrics.kinds import LOCK, Shared

MAX_RANKS = 512
"""Ranks that a process tells apart, about 70 kB of its file; of more, `/v1/live` shows the first."""


class Part(NamedTuple):
    """Which steps of which rank a response holds."""

    plan_id: str
    world_size: int
    rank: int
    last_step: int
    num_steps: int


class _Ranks(Shared):
    """A series is when a rank asked last (unix seconds), its last step, and three sums: steps, seconds in
    which responses were made, seconds of sending."""

    def __init__(self) -> None:
        super().__init__("ranks", ("plan", "world_size", "rank"), width=5, max_ended=MAX_RANKS)

    @staticmethod
    def add_up(a: list[float], b: list[float]) -> list[float]:
        """Return the numbers of two processes as one; the step that was asked for last counts."""
        return [*max(a[:2], b[:2]), *Shared.add_up(a[2:], b[2:])]


RANKS: Final = _Ranks()


def count_part(part: Part, *, making_seconds: float, sending_seconds: float) -> None:
    """Count a response to a rank that was sent.

    The step that was asked for last counts, whenever its response ended: the client may have the response,
    and the next one from another process, before this one comes here.
    """
    key = (part.plan_id, str(part.world_size), str(part.rank))
    series, now = RANKS.series, time.time()
    asked = [now - making_seconds - sending_seconds, part.last_step]
    with LOCK:
        before = series.pop(key, None)
        if before is None and len(series) >= MAX_RANKS:
            longest_ago = next(iter(series))
            if now - series[longest_ago][0] < PLAN_IDLE_SECONDS:
                return
            del series[longest_ago]
        its = [*asked, part.num_steps, making_seconds, sending_seconds]
        series[key] = its if before is None else RANKS.add_up(before, its)  # the last one now
