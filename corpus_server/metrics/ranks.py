"""What each rank asked for and how long it took. No metric, since there may be thousands: for `/v1/live`."""

from __future__ import annotations

from typing import Final

from corpus_server.metrics.kinds import Shared

MAX_RANKS = 512
"""Ranks that are kept of workers that have ended, those that asked last: about 70 kB."""


class _Ranks(Shared):
    """A series is when a rank asked last (unix seconds), its last step, and three sums: steps, seconds in
    which responses were made, seconds of sending."""

    @staticmethod
    def add_up(a: list[float], b: list[float]) -> list[float]:
        """Return the numbers of two processes as one; the step that was asked for last counts."""
        return [*max(a[:2], b[:2]), *Shared.add_up(a[2:], b[2:])]


RANKS: Final = _Ranks("ranks", ("plan", "world_size", "rank"), width=5, max_ended=MAX_RANKS)
