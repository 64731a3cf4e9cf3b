"""One server at one address: how fast it answers, how it fails, its connections. No I/O."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from corpus_client import errors
from corpus_client.network.endpoint import Endpoint
from corpus_client.network.transport import Connection

BACKOFF_FIRST_SECONDS = 0.05
BACKOFF_LAST_SECONDS = 2.0
PROBE_LAST_SECONDS = 30.0

RECENT = 5
"""Answers that tell what is usual."""

LATE_SECONDS = 0.5
"""A response that begins sooner is never late."""

LATE_TIMES = 4
"""Times the usual wait for a first byte: the longest of the last `RECENT_WAITS`, but for a tenth of them."""

RECENT_WAITS, KNOWN_WAITS = 50, 10
"""Of fewer than `KNOWN_WAITS`, nothing is usual: at the start of a run, files may still be on the disk."""

FORGET_SECONDS = 10.0
"""Half-life of a measurement: a replica that was 100 times slower is tried again after about a minute."""


class Latency:
    """Seconds from sending a request to the end of its response, as measured lately."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._measured_at = 0.0

    def add(self, seconds: float, now: float, *, waited: bool) -> None:
        """Keep a measurement. waited: False if the response had arrived before we checked.

        Such a response took at most as long, so it only counts if that is less than usual.
        """
        if waited or (self._recent and seconds < self._usual):
            self._recent.append(seconds)
            self._measured_at = now

    def expected(self, now: float) -> float:
        """Return the median of the last `RECENT`, halved for every `FORGET_SECONDS` since; 0: not known."""
        return self._usual * 0.5 ** ((now - self._measured_at) / FORGET_SECONDS) if self._recent else 0.0

    @property
    def _usual(self) -> float:
        return sorted(self._recent)[len(self._recent) // 2]


@dataclass(slots=True, eq=False)
class Replica:
    """One server at one address; guarded by the pool's lock."""

    endpoint: Endpoint
    latency: Latency = field(default_factory=Latency)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_WAITS))  # for first bytes
    # Open ones: `begin` sends on the last, an older one is closed behind its last response.
    connections: list[Connection] = field(default_factory=list)
    opening: Connection | None = None
    num_in_flight: int = 0
    num_failures: int = 0
    retry_at: float = 0.0  # `time.monotonic` seconds before which it is left alone
    probe_at: float = 0.0  # before it, replicas that work are preferred
    last_used: int = 0  # number of the request that was sent there last
    has_answered: bool = False  # once, rightly: it is a corpus-server
    plan_in_doubt: bool = False  # post the plan before the next request
    refused: Exception | None = None
    gone: bool = False  # its host's name has other addresses; closed once requests in flight are answered

    @property
    def usable(self) -> bool:
        """Return whether new requests may be sent there."""
        return self.refused is None and not self.gone

    def connection(self, *, idle: bool) -> Connection | None:
        """Return an open connection. idle: only one with no pending response."""
        eligible = self.connections if idle else self.connections[-1:]
        found = (each for each in reversed(eligible) if each.usable and not (idle and each.num_in_flight))
        return next(found, None)

    def late_after(self) -> float:
        """Return how many seconds without a first byte are far more than usual; infinite: not known."""
        if len(self.waits) < KNOWN_WAITS:
            return math.inf
        return max(LATE_SECONDS, LATE_TIMES * sorted(self.waits)[len(self.waits) * 9 // 10])

    def cost(self, now: float) -> tuple[bool, float, int, int]:
        """Return a key for `min`: healthy before failing, then the earliest response, then in turn."""
        expected = self.latency.expected(now) * (self.num_in_flight + 1)
        return self.probe_at > now, expected, self.num_in_flight, self.last_used

    def succeeded(self) -> None:
        """Forget failures."""
        self.has_answered = True
        self.num_failures = 0
        self.retry_at = self.probe_at = 0.0

    def leave_alone(self, error: Exception, now: float, longest: float) -> float:
        """Back off, for longer with each failure in a row; return the seconds.

        longest: to wait because the server asks for it, so that a request is tried again before its deadline.
        """
        doublings = min(self.num_failures, 16)
        self.num_failures += 1
        delay = min(BACKOFF_LAST_SECONDS, BACKOFF_FIRST_SECONDS * 2.0**doublings) * random.uniform(0.5, 1.0)
        if isinstance(error, errors.ServerError) and error.retry_after_seconds is not None:
            # Ranks in step are refused together, and must not come back together.
            delay = max(delay, min(error.retry_after_seconds, longest) * random.uniform(1.0, 1.5))
        self.retry_at = now + delay
        # While others work, a failing replica is probed ever more rarely.
        self.probe_at = now + max(delay, min(PROBE_LAST_SECONDS, 2.0**doublings))
        return delay


def may_pass(error: Exception) -> bool:
    """Return whether the same request may succeed later or elsewhere."""
    if isinstance(error, errors.ServerError):
        return error.passing or isinstance(error, errors.UnknownPlan)
    return isinstance(error, errors.TransportError)
