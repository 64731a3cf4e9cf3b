"""What counts more than one metric at a time, or bounds the values of a label."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache

from corpus_server.metrics.declared import (
    MAX_PLANS,
    PLAN_TOKENS,
    REQUEST_SECONDS,
    REQUESTS,
    SENT_BYTES,
    STAGE_SECONDS,
    STAGES,
    TOKENS,
)
from corpus_server.metrics.kinds import LOCK
from corpus_server.read.bound_plan import Source

PLAN_IDLE_SECONDS = 600.0
"""A plan that is not read for so long gives its label to another one. Prometheus forgets after 300 s."""

_pending: dict[Source, int] = {}  # tokens since the last look, under the lock
_plans: OrderedDict[str, float] = OrderedDict()  # with a label: when they were read last, longest ago first


def count(route: str, status: int, sent_bytes: int, seconds: float, *, via: str) -> None:
    """Count one request that was answered; for the event loop's thread.

    Args:
        route: template of the path.
        sent_bytes: of its body.
        seconds: see `corpus_request_seconds`.
        via: which path answered, `fast-path` or `application`.
    """
    requests, sent, observe = _series(route, status, via)
    requests[0] += 1
    sent[0] += sent_bytes
    observe(seconds)


def count_stages(seconds: Iterable[float]) -> None:
    """Count the stages of a response, in the order of `STAGES`; for the event loop's thread."""
    for observe, each in zip(_stages(), seconds, strict=True):
        observe(each)


def count_tokens(source: Source, num_tokens: int) -> None:
    """Count tokens that were sent."""
    with LOCK:
        _pending[source] = _pending.get(source, 0) + num_tokens


@cache
def _series(route: str, status: int, via: str) -> tuple[list[float], list[float], Callable[[float], None]]:
    # Looking one up by its labels costs more than counting; there are as many as routes and statuses.
    with LOCK:
        requests = REQUESTS.series.setdefault((route, str(status), via), [0.0])
        sent = SENT_BYTES.series.setdefault((route,), [0.0])
    return requests, sent, REQUEST_SECONDS.observer(route)


@cache
def _stages() -> tuple[Callable[[float], None], ...]:
    return tuple(STAGE_SECONDS.observer(stage) for stage in STAGES)


def settle_tokens() -> None:
    """Add the tokens that were sent to their corpora and plans."""
    with LOCK:
        now = time.monotonic()
        by_plan, by_corpus = PLAN_TOKENS.series, TOKENS.series
        for source, num_tokens in _pending.items():
            for corpus, share in source.shares.items():
                by_corpus.setdefault((corpus,), [0.0])[0] += share * num_tokens
            if not source.plan_id:
                continue  # a range of a corpus
            if source.plan_id not in _plans and len(_plans) >= MAX_PLANS:
                oldest, read_at = next(iter(_plans.items()))
                if now - read_at > PLAN_IDLE_SECONDS:
                    del _plans[oldest]
                    by_plan.pop((oldest,), None)
            has_label = source.plan_id in _plans or len(_plans) < MAX_PLANS
            if has_label:
                _plans[source.plan_id] = now
                _plans.move_to_end(source.plan_id)
            by_plan.setdefault((source.plan_id if has_label else "other",), [0.0])[0] += num_tokens
        _pending.clear()
