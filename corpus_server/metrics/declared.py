"""Every metric, declared once: CONTRIBUTING.md says how to add one."""

from __future__ import annotations

from typing import Final

from corpus_server.errors import CorpusServerError
from corpus_server.metrics.kinds import CorpusColumn, Counter, Curve, Gauge, Histogram
from corpus_server.read import gather

MAX_PLANS: Final = 32
"""Plans that have a label of their own in a process; what others read is counted as `other`."""

STAGES: Final = ("wait", "locate", "gather", "send")
"""Of a fast-path response: for a thread or staged shards, for where its rows lie, for its tokens, for the
kernel."""

REQUESTS: Final = Counter("corpus_requests", "requests answered", "route", "status", "via")
REQUEST_SECONDS: Final = Histogram(
    "corpus_request_seconds", "from the request's head to the last byte handed to the kernel", "route"
)
SENT_BYTES: Final = Counter("corpus_sent_bytes", "body bytes sent", "route")
TOKENS: Final = Counter(
    "corpus_tokens",
    "tokens sent; those of a mixture by the exact weights of the plan's stage",
    "corpus",
    live=[Curve("Tokens per second", per_second=True), CorpusColumn("tokens/s", per_second=True)],
)
PLAN_TOKENS: Final = Counter("corpus_plan_tokens", "tokens sent", "plan", max_ended=MAX_PLANS + 1)
STAGE_SECONDS: Final = Histogram(
    "corpus_stage_seconds",
    "where the time of a fast-path response goes: `wait` for a thread or staged shards, `locate` rows, "
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
STAGED_BYTES: Final = Counter("corpus_staged_bytes", "bytes that have come from object stores")
STAGED_SHARDS: Final = Counter("corpus_staged_shards", "shards that have come from object stores")
STAGING_WAITS: Final = Counter("corpus_staging_waits", "times that a response had to wait for a shard")
EVICTED_SHARDS: Final = Counter(
    "corpus_evicted_shards", "shards removed from the cache to make room for others"
)
ACTIVE: Final = Gauge("corpus_active_requests", "requests under way", live=[Curve("Requests under way")])
BYTES_IN_FLIGHT: Final = Gauge("corpus_bytes_in_flight", "bytes of the token responses under way")
STALE_TOKENS: Final = Gauge(
    "corpus_stale_tokens", "worker processes that cannot take up the file of tokens as it is now"
)
WORKERS: Final = Gauge("corpus_workers", "worker processes that count", number=1)
REFUSALS: Final = Counter(
    "corpus_refusals", "problem documents sent, by their type", "type", live=[Curve("Refusals")]
)

READS.pull(lambda: gather.total("num_reads") - gather.total("num_cold_reads"), "hit")
READS.pull(lambda: gather.total("num_cold_reads"), "miss")
MAJOR_FAULTS.pull(lambda: gather.total("num_faults"))
_ERRORS: list[type[CorpusServerError]] = [CorpusServerError, *CorpusServerError.__subclasses__()]
for _error in _ERRORS:
    # In a series that begins with its first refusal, Prometheus would see no rise.
    REFUSALS.add(0, _error.slug)
