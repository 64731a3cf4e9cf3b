"""Every metric, declared once.

CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

from typing import Final

from corpus_server.errors import CorpusServerError
from corpus_server.metrics.kinds import (
    CorpusColumn,
    Counter,
    Curve,
    Gauge,
    Histogram,
    Shared,
    SharedGauge,
    sums,
)
from corpus_server.read import memory

MAX_PLANS: Final = 32
"""Plans, each with its run, that have labels of their own in a process; all others count as `other`."""

MAX_RANKS: Final = 512
"""Ranks that are kept of workers that have ended, those that asked last: about 70 kB."""

STAGES: Final = ("wait", "locate", "gather", "send")
"""Of a fast-path response: for a thread or staged extents, for where its rows lie, for its tokens, for the
kernel."""

REQUESTS: Final = Counter("corpus_requests", "requests answered", "route", "status", "via")
REQUEST_SECONDS: Final = Histogram(
    "corpus_request_seconds", "from the request's head to the last byte handed to the kernel", "route"
)
SENT_BYTES: Final = Counter("corpus_sent_bytes", "body bytes sent", "route", live=[Curve(per_second=True)])
TOKENS: Final = Counter(
    "corpus_tokens",
    "tokens sent; tokens of a mixture are divided by the exact weights of the plan's stage",
    "corpus",
    live=[Curve("Tokens per second", per_second=True), CorpusColumn("tokens/s", per_second=True)],
)
DOCUMENTS: Final = Counter(
    "corpus_documents",
    "documents sent by `/v1/corpora/{name}/documents/{number}`, each as a whole",
    "corpus",
    live=[CorpusColumn("documents sent")],
)
PLAN_TOKENS: Final = Counter("corpus_plan_tokens", "tokens sent", "plan", "run", max_ended=MAX_PLANS + 1)
STAGE_SECONDS: Final = Histogram(
    "corpus_stage_seconds",
    "where the time of a fast-path response goes: `wait` for a thread or staged extents, `locate` rows, "
    "`gather` and hash tokens, `send`",
    "stage",
)
READS: Final = Counter(
    "corpus_reads",
    "pieces copied from the files; `miss`: at least one page had to be read from disk",
    "cache",
)
MAJOR_FAULTS: Final = Counter("corpus_major_faults", "pages that had to be read from disk during a copy")
READ_AHEAD_BYTES: Final = Counter(
    "corpus_read_ahead_bytes", "bytes of windows that the kernel was asked for ahead of requests"
)
STAGED_BYTES: Final = Counter(
    "corpus_staged_bytes", "bytes that have come from object stores", live=[Curve(per_second=True)]
)
FOUND_BYTES: Final = Counter(
    "corpus_found_bytes",
    "bytes of extents that were in the cache when a worker first needed them for a plan: fetched before, by "
    "another worker, or by `stage`",
    live=[Curve(per_second=True)],
)
STAGED_EXTENTS: Final = Counter("corpus_staged_extents", "extents that have come from object stores")
STAGING_WAITS: Final = Counter("corpus_staging_waits", "responses that had to wait for a shard")
EVICTED_EXTENTS: Final = Counter(
    "corpus_evicted_extents", "extents removed from the cache to make room for others"
)
HELD_EXTENTS: Final = SharedGauge(
    "corpus_held_extents", "extents in the cache folder, with those on their way", of=max
)
HELD_BYTES: Final = SharedGauge("corpus_held_bytes", "bytes of these extents", of=max)
CACHE_BYTES: Final = SharedGauge("corpus_cache_bytes", "bytes that the cache folder holds at most", of=max)
STAGED_STEPS: Final = SharedGauge(
    "corpus_staged_steps",
    "steps after the last request of a plan's slowest rank whose extents are in the cache, for a plan over "
    "object stores that is being read",
    "plan",
    of=min,
)
UNREAD_STEPS: Final = SharedGauge(
    "corpus_unread_steps",
    "steps until the slowest rank of such a plan has read the rows of a corpus once",
    "plan",
    "corpus",
    of=max,
)
ACTIVE: Final = Gauge("corpus_active_requests", "requests under way", live=[Curve("Requests under way")])
BYTES_IN_FLIGHT: Final = Gauge(
    "corpus_bytes_in_flight", "bytes of the token responses under way", live=[Curve()]
)
STALE_TOKENS: Final = Gauge(
    "corpus_stale_tokens", "worker processes that could not read the present token file"
)
WORKERS: Final = Gauge("corpus_workers", "worker processes in the sum", number=1)
REFUSALS: Final = Counter(
    "corpus_refusals", "problem documents sent, by their type", "type", live=[Curve("Refusals")]
)

READS.pull(lambda: memory.READS.num_hits, "hit")
READS.pull(lambda: memory.READS.num_misses, "miss")
MAJOR_FAULTS.pull(lambda: memory.READS.num_faults)
_ERRORS: list[type[CorpusServerError]] = [CorpusServerError, *CorpusServerError.__subclasses__()]
for _error in _ERRORS:
    # In a series that begins with its first refusal, Prometheus would see no rise.
    REFUSALS.begin(_error.slug)


class _Ranks(Shared):
    """What each rank asked for. No metric, since there may be thousands: for `/v1/live`.

    A series is when a rank asked last (unix seconds), its last step, the step that it had trained (-1: not
    known), when its loader ended (0: it has not) and the step that it had yielded last, when it asked last
    without a step that it had trained, and three sums: steps, seconds in which responses were made, seconds
    of sending.
    """

    def add_up(self, a: list[float], b: list[float]) -> list[float]:
        """Return the numbers of two processes as one; the latest request counts, and the latest end."""
        return [*max(a[:3], b[:3]), *max(a[3:5], b[3:5]), max(a[5], b[5]), *sums(a[6:], b[6:])]


RANKS: Final = _Ranks("ranks", ("run", "plan", "world_size", "rank"), width=9, max_ended=MAX_RANKS)
