"""What a worker process counts, and the sums over several."""

from corpus_server.metrics.declared import (
    ACTIVE,
    BYTES_IN_FLIGHT,
    EVICTED_SHARDS,
    RANKS,
    READ_AHEAD_BYTES,
    REFUSALS,
    STAGED_BYTES,
    STAGED_SHARDS,
    STAGES,
    STAGING_WAITS,
    STALE_TOKENS,
    count,
    count_stages,
    count_tokens,
)
from corpus_server.metrics.shared import FOLDER_VARIABLE, PUBLISH_SECONDS, add_ended, publish, render

__all__ = [
    "ACTIVE",
    "BYTES_IN_FLIGHT",
    "EVICTED_SHARDS",
    "FOLDER_VARIABLE",
    "PUBLISH_SECONDS",
    "RANKS",
    "READ_AHEAD_BYTES",
    "REFUSALS",
    "STAGED_BYTES",
    "STAGED_SHARDS",
    "STAGES",
    "STAGING_WAITS",
    "STALE_TOKENS",
    "add_ended",
    "count",
    "count_stages",
    "count_tokens",
    "publish",
    "render",
]
